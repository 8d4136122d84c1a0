"""Hyperparameters whose values change during a run, such as the evidence of techniques."""

from __future__ import annotations

from typing import Any

from composer.core import State
from composer.loggers import Logger, MLFlowLogger, TensorboardLogger, WandBLogger
from composer.utils import dist

__all__ = ["log_changing_hyperparameters"]


def log_changing_hyperparameters(state: State, logger: Logger, values: dict[str, Any]) -> None:
    """Log values that may be logged again with other values, so that each logger shows the last ones.

    Composer expects hyperparameters not to change, and its loggers differ in what they do when one does:

    - Weights & Biases raises an error unless the change is announced. The run's config is updated.
    - MLflow raises an error, because its parameters cannot change. The values are tags of the run instead.
    - TensorBoard's HParams tab shows the values at the first evaluation. The Text tab shows these and all later ones.
    - The other loggers keep or show the last value.

    Args:
        state: The Trainer's state.
        logger: The Trainer's logger.
        values: Name → value.
    """
    for destination in logger.destinations:
        if isinstance(destination, WandBLogger):
            import wandb

            if wandb.run is not None:  # ranks other than 0 have none
                wandb.config.update(values, allow_val_change=True)
            continue
        if isinstance(destination, MLFlowLogger):
            import mlflow

            if mlflow.active_run() is not None:  # otherwise set_tags would start a run, on ranks other than 0 as well
                mlflow.set_tags(values, synchronous=destination.synchronous)
            continue
        destination.log_hyperparameters(values)
        if isinstance(destination, TensorboardLogger) and not (destination.rank_zero_only and dist.get_global_rank()):
            assert destination.writer is not None, "values are logged while the Trainer is open"
            for name, value in values.items():
                destination.writer.add_text(name, str(value), global_step=state.timestamp.batch.value)
