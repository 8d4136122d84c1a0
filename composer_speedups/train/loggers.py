"""The loggers that the config names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer.loggers import FileLogger, LoggerDestination, TensorboardLogger, WandBLogger
from composer.utils import dist

from composer_speedups.train.config.schema import Config
from composer_speedups.train.console import TrainingProgress

if TYPE_CHECKING:
    from composer_speedups.train.run_folder import RunFolder


def loggers_of(config: Config, folder: RunFolder | None) -> list[LoggerDestination]:
    """The progress display, and the loggers that the config names, which write to the run's folder; None writes no
    file."""
    loggers: list[LoggerDestination] = []
    if config.trainer.progress_bar and dist.get_global_rank() == 0:
        loggers.append(TrainingProgress())
    if folder is None:
        return loggers
    if (wandb := config.loggers.wandb) is not None:
        loggers.append(
            WandBLogger(
                project=wandb.project,
                entity=wandb.entity,
                group=wandb.group,
                tags=wandb.tags,
                # Absolute, because wandb's writing process may have been started in another folder.
                init_kwargs={"mode": wandb.mode, "dir": str(folder.path.absolute())},
            )
        )
    if (tensorboard := config.loggers.tensorboard) is not None:
        loggers.append(TensorboardLogger(str(folder / "tensorboard"), tensorboard.flush_interval))
    if (file := config.loggers.file) is not None:
        name = f"log-rank{dist.get_global_rank()}"
        earlier = len([*folder.path.glob(f"{name}.*txt")])  # logs of interrupted processes are kept
        path = folder / f"{name}{f'.{earlier + 1}' if earlier else ''}.txt"
        loggers.append(FileLogger(str(path), flush_interval=file.flush_interval))
    return loggers
