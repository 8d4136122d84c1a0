"""Training throughput in the steady state, and the time spent on everything else."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from composer.core import State, TimeUnit
from composer.loggers import Logger
from composer.utils import dist

from composer_speedups.callbacks.checkpoints import SavedCallback
from composer_speedups.callbacks.config import FIRST_VALUE_BY, ThroughputConfig
from composer_speedups.callbacks.precision import Peak, device_peak, precision_in_force
from composer_speedups.core.compile_counts import graphs_so_far
from composer_speedups.core.trainer_state import device_of, model_of
from composer_speedups.families.flops import batch_lengths, flops_counter


class PhaseClock:
    """Measures the seconds spent in each phase: ``start``, ``data``, ``step``, ``eval``, ``checkpoint``, ``between``.

    A phase lasts until the next one begins. Those that begin in an evaluation are part of it.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self._phase: str | None = None
        self._since = 0.0
        self._in_fit = True  # or evaluating outside of fit()
        self.seconds: dict[str, float] = defaultdict(float)  # by phase, so far

    def begin(self, phase: str | None) -> None:
        """End the present phase and begin another one; None begins none. Does nothing in an evaluation."""
        if self._phase != "eval":
            self._begin(phase)

    def _begin(self, phase: str | None) -> None:
        now = self.now()
        if self._phase is not None:
            self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def begin_evaluation(self) -> None:
        self._in_fit = self._phase is not None
        self._begin("eval")

    def end_evaluation(self) -> None:
        self._begin("between" if self._in_fit else None)

    def skip(self, seconds: float) -> None:
        """Do not count the last seconds as the present phase."""
        self._since += seconds


class Backlog:
    """How long the GPU works on steady batches after the host has ended them, without waiting for it in each batch."""

    def __init__(self, record: Callable[[], Any], now: Callable[[], float]) -> None:
        self._record, self._now = record, now  # record returns a CUDA event of this moment
        self._idle: tuple[Any, float] | None = None  # a moment when the GPU had finished
        self._ended: tuple[Any, float] | None = None  # the end of the last batch

    def synchronized(self) -> None:
        """Note that the GPU has just finished."""
        self._idle, self._ended = (self._record(), self._now()), None

    def batch_ended(self) -> None:
        self._ended = self._record(), self._now()

    def seconds(self) -> float:
        """The seconds by which the GPU finished the last batch later than the host; the GPU has finished."""
        if self._idle is None or self._ended is None:
            return 0.0
        finished = self._idle[0].elapsed_time(self._ended[0]) / 1e3
        return float(max(0.0, finished - (self._ended[1] - self._idle[1])))


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

    @property
    def seconds(self) -> float:
        return self.data + self.step


