"""Build Composer's Trainer from the config, with the callbacks that observe and record the run."""

from __future__ import annotations

import contextlib
import copy
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from composer import Trainer
from composer.core import Algorithm, Callback, DataSpec
from composer.devices import Device, DeviceCPU, DeviceGPU
from composer.utils import dist, reproducibility

from composer_speedups.callbacks.class_report import ClassReport
from composer_speedups.callbacks.evaluations import BestWeights, EarlyStopping, find_metric
from composer_speedups.callbacks.float32_matmuls import Float32Matmuls
from composer_speedups.callbacks.losses import LossMonitor
from composer_speedups.callbacks.memory import MemoryAnatomy
from composer_speedups.callbacks.run_history import RunHistory
from composer_speedups.callbacks.run_report import RunReport
from composer_speedups.callbacks.throughput import ThroughputMonitor
from composer_speedups.core.errors import ConfigError, first_line
from composer_speedups.core.run import Run
from composer_speedups.core.technique import Technique
from composer_speedups.core.trainer_state import torch_device
from composer_speedups.data.batching import split_by_tokens
from composer_speedups.data.loader import Data, build_data
from composer_speedups.distributed.ddp import OverlappedDDP
from composer_speedups.distributed.fsdp import GradientClipping, check_sharding, fsdp_parallelism, sharded_blocks
from composer_speedups.distributed.host import share_cores
from composer_speedups.tasks.models import FinetuneModel, build_model, resolve_name
from composer_speedups.tasks.task import build_task
from composer_speedups.train.checkpoints.reading import restricted_loading
from composer_speedups.train.checkpoints.saver import WholeCheckpointSaver
from composer_speedups.train.config.load import written
from composer_speedups.train.config.schema import CheckpointConfig, Config, OptimizerConfig, TrainerConfig
from composer_speedups.train.fit import StopSignals
from composer_speedups.train.loggers import loggers_of
from composer_speedups.train.optimization import build_optimizer, build_scheduler
from composer_speedups.train.out_of_memory import MicrobatchTrainer

if TYPE_CHECKING:
    from composer_speedups.train.run_folder import RunFolder

_ONE_THREAD_HIDDEN_SIZE = 128  # up to this hidden size, a second CPU thread gains nothing


def open_device(config: TrainerConfig) -> Device:
    """The device to train on, with TF32 off. Composer turns TF32 on, but fp32 should mean float32.

    A technique turns TF32 on if requested; otherwise :class:`Float32Matmuls` keeps it off, whatever other Trainers of
    the process do.

    Raises:
        ConfigError: There are fewer GPUs than ranks, or none although ``trainer.device``, Composer's mixed precision,
            FSDP or automatic micro-batches need one.
    """
    if config.device == "gpu" and not torch.cuda.is_available():
        raise ConfigError("trainer.device: there is no GPU here; set trainer.device=cpu or auto")
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    if config.fsdp is not None:
        check_sharding(config.fsdp, on_gpu=on_gpu)
    if on_gpu:
        ranks, gpus = dist.get_local_world_size(), torch.cuda.device_count()
        if ranks > gpus:
            raise ConfigError(
                f"trainer.device: {ranks} ranks need one GPU each, and there are {gpus}; lower composer -n"
            )
        device = DeviceGPU(allow_tf32=False)
        if dist.get_world_size() == ranks or os.environ.get("GLOO_SOCKET_IFNAME"):
            # Allows host tensors to be reduced on the host. Across nodes, gloo must be told the network interface.
            device.dist_backend = "cpu:gloo,cuda:nccl"
        return device
    if config.precision != "fp32":
        raise ConfigError(f"trainer.precision: {config.precision} needs a GPU; set trainer.precision=fp32")
    if config.parallelism_config:
        raise ConfigError("trainer.parallelism_config: Composer's FSDP needs GPUs; on the CPU use trainer.fsdp, or DDP")
    if config.microbatch_size == "auto":
        raise ConfigError("trainer.microbatch_size: auto needs a GPU; give a number, or null")
    return DeviceCPU()


def join_ranks(config: TrainerConfig, device: Device) -> None:
    """Join the process group before any rank reads data. A single process joins one only if its model is sharded."""
    if dist.get_world_size() > 1 or config.fsdp or config.parallelism_config:
        dist.initialize_dist(device, config.dist_timeout)


def run_of(config: TrainerConfig, device: Device) -> Run:
    """What techniques may check of the run before the model is built."""
    return Run(
        torch_device(device),
        config.precision,
        ranks=dist.get_world_size(),
        microbatch_size=config.microbatch_size,
        sharded=bool(config.fsdp or config.parallelism_config),
    )


