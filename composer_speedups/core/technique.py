"""The base class of all techniques, engaged or refused and never silently neither; and the one order they engage in.

Without the passes :func:`refuse_clashes` and :func:`sort_techniques`, which train.py gives to Composer's Trainer, the
order still holds: whichever technique Composer runs first at INIT engages all of them.
"""

from __future__ import annotations

import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import IntEnum
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar, Literal

from composer.core import Algorithm, Callback, Event, State
from composer.loggers import Logger
from composer.utils.reproducibility import seed_context
from pydantic import Field

from composer_speedups.core.declaration import Declared
from composer_speedups.core.errors import ConfigError, NotEngagedError, TechniqueError
from composer_speedups.core.requirements import Context, Requirement

__all__ = [
    "FSDP",
    "Conflict",
    "Exactness",
    "OnUnavailable",
    "Stage",
    "Technique",
    "Variant",
    "conflicts_between",
    "engage_all",
    "refuse_clashes",
    "resume_error",
    "screen",
    "sort_techniques",
    "techniques_of",
]

OnUnavailable = Literal["stop", "warn"]
Exactness = Literal["exact", "rounding", "lower_precision", "recipe"]  # from the least change of numbers to the most
FSDP = "FSDP"  # what a technique that needs whole weights is in conflict with

_BEFORE_FORWARD = (Event.BEFORE_FORWARD, Event.EVAL_BEFORE_FORWARD, Event.PREDICT_BEFORE_FORWARD)


class Stage(IntEnum):
    """When a technique engages. Within a stage the YAML name decides, so that any list gives one order."""

    FLAGS = 0  # process-wide flags and precision
    SURGERY = 1  # modules replaced
    KERNELS = 2  # layers computed by kernels that build on what surgery did
    ADAPTERS = 3  # parameters frozen or added
    OPTIMIZER = 4  # sees the final parameters
    COMPILE = 5  # sees the final modules
    GRAPHS = 6  # captures the final step


@dataclass(frozen=True)
class Conflict:
    """What a technique cannot go with; one of the two states it.

    Attributes:
        other: Name of the other technique, or :data:`FSDP`.
        why: The reason, as the end of "NAME clashes with OTHER: …".
        when: With which settings of the two, from the technique that states it and the other; None is with any.
        slot: In place of ``other`` and ``why``: what this technique sets, and every other one with the same slot.
    """

    other: str | None = None
    why: str = ""
    when: Callable[[Any, Any], bool] | None = None
    slot: str | None = None


