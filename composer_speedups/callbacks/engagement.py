"""Says which techniques engaged, and refuses to resume under other ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from composer.core import Algorithm, Callback, State
from composer.loggers import Logger

from composer_speedups.callbacks.peaks import precision_in_force
from composer_speedups.core.technique import resume_error, techniques_of

__all__ = ["EngagementReport", "numerics_of"]

log = logging.getLogger(__name__)


class EngagementReport(Callback):
    """Logs each technique's evidence after the first batch and at the end of the run.

    Logged as hyperparameters, so that dashboards can filter runs by them: ``techniques/<name>/engaged`` and
    ``techniques/<name>/<evidence>``. Its checkpoint state holds the list of techniques: a checkpoint written
    with some and resumed with none is refused too.

    Attributes:
        numerics: In the first batch: Composer's precision, what matmuls computed in, torch's float32 flag.
    """

    checkpoint_fields: ClassVar[dict[str, Any]] = {"techniques": list[str], "numerics": dict[str, str]}

    def __init__(self) -> None:
        self.numerics: dict[str, str] = {}
        self._algorithms: Sequence[Algorithm] = ()
        self._reported = False

    def init(self, state: State, logger: Logger) -> None:
        self._algorithms = state.algorithms  # the list itself: loading a checkpoint may add to it

    def batch_end(self, state: State, logger: Logger) -> None:
        if not self._reported:
            self.numerics = numerics_of(state)  # flags are given back before the end of the run
            self._log(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._log(state, logger)

    def _log(self, state: State, logger: Logger) -> None:
        self._reported = True
        logger.log_hyperparameters(
            {
                f"techniques/{name}/{key}": value
                for name, entry in self.summary(state).items()
                for key, value in {"engaged": entry["engaged"], **entry["evidence"]}.items()
            }
        )

    @staticmethod
    def summary(state: State) -> dict[str, dict[str, Any]]:
        """YAML name → ``{"engaged": bool, "settings": repr, "evidence": {…}}``."""
        return {
            t.name: {"engaged": bool(t.engaged), "settings": repr(t), "evidence": dict(t.evidence)}
            for t in techniques_of(state.algorithms)
        }

    def state_dict(self) -> dict[str, Any]:
        return {"techniques": self._current(), "numerics": self.numerics}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["techniques"] != self._current():
            raise resume_error(state["techniques"], self._current())
        self.numerics = dict(state.get("numerics", {}))

    def _current(self) -> list[str]:
        return sorted(map(repr, techniques_of(self._algorithms)))


def numerics_of(state: State) -> dict[str, str]:
    """Composer's precision, what matmuls compute in, and torch's float32 flag, as they are now."""
    return {
        "precision": state.precision.value,
        "matmul": precision_in_force(state),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
