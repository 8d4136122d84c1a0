"""The one host of all techniques in Composer's Trainer.

It calls the events that they define, asks for proof after the first batch, keeps their state in checkpoints, and undoes
what they changed when the Trainer closes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

from composer.core import Algorithm, Callback, Event, State
from composer.loggers import Logger
from composer.utils.reproducibility import seed_context

from composer_speedups.core.engaging import ask, engage, had_no_effect, refuse_other_techniques, techniques_of
from composer_speedups.core.errors import Refusal
from composer_speedups.core.first_comparison import Comparison
from composer_speedups.core.observer import Observer
from composer_speedups.core.run import Run
from composer_speedups.core.technique import Technique
from composer_speedups.core.trainer_state import device_of, world_size

Algorithm.register(Technique)


def begin(state: State, logger: Logger) -> None:
    """Engage all techniques of a Trainer, at INIT. Later calls refuse techniques that were added since."""
    techniques = techniques_of(state.algorithms)
    if host_of(state) is not None:
        if late := [technique for technique in techniques if technique.engaged is None]:
            raise late[0].refusal("was added after the Trainer had begun", "pass it to the Trainer")
        return
    run = Run(
        device=device_of(state),
        precision=state.precision.value,
        model=state.model,
        optimizers=state.optimizers,
        ranks=world_size(),
        microbatch_size="auto" if state.auto_microbatching else state.device_train_microbatch_size,
        sharded=state.fsdp_config is not None or state.tp_config is not None,
        state=state,
        logger=logger,
    )
    # Composer seeds each rank differently. DDP then broadcasts rank 0's new weights; FSDP keeps a shard of each rank's.
    with nullcontext() if state.fsdp_config is None else seed_context(state.rank_zero_seed):
        comparison = engage(run, techniques)
    if list(run.optimizers) != list(state.optimizers):
        state.optimizers = run.optimizers  # type: ignore[assignment]
    state.callbacks.insert(0, Host(run, techniques, comparison))  # before those that read the evidence


def host_of(state: State) -> Host | None:
    """The host of a Trainer; None if it has no techniques, or before INIT."""
    return next((callback for callback in state.callbacks if isinstance(callback, Host)), None)


class Host(Callback):
    """Runs the techniques of one Trainer. It is first among the callbacks, so right after the algorithms.

    After the first batch, an event that no technique defines costs one look-up in a dictionary.
    """

    def __init__(self, run: Run, techniques: Sequence[Technique], comparison: Comparison) -> None:
        self.run = run
        self._techniques, self._comparison = techniques, comparison  # including those that the run continues without
        self._observer, self._waiting = Observer(run), dict(run.techniques)
        self._recorded: dict[str, dict[str, Any]] | None = None  # evidence of the process that was interrupted
        self._fill_table()

    def _fill_table(self) -> None:
        table: dict[Event, list[Callable[[], object]]] = {event: [] for event in Event}
        if self._comparison.due:
            for event in (Event.BEFORE_FORWARD, Event.EVAL_BEFORE_FORWARD, Event.PREDICT_BEFORE_FORWARD):
                table[event].append(partial(self._compare, event == Event.BEFORE_FORWARD))
        if self._waiting:
            table[Event.BATCH_START].append(self._observer.start)
            table[Event.AFTER_FORWARD].append(lambda: self._observer.outputs(self._state.outputs))
        table[Event.FIT_END].append(self._finish)
        for event, calls in table.items():
            techniques = list(self.run.techniques.values())
            if event.name.startswith("AFTER_") and event != Event.AFTER_LOAD:
                techniques.reverse()  # the last to start is the first to end, as in Composer
            methods = (getattr(technique, event.value, None) for technique in techniques)
            calls += [partial(method, self.run) for method in methods if method is not None]
        if self._waiting:
            table[Event.BATCH_END].append(self._prove)
        table[Event.AFTER_LOAD].insert(0, self._check_loaded)
        self._table = {event._value_: calls for event, calls in table.items() if calls}

    @property
    def _state(self) -> State:
        return cast(State, self.run.state)

    def hears(self, event: str) -> bool:
        return event in self._table

    @property
    def waits_for_proof(self) -> bool:
        """Whether a technique has not yet proved its effect, as when the learning rate warms up from 0."""
        return bool(self._waiting)

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        for call in self._table.get(event._value_, ()):  # hashing the event itself would run Python code
            call()

    def _compare(self, training: bool) -> None:
        self._comparison.make(self._state, training=training)
        self._fill_table()

    def _prove(self) -> None:
        if self._observer.stop():
            ask(self.run, self._waiting, self._observer.seen)
            self._fill_table()

    def _finish(self) -> None:
        self._observer.stop()
        if self._waiting and self._observer.batches:
            self._observer.seen.ended = True
            if not self._observer.seen.steps and self.run.precision == "amp_fp16":
                for technique in self._waiting.values():
                    technique.evidence["note"] = "no optimizer step was seen; fp16 skips steps whose gradients overflow"
            else:
                ask(self.run, self._waiting, self._observer.seen)
        elif self._recorded is not None:  # the resumed run had nothing left to train
            for technique in self._waiting.values():
                technique.evidence.update(self._recorded.get(technique.name, {}))
        for technique in self.run.techniques.values():
            if technique.engaged and technique.name not in self._waiting:
                try:
                    technique.evidence.update(technique.summary(self.run))
                except Refusal as error:
                    had_no_effect(technique, error)
        self._fill_table()

    def close(self, state: State, logger: Logger) -> None:
        self._observer.stop()
        self.run.undo.close()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        proven = {name: t.evidence for name, t in self.run.techniques.items() if name not in self._waiting}
        return {
            "techniques": sorted(map(repr, self._techniques)),
            "evidence": {**(self._recorded or {}), **proven},
            "state": {name: state for name, t in self.run.techniques.items() if (state := t.state(self.run))},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        refuse_other_techniques(state["techniques"], self._techniques)
        self._recorded = state["evidence"]
        for name, technique in self.run.techniques.items():
            if name in state["state"]:
                technique.load_state(self.run, state["state"][name])

    def _check_loaded(self) -> None:
        state = self._state
        if state.load_path is not None and state.timestamp.batch.value > 0 and self._recorded is None:
            refuse_other_techniques([], self._techniques)  # the checkpoint has no host's state
