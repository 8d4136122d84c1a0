"""Log what a run is compared by: its techniques with their evidence, and one value per measurement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger, MLFlowLogger, WandBLogger

from composer_speedups.callbacks.checkpoints import callback_of
from composer_speedups.callbacks.evaluations import BestWeights
from composer_speedups.callbacks.memory import MemoryAnatomy
from composer_speedups.callbacks.precision import precision_in_force
from composer_speedups.callbacks.throughput import ThroughputMonitor
from composer_speedups.core.engaging import techniques_of
from composer_speedups.core.host import host_of
from composer_speedups.core.technique import Technique
from composer_speedups.core.trainer_state import weight_dtypes
from composer_speedups.tasks.metrics import final_metrics

_THROUGHPUT = ("samples_per_sec", "tokens_per_sec", "mfu", "data_wait_fraction", "warmup_seconds", "eval_seconds")


class RunReport(Callback):
    """Logs the techniques' evidence and the values by which runs are compared. It does nothing in a training step.

    Hyperparameters, by which dashboards filter and group runs: ``techniques`` (see :func:`techniques_label`),
    ``techniques/<name>/engaged`` and ``techniques/<name>/<evidence>``. They are logged once all techniques are proven,
    and updated at the end in Weights & Biases, which allows changes.

    Metrics, at the end of training: ``summary/samples_per_sec``, ``summary/tokens_per_sec``, ``summary/mfu`` and
    ``summary/data_wait_fraction`` of the whole steady state; the totals ``summary/warmup_seconds``,
    ``summary/eval_seconds`` and ``summary/peak_gib``; ``summary/accuracy`` and ``summary/loss`` of the last evaluation,
    or of the best one with :class:`.BestWeights`; ``summary/train_accuracy`` and ``summary/train_loss`` of the last
    batch. Values that were not measured are omitted.

    It reads :class:`.ThroughputMonitor` and :class:`.MemoryAnatomy`, which must precede it in ``callbacks``.

    Attributes:
        numerics: The dtype of the weights, Composer's precision, the dtype of matmuls and torch's float32 flag, when
            training started.

    Raises:
        ValueError: One of them follows it.
    """

    def __init__(self) -> None:
        self.numerics: dict[str, str] = {}
        self._trained = False

    def init(self, state: State, logger: Logger) -> None:
        self._trained = False
        for late in state.callbacks[state.callbacks.index(self) :]:
            if isinstance(late, (ThroughputMonitor, MemoryAnatomy)):
                raise ValueError(f"callbacks: RunReport must come after {type(late).__name__}; put it last")
        self.batch_end = self._log_evidence  # type: ignore[method-assign]

    def fit_start(self, state: State, logger: Logger) -> None:
        self._trained = False  # in a later fit(), evaluations come before its end again
        self.numerics = numerics_of(state)  # flags are given back before the end

    def _log_evidence(self, state: State, logger: Logger) -> None:
        host = host_of(state)
        if host is None or not host.waits_for_proof:
            del self.batch_end  # type: ignore[method-assign]  # later batches do not concern it
            _update_wandb(state, logger)
            for destination in logger.destinations:  # a resumed MLflow run refuses changed values
                resumed = isinstance(destination, MLFlowLogger) and destination.resume
                if not (resumed or isinstance(destination, WandBLogger)):
                    destination.log_hyperparameters(_evidence(state))

    def fit_end(self, state: State, logger: Logger) -> None:
        self._trained = True
        _update_wandb(state, logger)
        self._log_values(state, logger)

    def eval_after_all(self, state: State, logger: Logger) -> None:
        if self._trained:
            self._log_values(state, logger)  # if the last interval is incomplete, Composer evaluates after FIT_END

    def _log_values(self, state: State, logger: Logger) -> None:
        logger.log_metrics({f"summary/{name}": value for name, value in _values(state).items()})


def _update_wandb(state: State, logger: Logger) -> None:
    """Weights & Biases allows changed values, and a resumed run starts with those of the previous process."""
    if any(isinstance(destination, WandBLogger) for destination in logger.destinations):
        import wandb

        if wandb.run is not None:  # on rank 0
            wandb.config.update(_evidence(state), allow_val_change=True)


def _evidence(state: State) -> dict[str, Any]:
    values: dict[str, Any] = {"techniques": techniques_label(state)}
    for name, entry in evidence_of(state).items():
        values[f"techniques/{name}/engaged"] = entry["engaged"]
        values |= {f"techniques/{name}/{key}": value for key, value in entry["evidence"].items()}
    return values


def evidence_of(state: State) -> dict[str, dict[str, Any]]:
    """YAML name → ``{"engaged": bool, "settings": repr, "evidence": {…}}``."""
    return {
        t.name: {"engaged": bool(t.engaged), "settings": repr(t), "evidence": dict(t.evidence)}
        for t in techniques_of(state.algorithms)
    }


def describe_evidence(evidence: Mapping[str, Any]) -> str:
    """A technique's evidence in a line, or why it did not engage, and the fix."""
    if "unavailable" not in evidence:
        note_first = sorted(evidence, key=lambda key: key != "note")  # the summary may cut off what comes later
        return ", ".join(f"{key} {evidence[key]}" for key in note_first)
    applied = f" ({evidence['applied']})" if "applied" in evidence else ""
    return f"{evidence['unavailable']}{applied}; {evidence['fix']}"


def techniques_label(state: State) -> str:
    """The engaged techniques with their non-default settings: ``tf32_matmul + torch_compile(scope=blocks)``; or
    ``none``."""
    return " + ".join(_format(t) for t in techniques_of(state.algorithms) if t.engaged) or "none"


def _format(technique: Technique) -> str:
    changed = {
        name: getattr(technique, name)
        for name, field in type(technique).model_fields.items()
        if name != "on_unavailable" and getattr(technique, name) != field.get_default(call_default_factory=True)
    }
    settings = ", ".join(f"{name}={value}" for name, value in changed.items())
    return f"{technique.name}({settings})" if settings else technique.name


def numerics_of(state: State) -> dict[str, str]:
    """The dtype of the weights, Composer's precision, the dtype of matmuls, and torch's float32 flag."""
    return {
        "weights": ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in weight_dtypes(state.model))),
        "precision": state.precision.value,
        "matmul": precision_in_force(state),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def _values(state: State) -> dict[str, float]:
    monitor, memory = callback_of(state, ThroughputMonitor), callback_of(state, MemoryAnatomy)
    measured, best = monitor.summary() if monitor else {}, callback_of(state, BestWeights)
    values = {name: measured.get(name) for name in _THROUGHPUT}
    values["peak_gib"] = memory.summary()["peak_gib"] if memory else None
    values |= final_metrics(state) | (best.metrics if best else {})
    return {name: value for name, value in values.items() if value is not None}