@dataclass(frozen=True)
class Variant:
    """Settings of a technique that are worth a trial when a run is tuned.

    Attributes:
        settings: Constructor arguments.
        beside: Techniques that come with it, since it needs or wants them, each with its settings.
        device: ``cpu`` or ``cuda``, where it makes sense on one only.
        fallback: Tried only where the variant before it is refused.
        gain: Where it is not the technique's own.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    device: str | None = None
    fallback: bool = False
    gain: float | None = None


class Technique(Declared, Algorithm):
    """A Composer algorithm that shows it took effect.

    A subclass declares its settings and the class attributes below, and defines the methods it needs. It hears exactly
    the events of Composer whose methods it defines while it is in force: ``before_forward(self, state)``,
    ``eval_batch_start(self, state)`` and so on, for any :class:`composer.Event` but INIT, at which it engages.
    ``match`` and ``apply`` are final.

    Attributes:
        name: The YAML name, and the folder's.
        stage: When it engages.
        exactness: What it does to the numbers; :meth:`exactness_with` where settings or device change that.
        conflicts: What it cannot go with.
        gain: Expected samples/s with it over those without it; decides which of tune's trials come first.
        trials: What of it tune tries.
        never_tried: Why tune tries nothing of it.
        changes_structure: A checkpoint's weights fit no model without the technique.
        computes_on_host: A part of the training step runs on the CPU.
        fixed_shapes: It holds what was made for one shape of batch: the micro-batch must stay as it is.
        checkpoint_fields: What :meth:`state_dict` holds, by name, each with its type. From a file that anybody may have
            written, train.py takes nothing else.
        engaged: None before INIT, then whether the technique is in force.
        applied: Whether it changed the run at INIT; stays True when it later turns out to have had no effect.
        evidence: What was replaced, seen or counted; goes to report.json.
        ended: In :meth:`verify`, whether training is over.
    """

    name: ClassVar[str]
    stage: ClassVar[Stage]
    exactness: ClassVar[Exactness]
    conflicts: ClassVar[tuple[Conflict, ...]] = ()
    gain: ClassVar[float] = 1.0
    trials: ClassVar[tuple[Variant, ...]] = (Variant(),)
    never_tried: ClassVar[str | None] = None
    changes_structure: ClassVar[bool] = False
    computes_on_host: ClassVar[bool] = False
    not_recorded: ClassVar[tuple[str, ...]] = ("on_unavailable",)
    checkpoint_fields: ClassVar[dict[str, Any]] = {
        "repr": str,
        "techniques": list[str],
        "evidence": dict[str, Any] | None,
    }
    _heard: ClassVar[frozenset[Event]]

    _: KW_ONLY
    on_unavailable: OnUnavailable = Field("stop")
    """What cannot engage stops the run with a TechniqueError; or it warns, and the run goes on without it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for final in ("match", "apply", "run_event"):
            if final in vars(cls):
                raise TypeError(
                    f"{cls.__name__}.{final} is not heard of: a technique defines a method for each event that it "
                    "hears, such as batch_end(self, state), and match and apply are final"
                )
        cls._heard = frozenset(event for event in Event if hasattr(cls, event.value))

    def reset(self) -> None:
        self.engaged: bool | None = None
        self.applied = self.ended = False
        self.evidence: dict[str, Any] = {}
        self.peers: list[str] = []
        self._verified = self._resumed = self._postponed = False
        self._evidence_before: dict[str, Any] | None = None  # of the process that was interrupted
        self._state: weakref.ref[State] | None = None  # of the Trainer it works in
        self._logger: weakref.ref[Logger] | None = None

    # What a technique defines.

    def requirements(self, context: Context) -> Iterable[Requirement]:
        """What the technique needs, checkable before the model is built."""
        return ()

    @abstractmethod
    def engage(self, state: State) -> dict[str, Any]:
        """Change ``state``; returns the first evidence. Raises TechniqueError when there is nothing to do."""

    @abstractmethod
    def verify(self, state: State) -> dict[str, Any]:
        """Evidence of the effect; called twice: after the first trained batch, and at the end of training.

        The first call comes after :meth:`postpone` a batch later, and the second once for each ``fit()``. It comes
        after the technique's own ``batch_end``, and before its ``fit_end``.

        Raises:
            NotEngagedError: (through :meth:`not_engaged`) when the technique had no effect.
        """

    def before_engaging(self, state: State) -> None:
        """Look at the model before any technique changes it."""

    def before_first_forward(self, event: Event, state: State) -> None:
        """Before any technique hears of a forward pass of the first trained batch, or of an evaluation before it."""

    def watch(self, state: State) -> None:
        """Look at the forward pass that comes next: each of the first trained batch, after ``before_forward``."""

    def stop_watching(self, state: State) -> None:
        """That forward pass is over; after ``after_forward``. One that raised leaves it to :meth:`close`."""

    def export(self, state: State, weights: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The stock model's state dict from the trained model's; on rank 0, for a model that goes to ``folder``.

        For techniques that change what the weights are called or how many there are. They may write what else
        belongs to the model beside ``folder``.
        """
        return weights

    def close(self) -> None:
        """Give back what outlives the Trainer; called when it closes, also after a run that raised."""

    @classmethod
    def exactness_with(cls, settings: Mapping[str, Any], device: str | None) -> Exactness:
        """What it does to the numbers with these settings on a ``cpu`` or ``cuda`` device; None is the worse one."""
        return cls.exactness

    @property
    def fixed_shapes(self) -> bool:
        return False

    # What its methods call.

    def postpone(self) -> None:
        """The first batch came to no step of the optimizer, and shows too little: verify after the next one."""
        self._postponed = not self._verified

    def unavailable(self, error: TechniqueError) -> None:
        """Stop the run, or mark the technique as not in force and warn, as ``on_unavailable`` says."""
        if self.on_unavailable == "stop":
            raise error
        if self.engaged is not False:
            going_on = "although" if isinstance(error, NotEngagedError) else "without"
            warnings.warn(f"going on {going_on} {error}", UserWarning, stacklevel=3)
        self.engaged = False
        self.evidence = {"unavailable": error.reason, "fix": error.fix}

    def not_engaged(self, reason: str, fix: str) -> NotEngagedError:
        return NotEngagedError(self.name, f"was applied but did not take effect: {reason}", fix)

    @contextmanager
    def refusals(self, fix: str = "take it out for this model") -> Iterator[None]:
        """Within, a ValueError of the technique's function says that it cannot engage; it may begin with its name."""
        try:
            yield
        except ValueError as error:
            raise TechniqueError(self.name, str(error).removeprefix(f"{self.name} "), fix) from error

    def log_metrics(self, metrics: dict[str, Any]) -> None:
        """Log numbers under the technique's name."""
        logger = self._logger() if self._logger is not None else None
        assert logger is not None, "an event is heard while the Trainer lives"
        logger.log_metrics({f"{self.name}/{key}": value for key, value in metrics.items()})

    # What Composer calls.

    def match(self, event: Event, state: State) -> bool:
        if event in (Event.INIT, Event.AFTER_LOAD, Event.FIT_END) or self._hears(event):
            return True
        if self._verified or not self.engaged:
            return False
        prepares = type(self).before_first_forward is not Technique.before_first_forward and event in _BEFORE_FORWARD
        return prepares or event in (Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.BATCH_END)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        hears, first = self._hears(event), not self._verified
        self._logger, self.ended = weakref.ref(logger), event == Event.FIT_END
        if event == Event.INIT:
            engage_all(state)
        elif event == Event.AFTER_LOAD:
            self._check_resume(state)
        elif event in _BEFORE_FORWARD and first:
            for technique in techniques_of(state.algorithms):  # all of them, before one prepares or watches the pass
                technique.before_first_forward(event, state)
        try:
            if event == Event.FIT_END:
                self._verify_at_the_end(state)
        finally:
            if hears:
                getattr(self, event.value)(state)
        if first and self.engaged:
            if event == Event.BEFORE_FORWARD:
                self.watch(state)
            elif event == Event.AFTER_FORWARD:
                self.stop_watching(state)
            elif event == Event.BATCH_END and self._postponed:
                self._postponed = False
            elif event == Event.BATCH_END:
                self._verify(state)

    def _hears(self, event: Event) -> bool:
        in_force = self.engaged or (self.applied and event == Event.FIT_END)  # which gives back what FIT_START took
        return bool(in_force) and event in self._heard

    def _verify_at_the_end(self, state: State) -> None:
        if not self._verified and self._evidence_before is not None:
            self.evidence.update(self._evidence_before)  # resumed with nothing left to train
        elif self.engaged:
            self._verify(state)

    def _verify(self, state: State) -> None:
        self._verified = True
        try:
            self.evidence.update(self.verify(state))
        except NotEngagedError as error:
            self.unavailable(error)

    @classmethod
    def required_on_load(cls) -> bool:
        """Composer's word for :attr:`changes_structure`.

        Composer adds such an algorithm by itself when a checkpoint was written with it, but looks for it among its
        own only; for ours, :meth:`load_state_dict` and EngagementReport stop the run instead.
        """
        return cls.changes_structure

    # The Trainer that it belongs to, and the checkpoint that says which techniques it was written under.

    def begin(self, state: State) -> None:
        """Belong to this Trainer; in another one than before, forget everything but the settings."""
        if self._state is not None and not self.belongs_to(state):
            self.close()
            self.reset()
        self._state = weakref.ref(state)

    def belongs_to(self, state: State) -> bool:
        return self._state is not None and self._state() is state

    def state_dict(self) -> dict[str, Any]:
        evidence = self.evidence if self._verified else self._evidence_before
        return {"repr": repr(self), "techniques": self.peers, "evidence": evidence}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed = True
        if state.get("techniques", self.peers) != self.peers:
            raise resume_error(state["techniques"], self.peers)
        self._evidence_before = state.get("evidence")

    def _check_resume(self, state: State) -> None:
        resuming = state.load_path is not None and state.timestamp.batch.value > 0
        if resuming and not self._resumed:
            raise resume_error([], self.peers)


def techniques_of(algorithms: Sequence[Algorithm]) -> list[Technique]:
    """The techniques of this package in a list of algorithms, in the order they engage."""
    return sorted((a for a in algorithms if isinstance(a, Technique)), key=lambda t: (t.stage, t.name))


def sort_techniques(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Composer pass: the techniques in their one order, in the places that techniques held before."""
    techniques = techniques_of(algorithms)
    if event.name.startswith("AFTER_") and event != Event.AFTER_LOAD:
        techniques.reverse()  # what was opened last before is closed first after, as Composer does it
    ordered = iter(techniques)
    return [next(ordered) if isinstance(a, Technique) else a for a in algorithms]


def conflicts_between(one: Any, other: Any) -> Iterator[tuple[Any, Any, Conflict]]:
    """Each conflict of two techniques, or of their classes: who states it, the other, and the conflict itself."""
    for states, meets in ((one, other), (other, one)):
        for conflict in states.conflicts:
            shared = conflict.slot is not None and any(theirs.slot == conflict.slot for theirs in meets.conflicts)
            if shared or conflict.other == meets.name:
                why = conflict.why or f"both set the {conflict.slot}"
                yield states, meets, replace(conflict, why=why)


def refuse_clashes(algorithms: Sequence[Algorithm], event: Event | None = None) -> Sequence[Algorithm]:
    """Composer pass: stop when two techniques cannot go together.

    Raises:
        TechniqueError: Names both techniques and the fix.
    """
    del event
    for one, other in combinations(techniques_of(algorithms), 2):
        if one.name == other.name:
            raise TechniqueError(one.name, "is asked for twice", "name it once")
        for states, meets, conflict in conflicts_between(one, other):
            if conflict.when is None or conflict.when(states, meets):
                raise TechniqueError(
                    one.name, f"clashes with {other.name}: {conflict.why}", f"take {one.name} or {other.name} out"
                )
    return algorithms


def screen(techniques: Sequence[Technique], context: Context) -> None:
    """Check conflicts and requirements, before anything is built or changed.

    A technique whose requirements are not met raises, or warns and is marked unavailable when its
    ``on_unavailable`` is ``"warn"``.
    """
    refuse_clashes(techniques)
    for technique in techniques_of(techniques):
        try:
            for conflict in technique.conflicts:
                if context.sharded and conflict.other == FSDP:
                    raise TechniqueError(technique.name, conflict.why, "train without FSDP (DDP works), or take it out")
            for met, reason, fix in technique.requirements(context):
                if not met:
                    stops = technique.on_unavailable == "stop"
                    other = ", or set on_unavailable=warn to go on without it" if stops else ""
                    raise TechniqueError(technique.name, reason, fix + other)
        except TechniqueError as error:
            technique.unavailable(error)
        else:
            context = replace(context, techniques=context.techniques | {technique.name})


def engage_all(state: State) -> None:
    """Engage every technique of ``state.algorithms`` in the one order; a second call does nothing."""
    techniques = techniques_of(state.algorithms)
    for technique in reversed(techniques):  # it undoes what an earlier Trainer left, as closing that one would
        technique.begin(state)
    if all(t.engaged is not None for t in techniques):
        return
    screen(techniques, Context.of(state))
    for technique in techniques:
        technique.before_engaging(state)
    state.callbacks.append(_TechniqueKeeper(techniques, state.algorithms))
    # Composer seeds each rank differently: DDP then copies rank 0's new weights to all, FSDP takes a shard of each.
    same_draws = nullcontext() if state.fsdp_config is None else seed_context(state.rank_zero_seed)
    with same_draws:
        for technique in techniques:
            technique.peers = sorted(map(repr, techniques))
            if technique.engaged is None:
                try:
                    technique.evidence.update(technique.engage(state))
                    technique.engaged = technique.applied = True
                except TechniqueError as error:
                    technique.unavailable(error)


def resume_error(recorded: list[str], current: list[str]) -> ConfigError:
    """The error of resuming under other techniques than the checkpoint's."""
    return ConfigError(
        f"the checkpoint was written with techniques [{', '.join(recorded)}] and this run has "
        f"[{', '.join(current)}]; resume with the same ones, or load the weights only"
    )


class _TechniqueKeeper(Callback):
    """Closes techniques with the Trainer, in the reverse of the order they engaged in, and has checkpoints list them.

    Algorithms have no close event, callbacks do. Nor is an algorithm told of a checkpoint that was written without it:
    this is, where any technique was in force then.
    """

    checkpoint_fields: ClassVar[dict[str, Any]] = {"techniques": list[str]}

    def __init__(self, techniques: Sequence[Technique], algorithms: Sequence[Algorithm]) -> None:
        self._techniques = techniques
        self._algorithms = algorithms  # the Trainer's own list: loading a checkpoint may add to it

    def state_dict(self) -> dict[str, Any]:
        return {"techniques": sorted(map(repr, techniques_of(self._algorithms)))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (recorded := state["techniques"]) != (current := self.state_dict()["techniques"]):
            raise resume_error(recorded, current)

    def close(self, state: State, logger: Logger) -> None:
        with ExitStack() as stack:  # the last engaged is undone first, and one that raises keeps no other from it
            for technique in self._techniques:
                if technique.belongs_to(state):  # not to a later Trainer, which closes it itself
                    stack.callback(technique.close)
