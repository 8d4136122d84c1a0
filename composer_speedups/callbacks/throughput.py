"""Training throughput in the steady state, and the time spent on everything else."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partialmethod
from typing import Any, ClassVar

import torch
from composer.core import Event, State
from composer.loggers import Logger
from composer.utils import dist
from torch._dynamo.utils import counters

from composer_speedups.callbacks.config import FIRST_VALUE_BY, ThroughputConfig
from composer_speedups.callbacks.peaks import Peak, device_peak, precision_in_force
from composer_speedups.callbacks.saved_callback import SavedCallback
from composer_speedups.core.compile_counts import capture_seconds
from composer_speedups.core.trainer_state import device_of, model_of
from composer_speedups.families.flops import batch_lengths, training_flops
from composer_speedups.packing.labelled_head import head_tokens

__all__ = ["Batch", "PhaseClock", "ThroughputMonitor"]

# Event → the phase that it begins. A phase lasts until the next listed event. Checkpoints are written at the two
# CHECKPOINT events by a callback that runs after this one, so their phase lasts until any later event.
_BEGINS = {
    Event.FIT_START: "start",
    Event.EPOCH_START: "between",
    Event.BEFORE_DATALOADER: "data",
    Event.AFTER_DATALOADER: "step",
    Event.BATCH_END: "between",
    Event.EVAL_BEFORE_ALL: "eval",
    Event.EVAL_AFTER_ALL: "between",
    Event.BATCH_CHECKPOINT: "checkpoint",
    Event.EPOCH_END: "between",
    Event.EPOCH_CHECKPOINT: "checkpoint",
    Event.ITERATION_END: "between",
    Event.FIT_END: "done",
}


class PhaseClock:
    """Measures the seconds spent in each phase: ``start``, ``data``, ``step``, ``eval``, ``checkpoint``, ``between``.

    Args:
        now: Returns the time in seconds; replaced in tests.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self._phase: str | None = None
        self._since = 0.0
        self._in_fit = True  # or evaluating outside of fit()
        self.seconds: dict[str, float] = defaultdict(float)

    def event(self, event: Event) -> None:
        """End the phase that this event ends, and begin the next one."""
        phase = _BEGINS.get(event)
        if phase is None or (self._phase == "eval" and event != Event.EVAL_AFTER_ALL):
            return  # evaluation has its own BEFORE_DATALOADER and AFTER_DATALOADER events
        if event == Event.EVAL_BEFORE_ALL:
            self._in_fit = self._phase is not None
        elif event == Event.EVAL_AFTER_ALL and not self._in_fit:
            phase = "done"
        now = self.now()
        if self._phase is not None:
            self.seconds[self._phase] += now - self._since
        self._phase, self._since = (None, now) if phase == "done" else (phase, now)

    def skip(self, seconds: float) -> None:
        """Do not attribute the last seconds to the current phase."""
        self._since += seconds

    def take(self) -> dict[str, float]:
        """Return and reset the seconds spent in each phase."""
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


@dataclass
class Batch:
    """One training batch on one rank. Times are in seconds."""

    index: int
    samples: int
    tokens: int  # without padding
    slots: int  # token positions with padding
    flops: int
    data: float  # waiting for the DataLoader
    step: float  # transfer, forward, backward, optimizer
    # host time since the previous batch (loggers, callbacks, start of an epoch); not included in any rate
    between: float
    steady: bool
    idle: float = 0.0  # time without work for the GPU before the batch's first forward pass

    @property
    def seconds(self) -> float:
        return self.data + self.step


def gather_batches(batches: Sequence[Batch]) -> list[list[tuple[Any, ...]]]:
    """Gather the batches of every rank. Collective. Needed because a checkpoint holds only one rank's callbacks."""
    return dist.all_gather_object([astuple(batch) for batch in batches])


def own_batches(gathered: Sequence[Sequence[Sequence[Any]]]) -> list[Batch]:
    """This rank's batches from :func:`gather_batches`; empty if they were trained with another number of ranks."""
    if len(gathered) != dist.get_world_size():
        return []
    return [Batch(*row) for row in gathered[dist.get_global_rank()]]


