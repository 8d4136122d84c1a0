"""Config → Composer Trainer: optimizer, schedule, callbacks, loggers, and nothing of an engine of our own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from composer import Trainer
from composer.core import Algorithm, Callback
from composer.devices import Device, DeviceCPU, DeviceGPU
from composer.loggers import FileLogger, LoggerDestination, TensorboardLogger, WandBLogger
from composer.models import ComposerModel
from composer.optim import (
    ComposerScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingWithWarmupScheduler,
    LinearWithWarmupScheduler,
)
from composer.utils import dist

from composer_speedups.algorithms.flags import Float32Matmuls
from composer_speedups.algorithms.ordering import refuse_clashes, sort_techniques
from composer_speedups.algorithms.requirements import Context
from composer_speedups.algorithms.technique import Technique
from composer_speedups.algorithms.tf32_matmul import TF32Matmul
from composer_speedups.callbacks.engagement import EngagementReport
from composer_speedups.callbacks.memory import MemoryAnatomy
from composer_speedups.callbacks.run_summary import RunSummary
from composer_speedups.callbacks.throughput import ThroughputMonitor
from composer_speedups.callbacks.wandb_axes import WandbAxes
from composer_speedups.config import Config
from composer_speedups.config.schema import OptimizerConfig, SchedulerConfig, TrainerConfig
from composer_speedups.data import Data
from composer_speedups.errors import ConfigError
from composer_speedups.out_of_memory import MicrobatchHistory, MicrobatchTrainer
from composer_speedups.runs import RunFolder
from composer_speedups.sharding import GradientClipping, check_sharding, parallelism_of, sharded_blocks
from composer_speedups.state import torch_device

__all__ = ["build_trainer", "context_of", "open_device"]


def open_device(config: TrainerConfig) -> Device:
    """The device to train on, with TF32 off: Composer turns it on, and fp32 should mean float32.

    The ``tf32_matmul`` technique turns it on where it is asked for; without it :class:`Float32Matmuls` keeps it off
    whatever other Trainers of the process do.

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
        check_sharding(config, on_gpu=True)
        return DeviceGPU(allow_tf32=False)
    if config.precision != "fp32":
        raise ConfigError(f"trainer.precision: {config.precision} needs a GPU; set trainer.precision=fp32")
    if config.parallelism_config:
        raise ConfigError("trainer.parallelism_config: Composer's FSDP needs GPUs; on the CPU use trainer.fsdp, or DDP")
    check_sharding(config, on_gpu=False)
    if config.microbatch_size == "auto":
        raise ConfigError("trainer.microbatch_size: auto needs a GPU; give a number, or null")
    return DeviceCPU()


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
    model: ComposerModel,
    data: Data,
    techniques: Sequence[Technique],
    device: Device,
    folder: RunFolder,
    callbacks: Sequence[Callback] = (),
) -> Trainer:
    """Composer's Trainer with the config's settings; techniques engage while it is built.

    ``callbacks`` come after those of the config.
    """
    settings, checkpoint = config.trainer, config.checkpoint
    # A masked LM's loss is a mean over masked tokens, and reviews differ in how many they have. Counting them waits for
    # the GPU, so one whole batch on one rank, which is its own mean, is left out.
    by_tokens = config.model.task == "mlm"
    several = settings.microbatch_size is not None or dist.get_world_size() > 1
    algorithms: list[Algorithm] = [*techniques]
    if config.optimizer.max_grad_norm is not None:
        algorithms.append(GradientClipping("norm", clipping_threshold=config.optimizer.max_grad_norm))
    if settings.fsdp:
        sharded_blocks(model)
    trainer = MicrobatchTrainer(
        model=model,
        train_dataloader=data.train,
        eval_dataloader=data.eval,
        eval_interval=settings.eval_interval if data.eval else 1,
        eval_subset_num_batches=settings.eval_batches or -1,
        max_duration=settings.max_duration,
        optimizers=build_optimizer(model, config.optimizer),
        schedulers=build_scheduler(config.scheduler),
        algorithms=algorithms,
        algorithm_passes=[refuse_clashes, sort_techniques],
        callbacks=[*_callbacks(config, techniques), *callbacks],
        loggers=_loggers(config, folder),
        run_name=config.run_name,
        progress_bar=settings.progress_bar,
        device=device,
        precision=settings.precision,
        device_train_microbatch_size=settings.microbatch_size,
        accumulate_train_batch_on_tokens=by_tokens and several,
        parallelism_config=parallelism_of(settings),
        dist_timeout=settings.dist_timeout,
        seed=config.seed,
        deterministic_mode=settings.deterministic,
        save_folder=str(folder / "checkpoints") if checkpoint.interval else None,
        save_interval=checkpoint.interval or "1ep",
        save_num_checkpoints_to_keep=checkpoint.keep,
        save_overwrite=True,  # the folder is this run's own
        load_path=checkpoint.load,
        load_weights_only=checkpoint.weights_only,
    )
    trainer.on_out_of_memory, trainer.by_tokens = settings.on_out_of_memory, by_tokens
    trainer.logger.log_hyperparameters(dataclasses.asdict(config))
    return trainer


def build_optimizer(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """torch's AdamW, one parameter at a time: faster implementations are techniques."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained}]
    if not config.decay_bias_and_norm:  # both are vectors
        groups = [
            {"params": [p for p in trained if p.ndim > 1]},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        foreach=False,
        fused=False,
    )


def build_scheduler(config: SchedulerConfig) -> ComposerScheduler:
    """Linear warm-up, then the shape that the config names."""
    if config.name == "cosine":
        return CosineAnnealingWithWarmupScheduler(config.warmup, alpha_f=config.final_fraction)
    if config.name == "linear":
        return LinearWithWarmupScheduler(config.warmup, alpha_f=config.final_fraction)
    return ConstantWithWarmupScheduler(config.warmup)


def _callbacks(config: Config, techniques: Sequence[Technique]) -> list[Callback]:
    callbacks: list[Callback] = [EngagementReport(), MicrobatchHistory()]
    if not any(isinstance(t, TF32Matmul) and t.engaged is not False for t in techniques):
        callbacks.append(Float32Matmuls())
    if config.callbacks.throughput is not None:
        callbacks.append(ThroughputMonitor(**dataclasses.asdict(config.callbacks.throughput)))
    if config.callbacks.memory is not None:
        callbacks.append(MemoryAnatomy(**dataclasses.asdict(config.callbacks.memory)))
    callbacks.append(RunSummary())
    if config.loggers.wandb is not None:
        callbacks.append(WandbAxes())
    return callbacks


def _loggers(config: Config, folder: RunFolder) -> list[LoggerDestination]:
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
        loggers.append(FileLogger(str(folder / "log-rank{rank}.txt"), flush_interval=file.flush_interval))
    return loggers
