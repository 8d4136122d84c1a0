"""Config → Composer Trainer, with what watches the run and writes it down; nothing of an engine of our own."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from composer import Trainer
from composer.core import Algorithm, Callback
from composer.devices import Device, DeviceCPU, DeviceGPU
from composer.loggers import FileLogger, LoggerDestination, TensorboardLogger, WandBLogger
from composer.utils import dist

from composer_speedups.callbacks.divergence import DivergenceGuard
from composer_speedups.callbacks.engagement import EngagementReport
from composer_speedups.callbacks.finite_loss import FiniteLoss
from composer_speedups.callbacks.learning_curves import LearningCurves
from composer_speedups.callbacks.loss_scale import LossScaleMonitor
from composer_speedups.callbacks.memory import MemoryAnatomy
from composer_speedups.callbacks.optimizer_monitor import OptimizerMonitor
from composer_speedups.callbacks.run_history import RunHistory
from composer_speedups.callbacks.run_summary import RunSummary
from composer_speedups.callbacks.throughput import ThroughputMonitor
from composer_speedups.callbacks.wandb_axes import WandbAxes
from composer_speedups.core.errors import ConfigError, UserError, first_line, masked_command_line
from composer_speedups.core.flags import MATMUL_PRECISION, FlagTechnique, Float32Matmuls
from composer_speedups.core.requirements import Context
from composer_speedups.core.technique import Technique, refuse_conflicts, sort_techniques
from composer_speedups.core.trainer_state import torch_device
from composer_speedups.data.loader import Data
from composer_speedups.distributed.ddp import OverlappedDDP
from composer_speedups.distributed.fsdp import GradientClipping, check_sharding, fsdp_parallelism, sharded_blocks
from composer_speedups.distributed.host import share_cores
from composer_speedups.tasks.models import FinetuneModel
from composer_speedups.train.checkpoints.reading import restricted_loading
from composer_speedups.train.checkpoints.saver import WholeCheckpointSaver
from composer_speedups.train.config.load import written
from composer_speedups.train.config.schema import Config, TrainerConfig
from composer_speedups.train.console import TrainingProgress
from composer_speedups.train.fit import StopSignals
from composer_speedups.train.optimization import build_optimizer, build_scheduler
from composer_speedups.train.out_of_memory import MicrobatchHistory, MicrobatchTrainer

if TYPE_CHECKING:
    from composer_speedups.train.run_folder import RunFolder

__all__ = [
    "build_trainer",
    "callbacks_of",
    "context_of",
    "join_ranks",
    "loggers_of",
    "open_device",
]


def open_device(config: TrainerConfig) -> Device:
    """The device to train on, with TF32 off: Composer turns it on, and fp32 should mean float32.

    A technique turns it on where it is asked for; without one :class:`Float32Matmuls` keeps it off whatever other
    Trainers of the process do.

    Raises:
        ConfigError: Fewer GPUs than ranks, or none, where one is asked for or where Composer's mixed precision, FSDP or
            automatic micro-batches need it.
    """
    if config.device == "gpu" and not torch.cuda.is_available():
        raise ConfigError("trainer.device: there is no GPU here; set trainer.device=cpu or auto")
    if config.device != "cpu" and torch.cuda.is_available():
        ranks, gpus = dist.get_local_world_size(), torch.cuda.device_count()
        if ranks > gpus:
            raise ConfigError(f"trainer.device: {ranks} ranks need a GPU each, and there are {gpus}; lower composer -n")
        if config.fsdp is not None:
            check_sharding(config.fsdp, on_gpu=True)
        device = DeviceGPU(allow_tf32=False)
        if dist.get_world_size() == ranks or os.environ.get("GLOO_SOCKET_IFNAME"):
            # So that numbers of the host need no GPU to be added up. Across nodes gloo has to be told the interface.
            device.dist_backend = "cpu:gloo,cuda:nccl"
        return device
    if config.precision != "fp32":
        raise ConfigError(f"trainer.precision: {config.precision} needs a GPU; set trainer.precision=fp32")
    if config.parallelism_config:
        raise ConfigError("trainer.parallelism_config: Composer's FSDP needs GPUs; on the CPU use trainer.fsdp, or DDP")
    if config.fsdp is not None:
        check_sharding(config.fsdp, on_gpu=False)
    if config.microbatch_size == "auto":
        raise ConfigError("trainer.microbatch_size: auto needs a GPU; give a number, or null")
    return DeviceCPU()


def join_ranks(config: TrainerConfig, device: Device) -> None:
    """Meet the other ranks, before any of them reads data; one process alone does where its model is sharded."""
    if dist.get_world_size() > 1 or config.fsdp or config.parallelism_config:
        dist.initialize_dist(device, config.dist_timeout)


def context_of(config: TrainerConfig, device: Device) -> Context:
    """What techniques may ask about the run before its model is built."""
    return Context(
        torch_device(device),
        config.precision,
        ranks=dist.get_world_size(),
        microbatch_size=config.microbatch_size,
        sharded=bool(config.fsdp or config.parallelism_config),
    )


def build_trainer(
    config: Config,
    model: FinetuneModel,
    data: Data,
    techniques: Sequence[Technique],
    device: Device,
    folder: RunFolder | None = None,
    callbacks: Sequence[Callback] = (),
    stop: StopSignals | None = None,
) -> Trainer:
    """Composer's Trainer with the config's settings; techniques engage while it is built.

    Args:
        config: Of the run.
        model: Its model.
        data: Its data.
        techniques: Those of ``config.algorithms``.
        device: Where to train.
        folder: Where checkpoints and logs go; None for a config that asks for neither.
        callbacks: They come after those of the config.
        stop: Training ends with a checkpoint when it asks for that.

    Raises:
        ConfigError: The checkpoint to load is malformed, does not fit the run, was written by other techniques, or
            holds what would execute something.
    """
    settings, checkpoint, stop = config.trainer, config.checkpoint, stop or StopSignals()
    offloads = bool(settings.fsdp and settings.fsdp.cpu_offload) or any(t.computes_on_host for t in techniques)
    share_cores(computes=torch_device(device).type == "cpu" or offloads)
    everyone = [*callbacks_of(config, techniques), *callbacks]
    if checkpoint.interval is not None and folder is not None:  # last: it saves what the others have seen
        everyone.append(WholeCheckpointSaver(folder / "checkpoints", checkpoint.interval, checkpoint.keep, stop))
    # Where the loss is a mean over labelled tokens, samples differ in how many they have. Counting them waits for the
    # GPU, so one whole batch on one rank, which is its own mean, is left out.
    by_tokens = model.task.loss_per_token
    several = settings.microbatch_size is not None or dist.get_world_size() > 1
    algorithms: list[Algorithm] = [*techniques]
    if config.optimizer.max_grad_norm is not None:
        algorithms.append(GradientClipping("norm", clipping_threshold=config.optimizer.max_grad_norm))
    if settings.fsdp:
        sharded_blocks(model)
    progress = [TrainingProgress()] if settings.progress_bar else []
    with restricted_loading("checkpoint.load", trust=checkpoint.trust_checkpoint):
        trainer = _trainer(
            config.loggers.wandb is not None,
            model=model,
            train_dataloader=data.train,
            eval_dataloader=data.eval,
            eval_interval=settings.eval_interval if data.eval else 1,
            eval_subset_num_batches=settings.eval_batches or -1,
            max_duration=settings.max_duration,
            optimizers=build_optimizer(model, config.optimizer),
            schedulers=build_scheduler(config.scheduler),
            algorithms=algorithms,
            algorithm_passes=[refuse_conflicts, sort_techniques],
            callbacks=everyone,
            loggers=[*progress, *([] if folder is None else loggers_of(config, folder))],
            run_name=config.run_name,
            progress_bar=False,  # TrainingProgress in its place
            device=device,
            precision=settings.precision,
            device_train_microbatch_size=settings.microbatch_size,
            accumulate_train_batch_on_tokens=by_tokens and several,
            parallelism_config=fsdp_parallelism(settings.fsdp) if settings.fsdp else settings.parallelism_config,
            dist_timeout=settings.dist_timeout,
            seed=config.seed,
            deterministic_mode=settings.deterministic,
            # Not Composer's autoresume: it takes the latest file unseen, whole or not, and unpickles whatever it holds.
            load_path=None if folder is None else folder.load,
            load_weights_only=checkpoint.weights_only and folder is not None and not folder.resumed,
        )
    # Half a batch would be another loss where its samples take part in one another's.
    trainer.on_out_of_memory = "stop" if model.task.needs_whole_batch else settings.on_out_of_memory
    trainer.by_tokens = by_tokens
    trainer.go_on()
    if folder is not None and folder.load is not None and (folder.resumed or not checkpoint.weights_only):
        _check_rates(trainer, config.optimizer.lr)
    trainer.logger.log_hyperparameters(written(config))
    return trainer


def _trainer(with_wandb: bool, **settings: Any) -> MicrobatchTrainer:
    try:
        with masked_command_line() if with_wandb else contextlib.nullcontext():  # wandb keeps it with the run
            return MicrobatchTrainer(**settings)
    except Exception as error:  # by its module: importing wandb takes a second
        if not with_wandb or isinstance(error, UserError) or not type(error).__module__.startswith("wandb"):
            raise
        raise ConfigError(
            f"loggers.wandb: Weights & Biases cannot begin a run ({first_line(error)}); "
            "mend its keys, or set mode=offline"
        ) from error


def _check_rates(trainer: Trainer, wanted: float) -> None:
    """A checkpoint brings its schedule's rate along; another one in the config would do nothing."""
    for group in (group for optimizer in trainer.state.optimizers for group in optimizer.param_groups):
        rate = float(group.get("initial_lr", wanted))
        if not math.isclose(rate, wanted, rel_tol=1e-6):
            raise ConfigError(
                f"optimizer.lr: the checkpoint goes on with {rate:g} and not {wanted:g}; give that, or set "
                "checkpoint.weights_only=true to begin a schedule of its own with the weights alone"
            )


def callbacks_of(config: Config, techniques: Sequence[Technique]) -> list[Callback]:
    """Those that the config names, and those that every run has."""
    callbacks: list[Callback] = [EngagementReport(), MicrobatchHistory(), OverlappedDDP()]
    setters = [t for t in techniques if isinstance(t, FlagTechnique) and t.flag is MATMUL_PRECISION]
    if all(t.engaged is False for t in setters):
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
    callbacks += [OptimizerMonitor(), LearningCurves(), RunHistory(), RunSummary()]
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
                # Absolute: its files are written by a process that may have begun in another folder.
                init_kwargs={"mode": wandb.mode, "dir": str(folder.path.absolute())},
            )
        )
    if (tensorboard := config.loggers.tensorboard) is not None:
        loggers.append(TensorboardLogger(str(folder / "tensorboard"), tensorboard.flush_interval))
    if (file := config.loggers.file) is not None:
        again = f".{folder.starts}" if folder.starts > 1 else ""  # one that was interrupted keeps its own
        loggers.append(FileLogger(str(folder / f"log-rank{{rank}}{again}.txt"), flush_interval=file.flush_interval))
    return loggers
