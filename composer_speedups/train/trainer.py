"""Build Composer's Trainer from the config, with the callbacks that observe and record the run."""

from __future__ import annotations

import contextlib
import copy
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from composer import Trainer
from composer.core import Algorithm, Callback, State, Time, TimeUnit
from composer.devices import Device, DeviceCPU, DeviceGPU
from composer.loggers import FileLogger, LoggerDestination, TensorboardLogger, WandBLogger
from composer.optim import (
    ComposerScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingWithWarmupScheduler,
    LinearWithWarmupScheduler,
)
from composer.utils import dist, reproducibility

from composer_speedups.callbacks.evaluations import BestWeights, EarlyStopping, find_metric
from composer_speedups.callbacks.history import ClassReport, RunHistory
from composer_speedups.callbacks.losses import LossMonitor
from composer_speedups.callbacks.memory import MemoryAnatomy
from composer_speedups.callbacks.run_report import RunReport
from composer_speedups.callbacks.throughput import ThroughputMonitor
from composer_speedups.core.errors import ConfigError, first_line
from composer_speedups.core.run import Run
from composer_speedups.core.technique import Technique
from composer_speedups.core.trainer_state import torch_device
from composer_speedups.data.batching import TokenBatchSampler, split_by_tokens
from composer_speedups.data.loader import Data, build_data
from composer_speedups.distributed.cpu import share_cores
from composer_speedups.distributed.ddp import OverlappedDDP
from composer_speedups.distributed.fsdp import GradientClipping, check_sharding, fsdp_parallelism, sharded_blocks
from composer_speedups.tasks.models import FinetuneModel, build_model, resolve_name
from composer_speedups.tasks.task import Task, build_task
from composer_speedups.train.checkpoints import WholeCheckpointSaver, restricted_loading
from composer_speedups.train.config.load import written
from composer_speedups.train.config.schema import Config, OptimizerConfig, SchedulerConfig, TrainerConfig
from composer_speedups.train.console import TrainingProgress
from composer_speedups.train.fit import StopSignals, is_trained
from composer_speedups.train.out_of_memory import MicrobatchTrainer
from composer_speedups.train.run_folder import RunFolder

_IN_EACH_BATCH = ("time/batch", "time/sample", "time/token", "loss/train/", "trainer/")  # beginnings of names
_ONE_THREAD_HIDDEN_SIZE = 128  # up to this hidden size, a second CPU thread gains nothing


def open_device(config: TrainerConfig) -> Device:
    """The device to train on, with TF32 off, which Composer would turn on."""
    if config.device == "gpu" and not torch.cuda.is_available():
        raise ConfigError("trainer.device: there is no GPU here; set trainer.device=cpu or auto")
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    if config.fsdp is not None:
        check_sharding(config.fsdp)
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
    if config.microbatch_size == "auto":
        raise ConfigError("trainer.microbatch_size: auto needs a GPU; give a number, or null")
    return DeviceCPU()


def join_ranks(config: TrainerConfig, device: Device) -> None:
    """Join the process group before any rank reads data. A single process joins one only if its model is sharded."""
    if dist.get_world_size() > 1 or config.fsdp:
        dist.initialize_dist(device, config.dist_timeout)


def run_of(config: TrainerConfig, device: Device) -> Run:
    """What techniques may check of the run before the model is built."""
    return Run(
        torch_device(device),
        config.precision,
        ranks=dist.get_world_size(),
        microbatch_size=config.microbatch_size,
        sharded=config.fsdp is not None,
    )


def data_of(config: Config, task: Task, *, on_gpu: bool, indexed: bool = False) -> Data:
    """The samples of a config in train.py's order; see :func:`.build_data`."""
    name, tokens = resolve_name(config.model.name), config.trainer.microbatch_tokens
    return build_data(
        config.data, task, model_name=name, on_gpu=on_gpu, seed=config.seed, indexed=indexed, microbatch_tokens=tokens
    )


