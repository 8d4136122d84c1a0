"""Config → Composer Trainer, and nothing of an engine of our own."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from composer import Trainer
from composer.core import Algorithm, Callback
from composer.devices import Device, DeviceCPU, DeviceGPU
from composer.models import ComposerModel
from composer.utils import dist

from composer_speedups.core.credentials import masked_command_line
from composer_speedups.core.errors import ConfigError, UserError, first_line
from composer_speedups.core.ordering import refuse_clashes, sort_techniques
from composer_speedups.core.requirements import Context
from composer_speedups.core.technique import Technique
from composer_speedups.core.trainer_state import torch_device
from composer_speedups.data.loader import Data
from composer_speedups.distributed.fsdp import GradientClipping, check_sharding, fsdp_parallelism, sharded_blocks
from composer_speedups.distributed.host import share_cores
from composer_speedups.train.checkpoints.reading import restricted_loading
from composer_speedups.train.checkpoints.saver import WholeCheckpointSaver
from composer_speedups.train.config import Config, written
from composer_speedups.train.config.schema import TrainerConfig
from composer_speedups.train.interrupt import StopSignals
from composer_speedups.train.observers import callbacks_of, loggers_of
from composer_speedups.train.optimization import build_optimizer, build_scheduler
from composer_speedups.train.out_of_memory import MicrobatchTrainer
from composer_speedups.train.run_folder import RunFolder

__all__ = ["build_trainer", "context_of", "join_ranks", "open_device"]


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
    model: ComposerModel,
    data: Data,
    techniques: Sequence[Technique],
    device: Device,
    folder: RunFolder,
    callbacks: Sequence[Callback] = (),
    stop: StopSignals | None = None,
) -> Trainer:
    """Composer's Trainer with the config's settings; techniques engage while it is built.

    ``callbacks`` come after those of the config. Training ends with a checkpoint when ``stop`` asks for it.

    Raises:
        ConfigError: The checkpoint to load is malformed, does not fit the run, was written by other techniques, or
            holds what would execute something.
    """
    settings, checkpoint = config.trainer, config.checkpoint
    offloads = bool(settings.fsdp and settings.fsdp.cpu_offload) or any(t.computes_on_host for t in techniques)
    share_cores(computes=torch_device(device).type == "cpu" or offloads)
    everyone = [*callbacks_of(config, techniques), *callbacks]
    if checkpoint.interval is not None:  # last: it saves what the others have seen
        everyone.append(WholeCheckpointSaver(folder / "checkpoints", checkpoint.interval, checkpoint.keep, stop))
    # A masked LM's loss is a mean over masked tokens, and reviews differ in how many they have. Counting them waits for
    # the GPU, so one whole batch on one rank, which is its own mean, is left out.
    by_tokens = config.model.task == "mlm"
    several = settings.microbatch_size is not None or dist.get_world_size() > 1
    algorithms: list[Algorithm] = [*techniques]
    if config.optimizer.max_grad_norm is not None:
        algorithms.append(GradientClipping("norm", clipping_threshold=config.optimizer.max_grad_norm))
    if settings.fsdp:
        sharded_blocks(model)
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
            algorithm_passes=[refuse_clashes, sort_techniques],
            callbacks=everyone,
            loggers=loggers_of(config, folder),
            run_name=config.run_name,
            progress_bar=settings.progress_bar,
            device=device,
            precision=settings.precision,
            device_train_microbatch_size=settings.microbatch_size,
            accumulate_train_batch_on_tokens=by_tokens and several,
            parallelism_config=fsdp_parallelism(settings.fsdp) if settings.fsdp else settings.parallelism_config,
            dist_timeout=settings.dist_timeout,
            seed=config.seed,
            deterministic_mode=settings.deterministic,
            # Not Composer's autoresume: it takes the latest file unseen, whole or not, and unpickles whatever it holds.
            load_path=folder.load,
            load_weights_only=checkpoint.weights_only and not folder.resumed,
        )
    trainer.on_out_of_memory, trainer.by_tokens = settings.on_out_of_memory, by_tokens
    trainer.go_on()
    if folder.load is not None and (folder.resumed or not checkpoint.weights_only):
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