def build_data_and_model(config: Config, *, on_gpu: bool) -> tuple[Data, FinetuneModel]:
    """The samples of a config in train.py's order, and the model with train.py's initial weights."""
    task, name = build_task(config.task), resolve_name(config.model.name)
    data = build_data(config.data, task, model_name=name, on_gpu=on_gpu, seed=config.seed)
    reproducibility.seed_all(config.seed)
    return data, build_model(config.model, task, data.tokenizer, config.data.max_length)


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
    """Build Composer's Trainer with the config's settings; techniques engage meanwhile.

    Args:
        config: The run's config.
        model: The model.
        data: The data.
        techniques: The techniques of ``config.algorithms``.
        device: The device to train on.
        folder: Folder of checkpoints and logs; None writes neither.
        callbacks: Additional callbacks, which come after those of the config.
        stop: Requests the end of training after a checkpoint.

    Raises:
        ConfigError: The checkpoint to load is malformed, does not fit the run, was written with other techniques, or
            contains something that would be executed. Or ``checkpoint.best`` or ``trainer.early_stopping`` names a
            metric that the task does not evaluate.
    """
    settings, checkpoint = config.trainer, config.checkpoint
    for key, section in (("checkpoint.best", checkpoint.best), ("trainer.early_stopping", settings.early_stopping)):
        if section is not None:
            find_metric(model.get_metrics(is_train=False) if data.eval else {}, section.metric, f"{key}.metric")
    load, resumed = (None, False) if folder is None else (folder.load, folder.resumed)
    weights_only = load is not None and checkpoint.weights_only and not resumed
    offloads = bool(settings.fsdp and settings.fsdp.cpu_offload) or any(t.computes_on_host for t in techniques)
    on_cpu = torch_device(device).type == "cpu"
    one_thread = on_cpu and model.config.hidden_size <= _ONE_THREAD_HIDDEN_SIZE
    share_cores(computes=on_cpu or offloads, at_most=1 if one_thread else None)
    if settings.fsdp:
        sharded_blocks(model)
    with restricted_loading(trust=checkpoint.trust_checkpoint), _one_line_from_wandb():
        trainer = MicrobatchTrainer(
            on_out_of_memory=settings.on_out_of_memory,
            model=model,
            train_dataloader=_split_by(settings.microbatch_tokens, data.train),
            eval_dataloader=data.eval,
            eval_interval=settings.evaluates_every if data.eval else 1,
            eval_subset_num_batches=settings.eval_batches or -1,
            max_duration=settings.max_duration,
            optimizers=build_optimizer(model, config.optimizer),
            schedulers=build_scheduler(config.scheduler),
            algorithms=[*techniques, *_gradient_clipping(config.optimizer)],
            # the saver last, so that it saves the state of all others
            callbacks=[*_callbacks(config, techniques, folder), *callbacks, *_saver(checkpoint, folder, stop)],
            loggers=loggers_of(config, folder),
            run_name=config.run_name,
            progress_bar=False,  # TrainingProgress replaces it
            device=device,
            precision=settings.precision,
            device_train_microbatch_size=settings.microbatch_size,
            parallelism_config=fsdp_parallelism(settings.fsdp) if settings.fsdp else settings.parallelism_config,
            dist_timeout=settings.dist_timeout,
            seed=config.seed,
            deterministic_mode=settings.deterministic,
            # Not Composer's autoresume, which takes the latest file without checking that it is complete, and unpickles
            # anything.
            load_path=load,
            load_weights_only=weights_only,
        )
    if load is not None and not weights_only:
        _check_rates(trainer, config.optimizer.lr)
    trainer.logger.log_hyperparameters(written(config))
    return trainer


def _split_by(max_tokens: int | None, data: DataSpec) -> DataSpec:
    """The data with micro-batches of at most this many real tokens; unchanged if None."""
    if max_tokens is None:
        return data
    data = copy.copy(data)
    data.split_batch = split_by_tokens(max_tokens)
    return data


def _gradient_clipping(config: OptimizerConfig) -> list[Algorithm]:
    threshold = config.max_grad_norm
    return [] if threshold is None else [GradientClipping("norm", clipping_threshold=threshold)]


def _saver(config: CheckpointConfig, folder: RunFolder | None, stop: StopSignals | None) -> list[Callback]:
    if config.interval is None or folder is None:
        return []
    return [WholeCheckpointSaver(folder / "checkpoints", config.interval, config.keep, stop or StopSignals())]


@contextlib.contextmanager
def _one_line_from_wandb() -> Iterator[None]:
    """Turn an error of wandb into one line."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("wandb"):  # importing wandb, to compare classes, takes a second
            raise
        raise ConfigError(
            f"loggers.wandb: Weights & Biases cannot start a run ({first_line(error)}); "
            "fix its keys, or set loggers.wandb.mode=offline"
        ) from error


def _check_rates(trainer: Trainer, wanted: float) -> None:
    """A checkpoint restores its schedule's learning rate, so another one in the config would have no effect."""
    for group in (group for optimizer in trainer.state.optimizers for group in optimizer.param_groups):
        rate = float(group.get("initial_lr", wanted))
        if not math.isclose(rate, wanted, rel_tol=1e-6):
            raise ConfigError(
                f"optimizer.lr: the checkpoint continues with {rate:g} instead of {wanted:g}; set that, or "
                "checkpoint.weights_only=true to start a new schedule from the weights"
            )


def _callbacks(config: Config, techniques: Sequence[Technique], folder: RunFolder | None) -> list[Callback]:
    """The callbacks that the config names, and those of every run. Only the first three, or four with several ranks,
    do something in each batch."""
    named = config.callbacks
    sets_matmul_precision = any(t.sets_float32_matmuls and t.engaged is not False for t in techniques)
    return [
        *([OverlappedDDP()] if dist.get_world_size() > 1 else []),
        *_configured(ThroughputMonitor, named.throughput),
        *_configured(MemoryAnatomy, named.memory),
        LossMonitor(named.finite_loss, named.divergence, metrics_at_interval=True),
        *([] if sets_matmul_precision else [Float32Matmuls()]),
        ClassReport(),
        *_configured(BestWeights, config.checkpoint.best),
        *_configured(EarlyStopping, config.trainer.early_stopping),
        RunHistory({} if folder is None else folder.inputs),
        RunReport(),
    ]


def _configured(callback: Callable[..., Callback], section: Any) -> list[Callback]:
    return [] if section is None else [callback(**section.model_dump())]
