"""The x-axes of the charts that Weights & Biases draws automatically."""

from __future__ import annotations

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

__all__ = ["AXES", "WandbAxes"]

AXES = {
    "throughput/*": "time/batch",
    "memory/*": "time/batch",
    "loss/*": "time/sample",
    "metrics/*": "time/sample",
}
"""Metrics → their x-axis. Learning curves are drawn over samples, so that runs with different batch sizes align."""


class WandbAxes(Callback):
    """Defines the x-axes of metrics in the current Weights & Biases run.

    Composer's WandBLogger logs ``time/batch`` and ``time/sample`` with every metric. Only rank 0 has a run.
    """

    def init(self, state: State, logger: Logger) -> None:
        import wandb

        if dist.get_global_rank() != 0 or wandb.run is None:
            return
        for axis in sorted(set(AXES.values())):
            wandb.define_metric(axis)
        for metrics, axis in AXES.items():
            # Composer logs the values of a row's axes itself, for the last row of a run after its metrics.
            wandb.define_metric(metrics, step_metric=axis, step_sync=False)