def shown_rate(per_second: float) -> str:
    """A rate with three significant digits, or a whole number."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


_SUMMED = ("samples", "tokens", "slots", "flops", "data", "step", "between")  # fields of a Batch
_PLANNED_AFTER = 5  # steady batches
_OPTIONAL = ("tokens_per_sec", "padding_fraction", "mfu", "planned_seconds")


class ThroughputMonitor(ThroughputConfig, SavedCallback, eq=False):
    """Logs samples/s, real tokens/s, padding, MFU, and the time that is not spent on training.

    Rates are samples (or tokens) divided by the time of training steps *and* of waiting for data. Evaluation and
    checkpoint writing are excluded and logged separately. The first ``warmup_batches`` batches, and those in which
    torch.compile compiled or a CUDA graph was captured, do not count as steady state: they are excluded from the rates
    and add up to ``warmup_seconds``. With several ranks, a batch is also excluded if another rank compiled or captured
    in it, since all ranks wait; this is known only at the end, and values logged earlier are not corrected.

    The monitor synchronizes with the GPU at the end of each batch outside the steady state, before an evaluation and at
    the end. The GPU work of steady batches that was still queued counts towards them. Work that the GPU has not
    finished when a checkpoint is written counts in that phase.

    Logged every ``interval`` batches (the first time before batch 10) and at the end, over the last ``window`` steady
    batches and all ranks, as ``throughput/…``:

    - ``samples_per_sec``, ``tokens_per_sec`` (real tokens), ``padding_fraction``, ``mfu`` (if the model's FLOPs and the
      GPU's peak rate are known), ``step_seconds`` (without waiting for data);
    - ``data_seconds`` and ``data_wait_fraction``: waiting for data;
    - ``between_batches_seconds``: host time from the end of a batch until the next one is requested (loggers,
      callbacks, start of an epoch), without evaluation and checkpoints; not included in any rate;
    - totals so far: ``warmup_seconds``, ``eval_seconds``, ``checkpoint_seconds``;
    - ``planned_seconds``, once, with the first value after five steady batches: how long the whole training takes,
      without evaluation and checkpoints, if its other batches take as long as these. This waits for the GPU.

    Args:
        window: Number of batches that a logged rate averages over. Default 20.
        warmup_batches: Number of initial batches excluded from the steady state, 0 to 8. Default 3.
        interval: Number of batches between two logged values. Default 10.
    """

    def reset(self) -> None:
        self.batches: list[Batch] = []
        self.eval_marks: list[int] = []  # numbers of training batches that were followed by an evaluation
        self.clock = PhaseClock()
        self._peak: Peak | None = None
        self._peak_is_due = True
        self._tokens = self._slots = self._flops = self._graphs = self._samples = 0
        self._measured = (0.0, 0.0, 0.0)  # seconds of data, step and between at the end of the last batch
        self._unsteady = 0.0  # total seconds of batches outside the steady state
        self._resumed = 0  # batches of earlier processes
        self._logged = -self.interval  # number of batches at the last logged value
        self._planned: dict[str, float] = {}
        self._summary: dict[str, Any] = {}

    def fit_start(self, state: State, logger: Logger) -> None:
        self.clock.begin("start")
        self._ranks, self._graphs, self._samples = dist.get_world_size(), graphs_so_far(), state.timestamp.sample.value
        self._measured = self._seconds_so_far()
        self._count_flops = flops_counter(model_of(state))
        self._backlog = Backlog(_recorder(device_of(state)), self.clock.now)

    def _begin_between(self, state: State, logger: Logger) -> None:
        self.clock.begin("between")

    def _begin_checkpoint(self, state: State, logger: Logger) -> None:
        self.clock.begin("checkpoint")

    epoch_start = epoch_end = iteration_end = _begin_between
    # Checkpoints are written at these events by a callback that runs after this one.
    batch_checkpoint = epoch_checkpoint = _begin_checkpoint

    def before_dataloader(self, state: State, logger: Logger) -> None:
        self.clock.begin("data")

    def after_dataloader(self, state: State, logger: Logger) -> None:
        self.clock.begin("step")
        # while the batch is still on the host, and after unpadding has counted its rows
        lengths = batch_lengths(state.batch)
        self._slots = 0 if lengths is None else state.batch["input_ids"].numel()
        self._tokens = 0 if lengths is None else int(lengths.sum())
        self._flops = self._count_flops(state.batch, lengths)

    def eval_before_all(self, state: State, logger: Logger) -> None:
        self._wait_for_step(state)
        self.clock.begin_evaluation()

    def eval_after_all(self, state: State, logger: Logger) -> None:
        self.clock.end_evaluation()
        if self.batches:
            self.eval_marks.append(self.batches[-1].index)
        if self._summary:  # if the last interval is incomplete, Composer evaluates after FIT_END
            self._summary["eval_seconds"] = self.clock.seconds["eval"]

    def _wait_for_step(self, state: State) -> None:
        start = self.clock.now()
        _synchronize(device_of(state))
        waited = self.clock.now() - start
        self._backlog.synchronized()
        if self.batches:
            self.batches[-1].step += waited
            self.clock.skip(waited)
            self._unsteady += 0.0 if self.batches[-1].steady else waited

    def _seconds_so_far(self) -> tuple[float, float, float]:
        seconds = self.clock.seconds
        return seconds["data"], seconds["step"], seconds["between"]

    def batch_end(self, state: State, logger: Logger) -> None:
        trained, graphs, self._graphs = len(self.batches) - self._resumed, self._graphs, graphs_so_far()
        # a resumed run skips batches before its first one
        steady = trained >= max(self.warmup_batches, self._resumed > 0) and self._graphs == graphs
        late = 0.0
        if steady:
            self._backlog.batch_ended()
        else:
            _synchronize(device_of(state))
            late = self._backlog.seconds()
            self._backlog.synchronized()
        self.clock.begin("between")
        data, step, between = self._measured
        self._measured = self._seconds_so_far()
        samples, self._samples = -self._samples, state.timestamp.sample.value
        batch = Batch(
            index=state.timestamp.batch.value,
            samples=(samples + self._samples) // self._ranks,
            tokens=self._tokens,
            slots=self._slots,
            flops=self._flops,
            data=self._measured[0] - data,
            step=self._measured[1] - step,
            between=self._measured[2] - between,
            steady=steady,
        )
        if late := min(late, batch.step):
            batch.step -= late
            self.batches[-1].step += late
        self.batches.append(batch)
        self._unsteady += 0.0 if steady else batch.seconds
        if self._peak_is_due and batch.flops:  # also after a resume, which may be on another GPU
            self._peak_is_due = False
            self._peak = device_peak(precision_in_force(state), device_of(state))
        count = len(self.batches)
        if count - self._logged >= self.interval and (steady or count >= FIRST_VALUE_BY):
            self._log(logger, self._plan(state))

    def _plan(self, state: State) -> dict[str, float]:
        """``planned_seconds`` if they are known for the first time."""
        if self._planned or state.max_duration is None or not (fraction := trained_fraction(state)):  # or another loop
            return {}
        steady = [b for b in self.batches if b.steady]
        if len(steady) < _PLANNED_AFTER:
            return {}
        self._wait_for_step(state)
        so_far = sum(b.seconds + b.between for b in self.batches) + self.clock.seconds["start"]
        left = state.timestamp.batch.value * (1 / fraction - 1)
        mean = sum(b.seconds + b.between for b in steady) / len(steady)
        self._planned = {"planned_seconds": so_far + left * mean}
        return self._planned

    def _log(self, logger: Logger, planned: dict[str, float] | None = None) -> None:
        self._logged = len(self.batches)
        window = self.batches[-self.window :]
        shown = [b for b in window if b.steady] or window
        rates = self._rates([sum(getattr(b, name) for b in shown) for name in _SUMMED], len(shown))
        logger.log_metrics({f"throughput/{k}": v for k, v in {**rates, **self._times(), **(planned or {})}.items()})

    def _rates(self, sums: Sequence[float], count: int) -> dict[str, float]:
        """The rates of ``count`` batches of one or all ranks, from the sums of their fields."""
        samples, tokens, slots, flops, data, step, between = sums
        world, seconds = dist.get_world_size(), data + step
        rates = {
            "samples_per_sec": world * samples / seconds,
            "step_seconds": step / count,
            "data_seconds": data / count,
            "between_batches_seconds": between / count,
            "data_wait_fraction": data / seconds,
        }
        if slots:
            rates["tokens_per_sec"] = world * tokens / seconds
            rates["padding_fraction"] = 1 - tokens / slots
        if self._peak is not None:
            rates["mfu"] = flops / seconds / self._peak.flops_per_sec
        return rates

    def _times(self) -> dict[str, float]:
        return {
            "warmup_seconds": self.clock.seconds["start"] + self._unsteady,
            "eval_seconds": self.clock.seconds["eval"],
            "checkpoint_seconds": self.clock.seconds["checkpoint"],
        }

    def fit_end(self, state: State, logger: Logger) -> None:
        self._wait_for_step(state)
        self.clock.begin(None)
        if len(self.batches) > max(self._logged, 0):
            self._log(logger)
        self._exclude_batches_unsteady_on_any_rank()
        steady = [b for b in self.batches if b.steady]
        measured = steady or self.batches
        if not measured:
            return
        # Ranks differ in tokens and in waiting for data; the rate of the run is that of all of them together.
        mine = torch.tensor([[float(getattr(b, name)) for name in _SUMMED] for b in measured], dtype=torch.float64)
        sums = state.device.tensor_to_device(mine.sum(0))
        dist.all_reduce(sums, reduce_operation="SUM")
        rates = self._rates(sums.tolist(), dist.get_world_size() * len(measured))
        steps = torch.tensor([b.step for b in measured], dtype=torch.float64)
        self._summary = {
            **dict.fromkeys(_OPTIONAL),
            **rates,
            **self._times(),
            **self._planned,
            "step_seconds_p10_p50_p90": steps.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist(),
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
        return {
            # a checkpoint holds only one rank's callbacks
            "batches": dist.all_gather_object([astuple(batch) for batch in self.batches]),
            "eval_marks": list(self.eval_marks),
            "totals": dict(self.clock.seconds),
            "unsteady": self._unsteady,
            "peak": None if self._peak is None else tuple(self._peak),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(ranks := state.get("batches", [])) != dist.get_world_size():
            return  # rates of another number of ranks are not comparable
        self.batches = [Batch(*row) for row in ranks[dist.get_global_rank()]]
        self._resumed = len(self.batches)
        self.eval_marks = list(state["eval_marks"])
        self.clock.seconds.update(state["totals"])
        self._unsteady = state["unsteady"]
        self._peak = None if state["peak"] is None else Peak(*state["peak"])

    def summary(self) -> dict[str, Any]:
        """The ``throughput`` section of report.json: the steady state of all ``fit`` calls, processes and ranks."""
        return dict(self._summary)


def trained_fraction(state: State) -> float:
    """The trained fraction of the run, 0 to 1, including the current epoch if its length is known."""
    assert state.max_duration is not None
    done = float(state.timestamp.get(state.max_duration.unit).value)
    if state.max_duration.unit == TimeUnit.EPOCH and state.dataloader_len is not None:
        done += state.timestamp.batch_in_epoch.value / max(1, int(state.dataloader_len))
    return min(1.0, done / max(1, state.max_duration.value))


class _Finished:
    """Takes the place of a CUDA event on a CPU, where nothing is queued."""

    def elapsed_time(self, later: Any) -> float:
        return 0.0


def _recorder(device: torch.device) -> Callable[[], Any]:
    if device.type != "cuda":
        return _Finished

    def record() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    return record


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