def build_data_and_model(config: Config, *, on_gpu: bool) -> tuple[Data, FinetuneModel]:
    """The samples of a config in train.py's order, and the model with train.py's initial weights."""
    task = build_task(config.task)
    data = data_of(config, task, on_gpu=on_gpu)
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
    """Build Composer's Trainer; techniques engage meanwhile. ``stop`` requests the end of training."""
    settings, checkpoint = config.trainer, config.checkpoint
    for key, section in (("checkpoint.best", checkpoint.best), ("trainer.early_stopping", settings.early_stopping)):
        if section is not None:
            find_metric(model.get_metrics(is_train=False) if data.eval else {}, section.metric, f"{key}.metric")
    load, resumed = (None, False) if folder is None else (folder.load, folder.resumed)
    weights_only = load is not None and checkpoint.weights_only and not resumed
    on_cpu = torch_device(device).type == "cpu"
    one_thread = on_cpu and model.config.hidden_size <= _ONE_THREAD_HIDDEN_SIZE
    share_cores(computes=on_cpu or any(t.computes_on_host for t in techniques), at_most=1 if one_thread else None)
    if settings.fsdp:
        sharded_blocks(model)
    train_data, algorithms = data.train, list[Algorithm](techniques)
    rows = settings.microbatch_size
    if isinstance(sampler := getattr(train_data.dataloader, "sampler", None), TokenBatchSampler):
        rows = sampler.rows
    elif settings.microbatch_tokens is not None:
        train_data = copy.copy(data.train)
        train_data.split_batch = split_by_tokens(settings.microbatch_tokens)
    if config.optimizer.max_grad_norm is not None:
        algorithms.append(GradientClipping("norm", clipping_threshold=config.optimizer.max_grad_norm))
    observers = [*_callbacks(config, folder), *callbacks]
    if checkpoint.interval is not None and folder is not None:  # last, so that it saves the state of all others
        path, stop = folder / "checkpoints", stop or StopSignals()
        observers.append(WholeCheckpointSaver(path, checkpoint.interval, checkpoint.keep, stop))
    with restricted_loading(trust=checkpoint.trust_checkpoint), _one_line_from_wandb():
        trainer = MicrobatchTrainer(
            on_out_of_memory=settings.on_out_of_memory,
            model=model,
            train_dataloader=train_data,
            eval_dataloader=data.eval,
            eval_interval=(settings.eval_interval or settings.max_duration) if data.eval else 1,
            eval_subset_num_batches=settings.eval_batches or -1,
            max_duration=settings.max_duration,
            optimizers=build_optimizer(model, config.optimizer),
            schedulers=build_scheduler(config.scheduler),
            algorithms=algorithms,
            callbacks=observers,
            loggers=_loggers(config, folder),
            run_name=config.run_name,
            progress_bar=False,  # TrainingProgress replaces it
            device=device,
            precision=settings.precision,
            device_train_microbatch_size=rows,
            parallelism_config=fsdp_parallelism(settings.fsdp) if settings.fsdp else None,
            dist_timeout=settings.dist_timeout,
            seed=config.seed,
            deterministic_mode=settings.deterministic,
            # Not Composer's autoresume, which takes the latest file without checking that it is complete, and unpickles
            # anything.
            load_path=load,
            load_weights_only=weights_only,
        )
    _check_rates(trainer, config.optimizer.lr)
    if is_trained(trainer.state) and not resumed:
        done = f"{settings.max_duration} counts from the start, and is over in checkpoint.load; nothing is left"
        raise ConfigError(f"trainer.max_duration: {done}; set a longer one")
    trainer.logger.log_hyperparameters(written(config))
    return trainer


@contextlib.contextmanager
def _one_line_from_wandb() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("wandb"):  # importing wandb, to compare classes, takes a second
            raise
        raise ConfigError(
            f"loggers.wandb: Weights & Biases cannot start a run ({first_line(error)}); "
            "fix its keys, or set loggers.wandb.mode=offline"
        ) from error


