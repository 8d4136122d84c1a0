"""The x-axes of the charts that Weights & Biases draws by itself."""

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
"""Metrics → what they are drawn over. Learning is over reviews seen, so that arms of other batch sizes line up."""


class WandbAxes(Callback):
    """Tells the current Weights & Biases run what its metrics are drawn over.

    Composer's WandBLogger logs every metric at the batch it belongs to, and ``time/batch`` and ``time/sample`` with it.
    Rank 0 alone has a run.
    """

    def init(self, state: State, logger: Logger) -> None:
        import wandb

        if dist.get_global_rank() != 0 or wandb.run is None:
            return
        for axis in sorted(set(AXES.values())):
            wandb.define_metric(axis)
        for metrics, axis in AXES.items():
            # Composer logs the axis of a row itself, the last one of a run after its metrics.
            wandb.define_metric(metrics, step_metric=axis, step_sync=False)
