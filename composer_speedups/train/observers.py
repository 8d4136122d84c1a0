"""What watches a run and writes it down: the config's callbacks and loggers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from composer.core import Callback
from composer.loggers import FileLogger, LoggerDestination, TensorboardLogger, WandBLogger

from composer_speedups.algorithms.tf32_matmul.tf32_matmul import TF32Matmul
from composer_speedups.callbacks.divergence import DivergenceGuard
from composer_speedups.callbacks.engagement import EngagementReport
from composer_speedups.callbacks.finite_loss import FiniteLoss
from composer_speedups.callbacks.loss_scale import LossScaleMonitor
from composer_speedups.callbacks.memory import MemoryAnatomy
from composer_speedups.callbacks.run_history import RunHistory
from composer_speedups.callbacks.run_summary import RunSummary
from composer_speedups.callbacks.throughput import ThroughputMonitor
from composer_speedups.callbacks.wandb_axes import WandbAxes
from composer_speedups.core.flags import Float32Matmuls
from composer_speedups.core.technique import Technique
from composer_speedups.distributed.ddp import OverlappedDDP
from composer_speedups.train.config import Config
from composer_speedups.train.out_of_memory import MicrobatchHistory
from composer_speedups.train.run_folder import RunFolder

__all__ = ["callbacks_of", "loggers_of"]


def callbacks_of(config: Config, techniques: Sequence[Technique]) -> list[Callback]:
    """Those that the config names, and those that every run has."""
    callbacks: list[Callback] = [EngagementReport(), MicrobatchHistory(), OverlappedDDP()]
    if not any(isinstance(t, TF32Matmul) and t.engaged is not False for t in techniques):
        callbacks.append(Float32Matmuls())
    if config.callbacks.throughput is not None:
        callbacks.append(ThroughputMonitor(**dataclasses.asdict(config.callbacks.throughput)))
    if config.callbacks.memory is not None:
        callbacks.append(MemoryAnatomy(**dataclasses.asdict(config.callbacks.memory)))
    callbacks.append(LossScaleMonitor())
    if config.callbacks.finite_loss is not None:
        callbacks.append(FiniteLoss(**dataclasses.asdict(config.callbacks.finite_loss)))
    if config.callbacks.divergence is not None:
        callbacks.append(DivergenceGuard(**dataclasses.asdict(config.callbacks.divergence)))
    callbacks += [RunHistory(), RunSummary()]
    if config.loggers.wandb is not None:
        callbacks.append(WandbAxes())
    return callbacks


def loggers_of(config: Config, folder: RunFolder) -> list[LoggerDestination]:
    """Those that the config names, with their files in the run's folder."""
    loggers: list[LoggerDestination] = []
    if (wandb := config.loggers.wandb) is not None:
        loggers.append(
            WandBLogger(
                project=wandb.project,
                entity=wandb.entity,
                group=wandb.group,
                tags=wandb.tags,
                init_kwargs={"mode": wandb.mode, "dir": str(folder.path)},
            )
        )
    if (tensorboard := config.loggers.tensorboard) is not None:
        loggers.append(TensorboardLogger(str(folder / "tensorboard"), tensorboard.flush_interval))
    if (file := config.loggers.file) is not None:
        again = f".{folder.starts}" if folder.starts > 1 else ""  # one that was interrupted keeps its own
        loggers.append(FileLogger(str(folder / f"log-rank{{rank}}{again}.txt"), flush_interval=file.flush_interval))
    return loggers