class ThroughputMonitor(ThroughputConfig, SavedCallback, eq=False):
    """Logs samples/s, real tokens/s, padding, MFU, and the time that is not spent on training.

    Rates are samples (or tokens) divided by the time of training steps *and* of waiting for data. Evaluation and
    checkpoint writing are excluded and logged separately. The first ``warmup_batches`` batches, batches in which
    torch.compile compiled, and captures of CUDA graphs do not count as steady state: they are excluded from the rates
    and add up to ``warmup_seconds``. With several ranks, a batch is also excluded if another rank compiled or captured
    in it, since all ranks wait; this is known only at the end, and values logged earlier are not corrected. The first
    value is logged before batch 10.

    The monitor synchronizes with the GPU at the end of each batch outside the steady state, before an evaluation and at
    the end, so that asynchronous steps are not missed. The GPU's work that is unfinished when a checkpoint is written,
    or when a callback reads a value between batches, counts in that phase.

    Logged for each batch, over the last ``window`` steady batches and all ranks: ``throughput/samples_per_sec``,
    ``throughput/samples_per_sec_step`` (without waiting for data), ``throughput/tokens_per_sec`` (real tokens),
    ``throughput/padding_fraction``, ``throughput/mfu`` (if the model's FLOPs are known), ``throughput/step_seconds``,
    ``throughput/data_seconds``, ``throughput/data_wait_fraction`` (fraction of that time spent waiting for data) and
    ``throughput/between_batches_seconds`` (host time from the end of a batch until the next one is requested: loggers,
    callbacks, start of an epoch; without evaluation and checkpoints; not included in any rate). On a GPU,
    ``throughput/gpu_idle_seconds`` is the time from the end of a batch's GPU work until that of the next forward pass
    begins, apart from evaluations: if it is not near 0, the GPU waits for the host, that is for data, callbacks or
    Python. It is measured with CUDA events and does not synchronize. For the batch alone:
    ``throughput/data_wait_seconds``, measured on the host, while a GPU may still be computing. Totals so far:
    ``throughput/warmup_seconds``, ``throughput/eval_seconds``, ``throughput/checkpoint_seconds``.

    Args:
        window: Number of batches that a logged rate averages over. Default 20.
        warmup_batches: Number of initial batches excluded from the steady state, 0 to 8. Default 3.
    """

    checkpoint_fields: ClassVar[dict[str, Any]] = {
        "batches": list[list[tuple[int, int, int, int, int, float, float, float, bool, float]]],  # rank → its batches
        "eval_marks": list[int],
        "totals": dict[str, float],
        "unsteady": float,
        "peak": tuple[float, str, str] | None,
    }

    def reset(self) -> None:
        self.batches: list[Batch] = []
        self.eval_marks: list[int] = []  # numbers of training batches that were followed by an evaluation
        self.clock = PhaseClock()
        self.totals: dict[str, float] = defaultdict(float)  # seconds per phase
        self._peak: Peak | None = None
        self._peak_is_here = False  # or from an earlier process, which may have run on another GPU
        self._lengths: torch.Tensor | None = None
        self._slots = self._flops = self._graphs = 0
        self._capturing = 0.0  # total seconds of captures so far
        self._unsteady = 0.0  # total seconds of batches outside the steady state
        self._resumed = 0  # batches of earlier processes
        self._ended: Any = None  # CUDA event at the end of the last batch
        self._gaps: list[tuple[int, Any, Any]] = []  # position of a batch, and CUDA events around the time before it
        self._summary: dict[str, Any] = {}

    def fit_start(self, state: State, logger: Logger) -> None:
        self.clock.event(Event.FIT_START)
        self._graphs, self._capturing = counters["stats"]["unique_graphs"], capture_seconds()

    def _clock(self, event: Event, state: State, logger: Logger) -> None:
        self.clock.event(event)

    epoch_start = partialmethod(_clock, Event.EPOCH_START)
    before_dataloader = partialmethod(_clock, Event.BEFORE_DATALOADER)
    batch_checkpoint = partialmethod(_clock, Event.BATCH_CHECKPOINT)
    epoch_end = partialmethod(_clock, Event.EPOCH_END)
    epoch_checkpoint = partialmethod(_clock, Event.EPOCH_CHECKPOINT)
    iteration_end = partialmethod(_clock, Event.ITERATION_END)

    def after_dataloader(self, state: State, logger: Logger) -> None:
        self.clock.event(Event.AFTER_DATALOADER)

    def batch_start(self, state: State, logger: Logger) -> None:
        # while the batch is still on the host, and after unpadding has counted its rows
        self._lengths = batch_lengths(state.batch)
        self._slots = state.batch["input_ids"].numel() if self._lengths is not None else 0
        self._flops = _batch_flops(state, self._lengths)

    def before_forward(self, state: State, logger: Logger) -> None:
        if self._ended is not None:  # the first micro-batch
            self._gaps.append((len(self.batches), self._ended, _timed_event()))
            self._ended = None

    def _note_idle_time(self) -> None:
        """Note the GPU's idle time before the batches that have begun on it."""
        while self._gaps and self._gaps[0][2].query():
            position, ended, begun = self._gaps.pop(0)
            self.batches[position].idle = ended.elapsed_time(begun) / 1000

    def eval_before_all(self, state: State, logger: Logger) -> None:
        self._ended = None
        self._wait_for_step(state)
        self.clock.event(Event.EVAL_BEFORE_ALL)

    def eval_after_all(self, state: State, logger: Logger) -> None:
        self.clock.event(Event.EVAL_AFTER_ALL)
        if self.batches:
            self.eval_marks.append(self.batches[-1].index)
        if self._summary:  # if the last interval is incomplete, Composer evaluates after FIT_END
            self._summary["eval_seconds"] = self.totals["eval"] + self.clock.seconds["eval"]

    def _is_steady(self) -> bool:
        """Whether the batch that is about to end belongs to the steady state."""
        trained = len(self.batches) - self._resumed
        # a resumed run skips batches before its first one
        warm = trained >= max(self.warmup_batches, self._resumed > 0)
        alone = dist.get_world_size() == 1 or capture_seconds() == self._capturing  # other ranks wait for a capture too
        return warm and alone and counters["stats"]["unique_graphs"] == self._graphs

    def _wait_for_step(self, state: State) -> None:
        """Synchronize, so that the last batch includes the GPU's remaining work."""
        start = self.clock.now()
        _synchronize(device_of(state))
        waited = self.clock.now() - start
        if self.batches:
            self.batches[-1].step += waited
            self.clock.skip(waited)
            self._unsteady += 0.0 if self.batches[-1].steady else waited

    def batch_end(self, state: State, logger: Logger) -> None:
        if not self._is_steady():
            _synchronize(device_of(state))
        self.clock.event(Event.BATCH_END)
        phases = self.clock.take()
        for phase, seconds in phases.items():
            self.totals[phase] += seconds
        steady, self._graphs = self._is_steady(), counters["stats"]["unique_graphs"]
        capturing, self._capturing = capture_seconds() - self._capturing, capture_seconds()
        samples = state.timestamp.sample.value - state.previous_timestamp.sample.value  # type: ignore[union-attr]
        batch = Batch(
            index=state.timestamp.batch.value,
            samples=samples // dist.get_world_size(),
            tokens=0 if self._lengths is None else int(self._lengths.sum()),
            slots=self._slots,
            flops=self._flops,
            data=phases.get("data", 0.0),
            step=phases.get("step", 0.0) - capturing,
            between=phases.get("between", 0.0),
            steady=steady,
        )
        self.batches.append(batch)
        self._note_idle_time()
        self._ended = _timed_event() if device_of(state).type == "cuda" else None
        self._unsteady += capturing + (0.0 if batch.steady else batch.seconds)
        if not self._peak_is_here and batch.flops:
            self._peak_is_here = True
            self._peak = device_peak(precision_in_force(state), device_of(state))
        recent = [b for b in self.batches[-self.window :] if b.steady]
        if not recent and len(self.batches) >= FIRST_VALUE_BY:
            recent = self.batches[-self.window :]
        if recent:
            rates = self._rates(recent)
            rates["data_wait_seconds"] = batch.data
            logger.log_metrics({f"throughput/{k}": v for k, v in {**rates, **self._times()}.items()})

    def _rates(self, batches: Sequence[Batch], world: int | None = None) -> dict[str, float]:
        world = dist.get_world_size() if world is None else world
        seconds, steps = sum(b.seconds for b in batches), sum(b.step for b in batches)
        samples, tokens = sum(b.samples for b in batches), sum(b.tokens for b in batches)
        rates = {
            "samples_per_sec": world * samples / seconds,
            "samples_per_sec_step": world * samples / steps,
            "step_seconds": steps / len(batches),
            "data_seconds": (seconds - steps) / len(batches),
            "between_batches_seconds": sum(b.between for b in batches) / len(batches),
            "data_wait_fraction": (seconds - steps) / seconds,
        }
        if self._ended is not None:
            rates["gpu_idle_seconds"] = sum(b.idle for b in batches) / len(batches)
        if slots := sum(b.slots for b in batches):
            rates["tokens_per_sec"] = world * tokens / seconds
            rates["padding_fraction"] = 1 - tokens / slots
        if self._peak is not None:
            rates["mfu"] = sum(b.flops for b in batches) / seconds / self._peak.flops_per_sec
        return rates

    def _times(self) -> dict[str, float]:
        return {
            "warmup_seconds": self.totals["start"] + self._unsteady,
            "eval_seconds": self.totals["eval"],
            "checkpoint_seconds": self.totals["checkpoint"],
        }

    def fit_end(self, state: State, logger: Logger) -> None:
        self._wait_for_step(state)
        self.clock.event(Event.FIT_END)
        for phase, seconds in self.clock.take().items():
            self.totals[phase] += seconds
        self._note_idle_time()
        self._exclude_batches_unsteady_on_any_rank()
        steady = [b for b in self.batches if b.steady]
        measured = steady or self.batches
        if not measured:
            return
        # Ranks differ in tokens and in waiting for data; the rate of the run is that of all of them together.
        mine = torch.tensor(
            [[b.samples, b.tokens, b.slots, b.flops, b.data, b.step, b.between, b.idle] for b in measured]
        )
        sums = state.device.tensor_to_device(mine.double().sum(0))
        dist.all_reduce(sums, reduce_operation="SUM")
        samples, tokens, slots, flops, data, step, between, idle = sums.tolist()
        world = dist.get_world_size()
        total = Batch(0, int(samples), int(tokens), int(slots), int(flops), data, step, between, True)
        rates = self._rates([total], world=world)
        steps = [b.step for b in measured]
        self._summary = {
            **{k: rates[k] for k in ("samples_per_sec", "samples_per_sec_step")},
            **{k: rates.get(k) for k in ("tokens_per_sec", "padding_fraction", "mfu")},
            **self._times(),
            "data_seconds": data / world / len(measured),
            "between_batches_seconds": between / world / len(measured),
            "gpu_idle_seconds": idle / world / len(measured) if device_of(state).type == "cuda" else None,
            "data_wait_fraction": rates["data_wait_fraction"],
            "step_seconds": statistics.fmean(steps),
            "step_seconds_p10_p50_p90": torch.tensor(steps)
            .double()
            .quantile(torch.tensor([0.1, 0.5, 0.9]).double())
            .tolist(),
            "steady_batches": len(steady),
            "other_batches": len(self.batches) - len(steady),
            "peak": None if self._peak is None else self._peak._asdict(),
        }

    def _exclude_batches_unsteady_on_any_rank(self) -> None:
        # by their positions: fit(reset_time=True) numbers its batches from 1 again
        unsteady = [position for position, batch in enumerate(self.batches) if not batch.steady]
        anywhere = set().union(*dist.all_gather_object(unsteady))
        for position, batch in enumerate(self.batches):
            if batch.steady and position in anywhere:
                batch.steady = False
                self._unsteady += batch.seconds

    def state_dict(self) -> dict[str, Any]:
        phases = self.totals.keys() | self.clock.seconds.keys()
        return {
            "batches": gather_batches(self.batches),
            "eval_marks": list(self.eval_marks),
            "totals": {phase: self.totals[phase] + self.clock.seconds[phase] for phase in phases},
            "unsteady": self._unsteady,
            "peak": None if self._peak is None else tuple(self._peak),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not (before := own_batches(state.get("batches", []))):
            return
        self.batches, self._resumed = before, len(before)
        self.eval_marks = list(state["eval_marks"])
        self.totals.update(state["totals"])
        self._unsteady = state["unsteady"]
        self._peak = None if state["peak"] is None else Peak(*state["peak"])

    def summary(self) -> dict[str, Any]:
        """The ``throughput`` section of report.json: the steady state of all ``fit`` calls on all ranks.

        After a resume it covers all processes; ``warmup_seconds`` is their sum.
        """
        return dict(self._summary)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timed_event() -> torch.cuda.Event:
    """Record a CUDA event whose time can be read once it has completed."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _batch_flops(state: State, lengths: torch.Tensor | None) -> int:
    model: Any = model_of(state)
    if callable(getattr(model, "flops_per_batch", None)):
        return int(model.flops_per_batch(state.batch))
    config = getattr(getattr(model, "model", None), "config", None)
    if lengths is None or not hasattr(config, "num_hidden_layers"):
        return 0
    assert config is not None
    if type(model.model).__name__.endswith("ForMaskedLM"):
        return training_flops(config, lengths, "mlm", head_tokens(model, state.batch))
    return training_flops(config, lengths, "classification")
