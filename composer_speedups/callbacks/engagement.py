"""Report which techniques engaged, and refuse to resume with other techniques."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger

from composer_speedups.callbacks.changing_hyperparameters import log_changing_hyperparameters
from composer_speedups.callbacks.peaks import precision_in_force
from composer_speedups.core.engaging import refuse_other_techniques, techniques_of
from composer_speedups.core.technique import Technique
from composer_speedups.core.trainer_state import weight_dtypes

__all__ = ["EngagementReport", "describe_evidence", "numerics_of"]

log = logging.getLogger(__name__)


class EngagementReport(Callback):
    """Logs each technique's evidence after the first batch and at the end of the run.

    ``techniques/<name>/engaged`` and ``techniques/<name>/<evidence>`` are logged as hyperparameters, so that dashboards
    can filter runs by them. :func:`.log_changing_hyperparameters` describes where each logger shows the values of the
    end. Evidence that no longer exists at the end, such as that of a technique that turned out to have no effect,
    becomes None.

    Its state in checkpoints lists the techniques: resuming such a checkpoint without any technique is refused too.

    Attributes:
        numerics: The dtype of the weights, Composer's precision, the dtype of matmuls and torch's float32 flag, in the
            first batch.
    """

    def __init__(self) -> None:
        self._techniques: list[Technique] = []
        self._begin()

    def _begin(self) -> None:
        self.numerics: dict[str, str] = {}
        self._reported = False
        self._logged: dict[str, Any] = {}

    def init(self, state: State, logger: Logger) -> None:
        self._begin()  # of a Trainer, which may be a second one
        self._techniques = techniques_of(state.algorithms)

    def batch_end(self, state: State, logger: Logger) -> None:
        if not self._reported:
            self.numerics = numerics_of(state)  # flags are restored before the end of the run
            self._log(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._log(state, logger)

    def _log(self, state: State, logger: Logger) -> None:
        self._reported = True
        current = {
            f"techniques/{name}/{key}": value
            for name, entry in self.summary(state).items()
            for key, value in {"engaged": entry["engaged"], **entry["evidence"]}.items()
        }
        self._logged = dict.fromkeys(self._logged) | current
        log_changing_hyperparameters(state, logger, self._logged)

    @staticmethod
    def summary(state: State) -> dict[str, dict[str, Any]]:
        """YAML name → ``{"engaged": bool, "settings": repr, "evidence": {…}}``."""
        return {
            t.name: {"engaged": bool(t.engaged), "settings": repr(t), "evidence": dict(t.evidence)}
            for t in techniques_of(state.algorithms)
        }

    def state_dict(self) -> dict[str, Any]:
        return {"techniques": sorted(map(repr, self._techniques)), "numerics": self.numerics}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        refuse_other_techniques(state["techniques"], self._techniques)
        self.numerics = dict(state.get("numerics", {}))


def describe_evidence(evidence: Mapping[str, Any]) -> str:
    """A technique's evidence in a line, or why it did not engage, and the fix."""
    if "unavailable" not in evidence:
        note_first = sorted(evidence, key=lambda key: key != "note")  # the summary may cut off what comes later
        return ", ".join(f"{key} {evidence[key]}" for key in note_first)
    applied = f" ({evidence['applied']})" if "applied" in evidence else ""
    return f"{evidence['unavailable']}{applied}; {evidence['fix']}"


def numerics_of(state: State) -> dict[str, str]:
    """The dtype of the weights, Composer's precision, the dtype of matmuls, and torch's float32 flag."""
    return {
        "weights": ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in weight_dtypes(state.model))),
        "precision": state.precision.value,
        "matmul": precision_in_force(state),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