def build_optimizer(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Build torch's AdamW with its per-parameter loop; faster implementations are techniques."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained}]
    if not config.decay_bias_and_norm:  # biases and norm weights are vectors
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
    """Build a linear warm-up, followed by the schedule that the config names."""
    # not as strings, which Composer would parse in each batch
    warmup, end = Time.from_timestring(config.warmup), Time(1.0, TimeUnit.DURATION)
    if config.name == "constant":
        return ConstantWithWarmupScheduler(warmup, t_max=end)
    cosine = config.name == "cosine"
    kind = CosineAnnealingWithWarmupScheduler if cosine else LinearWithWarmupScheduler
    return _OncePerBatch(kind(warmup, t_max=end))


class _OncePerBatch(ComposerScheduler):
    """A schedule that is computed once per batch, and not for each group of parameters."""

    def __init__(self, schedule: ComposerScheduler) -> None:
        self._schedule = schedule
        self._batch: tuple[Any, ...] = ()

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        # A checkpoint is loaded into the timestamp that is there.
        batch = (state.timestamp, state.timestamp.batch.value, state.max_duration)
        if not self._batch or any(now is not then for now, then in zip(batch, self._batch, strict=True)):
            self._batch, self._factor = batch, self._schedule(state, ssr)
        return self._factor


def _loggers(config: Config, folder: RunFolder | None) -> list[LoggerDestination]:
    """The progress display, and the loggers that the config names, which write to the run's folder."""
    loggers: list[LoggerDestination] = []
    if config.trainer.progress_bar and dist.get_global_rank() == 0:
        loggers.append(TrainingProgress())
    if folder is None:
        return loggers
    if (wandb := config.loggers.wandb) is not None:
        # Absolute, because wandb's writing process may have been started in another folder.
        started = {"mode": wandb.mode, "dir": str(folder.path.absolute())}
        loggers.append(
            _WandBAtInterval(config.loggers.interval, **wandb.model_dump(exclude={"mode"}), init_kwargs=started)
        )
    if (tensorboard := config.loggers.tensorboard) is not None:
        folder_of_events = str(folder / "tensorboard")
        loggers.append(_TensorboardAtInterval(config.loggers.interval, folder_of_events, tensorboard.flush_interval))
    if (file := config.loggers.file) is not None:
        name = f"log-rank{dist.get_global_rank()}"
        earlier = len([*folder.path.glob(f"{name}.*txt")])  # logs of interrupted processes are kept
        path = folder / f"{name}{f'.{earlier + 1}' if earlier else ''}.txt"
        loggers.append(FileLogger(str(path), flush_interval=file.flush_interval))
    return loggers


class _AtInterval(LoggerDestination):
    """Drops the values that Composer logs in each batch, except every ``interval`` batches, at the end, and in batches
    with other logged values, for which dashboards use them as the x-axis."""

    def __init__(self, interval: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._interval, self._logged = interval, -1

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if step is not None and not all(name.startswith(_IN_EACH_BATCH) for name in metrics):
            self._logged = step
        if step is None or step % self._interval == 0 or step == self._logged:
            super().log_metrics(metrics, step)


class _WandBAtInterval(_AtInterval, WandBLogger):
    pass


class _TensorboardAtInterval(_AtInterval, TensorboardLogger):
    pass


def _check_rates(trainer: Trainer, wanted: float) -> None:
    """A checkpoint restores its schedule's learning rate, so another one in the config would have no effect."""
    for group in (group for optimizer in trainer.state.optimizers for group in optimizer.param_groups):
        rate = float(group.get("initial_lr", wanted))
        if not math.isclose(rate, wanted, rel_tol=1e-6):
            raise ConfigError(
                f"optimizer.lr: the checkpoint continues with {rate:g} instead of {wanted:g}; set that, or "
                "checkpoint.weights_only=true to start a new schedule from the weights"
            )


def _callbacks(config: Config, folder: RunFolder | None) -> list[Callback]:
    """Of these, only ThroughputMonitor, LossMonitor and OverlappedDDP work in each batch; so do the progress display
    and the checkpoint saver."""
    named = config.callbacks
    return [
        *([OverlappedDDP()] if dist.get_world_size() > 1 else []),
        *_configured(ThroughputMonitor, named.throughput),
        *_configured(MemoryAnatomy, named.memory),
        LossMonitor(named.finite_loss, named.divergence, metrics_at_interval=True),
        ClassReport(),
        *_configured(BestWeights, config.checkpoint.best),
        *_configured(EarlyStopping, config.trainer.early_stopping),
        RunHistory({} if folder is None else folder.inputs),
        RunReport(),
    ]


def _configured(callback: Callable[..., Callback], section: Any) -> list[Callback]:
    return [] if section is None else [callback(**section.model_dump())]
