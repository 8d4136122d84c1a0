"""One value a run for tables and bar charts, and the name of its arm to group runs by."""

from __future__ import annotations

import inspect

from composer.core import Callback, State
from composer.loggers import Logger

from composer_speedups.callbacks.memory import MemoryAnatomy
from composer_speedups.callbacks.throughput import ThroughputMonitor
from composer_speedups.core.technique import Technique, techniques_of
from composer_speedups.tasks.metrics import final_metrics

__all__ = ["RunSummary", "techniques_label"]

_THROUGHPUT = ("samples_per_sec", "tokens_per_sec", "mfu", "data_wait_fraction", "warmup_seconds", "eval_seconds")


class RunSummary(Callback):
    """Logs at the end of training what runs are compared by, for every logger.

    ``summary/samples_per_sec``, ``summary/tokens_per_sec``, ``summary/mfu``, ``summary/data_wait_fraction`` (all of
    the whole steady state, where ``throughput/…`` has the last batches), ``summary/warmup_seconds``,
    ``summary/eval_seconds``, ``summary/peak_gib``, and of the last evaluation and the last training batch
    ``summary/accuracy``, ``summary/loss``, ``summary/train_accuracy``, ``summary/train_loss``. What was not measured
    is left out. Weights & Biases draws a value that is logged once as a bar a run.

    Logged as a hyperparameter after the first batch and at the end: ``techniques``, see :func:`techniques_label`.

    It reads :class:`ThroughputMonitor` and :class:`MemoryAnatomy`, which come before it in ``callbacks``.

    Raises:
        ValueError: One of them comes after it.
    """

    def __init__(self) -> None:
        self._named = self._trained = False

    def batch_end(self, state: State, logger: Logger) -> None:
        if not self._named:
            self._named = True
            logger.log_hyperparameters({"techniques": techniques_label(state)})

    def fit_end(self, state: State, logger: Logger) -> None:
        self._trained = True
        logger.log_hyperparameters({"techniques": techniques_label(state)})  # one may have given up on the way
        self._log(state, logger)

    def eval_after_all(self, state: State, logger: Logger) -> None:
        if self._trained:
            self._log(state, logger)  # where the last interval is cut short, Composer evaluates after FIT_END

    def init(self, state: State, logger: Logger) -> None:
        for late in state.callbacks[state.callbacks.index(self) :]:
            if isinstance(late, (ThroughputMonitor, MemoryAnatomy)):
                raise ValueError(f"callbacks: RunSummary must come after {type(late).__name__}; put it last")

    def _log(self, state: State, logger: Logger) -> None:
        logger.log_metrics({f"summary/{name}": value for name, value in _values(state).items()})


def _values(state: State) -> dict[str, float]:
    values: dict[str, float | None] = {}
    for callback in state.callbacks:
        if isinstance(callback, ThroughputMonitor):
            measured = callback.summary()
            values |= {name: measured.get(name) for name in _THROUGHPUT}
        elif isinstance(callback, MemoryAnatomy):
            values["peak_gib"] = callback.summary()["peak_gib"]
    values |= final_metrics(state)
    return {name: value for name, value in values.items() if value is not None}


def techniques_label(state: State) -> str:
    """The techniques in force, with settings other than the defaults: ``tf32_matmul + torch_compile(scope=blocks)``.

    ``none`` without any. One that was asked for and did not engage (``on_unavailable: warn``) is left out.
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
