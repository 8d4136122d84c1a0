"""One value per run for tables and bar charts, and the label of its techniques for grouping runs."""

from __future__ import annotations

import inspect

from composer.core import Callback, State
from composer.loggers import Logger

from composer_speedups.callbacks.best_weights import BestWeights
from composer_speedups.callbacks.changing_hyperparameters import log_changing_hyperparameters
from composer_speedups.callbacks.memory import MemoryAnatomy
from composer_speedups.callbacks.throughput import ThroughputMonitor
from composer_speedups.core.engaging import techniques_of
from composer_speedups.core.technique import Technique
from composer_speedups.tasks.metrics import final_metrics

__all__ = ["RunSummary", "techniques_label"]

_THROUGHPUT = ("samples_per_sec", "tokens_per_sec", "mfu", "data_wait_fraction", "warmup_seconds", "eval_seconds")


class RunSummary(Callback):
    """Logs the values by which runs are compared, at the end of training, to every logger.

    ``summary/samples_per_sec``, ``summary/tokens_per_sec``, ``summary/mfu`` and ``summary/data_wait_fraction`` cover
    the whole steady state (``throughput/…`` covers the last batches). ``summary/warmup_seconds``,
    ``summary/eval_seconds`` and ``summary/peak_gib`` are totals. ``summary/accuracy`` and ``summary/loss`` are from the
    last evaluation, or from the best one with :class:`BestWeights`; ``summary/train_accuracy`` and
    ``summary/train_loss`` are from the last training batch. Values that were not measured are omitted. Weights & Biases
    draws a value that is logged once as one bar per run.

    ``techniques`` is logged as a hyperparameter after the first batch and at the end; see :func:`techniques_label`.

    It reads :class:`ThroughputMonitor` and :class:`MemoryAnatomy`, which must precede it in ``callbacks``.

    Raises:
        ValueError: One of them follows it.
    """

    def __init__(self) -> None:
        self._named = self._trained = False

    def batch_end(self, state: State, logger: Logger) -> None:
        if not self._named:
            self._named = True
            log_changing_hyperparameters(state, logger, {"techniques": techniques_label(state)})

    def fit_start(self, state: State, logger: Logger) -> None:
        self._trained = False  # in a later fit(), evaluations come before its end again

    def fit_end(self, state: State, logger: Logger) -> None:
        self._trained = True
        # a technique may have been disabled during training
        log_changing_hyperparameters(state, logger, {"techniques": techniques_label(state)})
        self._log(state, logger)

    def eval_after_all(self, state: State, logger: Logger) -> None:
        if self._trained:
            self._log(state, logger)  # if the last interval is incomplete, Composer evaluates after FIT_END

    def init(self, state: State, logger: Logger) -> None:
        self._named = self._trained = False  # of a Trainer, which may be a second one
        for late in state.callbacks[state.callbacks.index(self) :]:
            if isinstance(late, (ThroughputMonitor, MemoryAnatomy)):
                raise ValueError(f"callbacks: RunSummary must come after {type(late).__name__}; put it last")

    def _log(self, state: State, logger: Logger) -> None:
        logger.log_metrics({f"summary/{name}": value for name, value in _values(state).items()})


def _values(state: State) -> dict[str, float]:
    values: dict[str, float | None] = {}
    best: dict[str, float] = {}
    for callback in state.callbacks:
        if isinstance(callback, ThroughputMonitor):
            measured = callback.summary()
            values |= {name: measured.get(name) for name in _THROUGHPUT}
        elif isinstance(callback, MemoryAnatomy):
            values["peak_gib"] = callback.summary()["peak_gib"]
        elif isinstance(callback, BestWeights):
            best = callback.metrics
    values |= final_metrics(state) | best
    return {name: value for name, value in values.items() if value is not None}


def techniques_label(state: State) -> str:
    """The engaged techniques with their non-default settings: ``tf32_matmul + torch_compile(scope=blocks)``.

    ``none`` if no technique engaged. Techniques that could not engage (``on_unavailable: warn``) are omitted.
    """
    return " + ".join(_format(t) for t in techniques_of(state.algorithms) if t.engaged) or "none"


def _format(technique: Technique) -> str:
    changed = {
        name: getattr(technique, name)
        for name, parameter in inspect.signature(type(technique)).parameters.items()
        if name != "on_unavailable" and getattr(technique, name) != parameter.default
    }
    settings = ", ".join(f"{name}={value}" for name, value in changed.items())
    return f"{technique.name}({settings})" if settings else technique.name
