"""Fine-tune a job with transformers' Trainer, or a subclass of it, measured by the suite's own callbacks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from composer.devices import DeviceCPU, DeviceGPU
from torch.utils.data import DataLoader
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from benchmarks.peers.job import PREFIX, Job, Plan, read_arguments
from benchmarks.peers.meter import Meter
from composer_speedups.core.compile_counts import compile_counts
from composer_speedups.core.errors import ConfigError, first_line
from composer_speedups.core.settings import Settings
from composer_speedups.train.config.schema import Config
from composer_speedups.train.run_folder import RunFolder

_BEST = {"optim": "adamw_torch_fused", "logging_nan_inf_filter": False}
_BEST_ON_GPU = {"bf16": True, "tf32": True, "torch_compile": True, "accelerator_config": {"non_blocking": True}}


def read_flags(arguments: Sequence[str], own: type[Settings]) -> tuple[Config, Any, dict[str, Any], bool]:
    """The config without techniques, the peer's own flags, the other flags, and whether to train on a GPU."""
    names = {argument: argument.partition("=")[0].removeprefix(PREFIX) for argument in arguments}
    others = [a for a in arguments if a.startswith(PREFIX) and names[a] not in own.model_fields]
    flags = {names[argument]: yaml.safe_load(argument.partition("=")[2]) for argument in others}
    config, given = read_arguments([argument for argument in arguments if argument not in others], own)
    config.algorithms, config.trainer.precision = {}, "fp32"  # settings of the suite; the report shows what was used
    on_gpu = config.trainer.device != "cpu" and torch.cuda.is_available()
    if config.trainer.device == "gpu" and not on_gpu:
        raise ConfigError("trainer.device: there is no GPU here; set trainer.device=cpu or auto")
    return config, given, flags, on_gpu


def training_arguments(
    kind: type[TrainingArguments], config: Config, plan: Plan, flags: dict[str, Any], *, on_gpu: bool, folder: Path
) -> TrainingArguments:
    """The job's settings, overridden by the fastest flags, overridden by the user's."""
    optimizer, data = config.optimizer, config.data
    job = {
        "output_dir": str(folder),
        "per_device_train_batch_size": data.batch_size,
        "per_device_eval_batch_size": data.eval_batch_size or data.batch_size,
        "max_steps": plan.batches,
        "learning_rate": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_epsilon": optimizer.eps,
        "max_grad_norm": optimizer.max_grad_norm or 0.0,  # 0 disables clipping
        "seed": config.seed,
        "dataloader_drop_last": data.drop_last,
        "dataloader_pin_memory": data.pin_memory and on_gpu,
        "use_cpu": not on_gpu,
        "eval_strategy": "no",  # the plan decides when
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    try:
        arguments = kind(**{**job, **_BEST, **(_BEST_ON_GPU if on_gpu else {}), **flags})
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(f"peer: TrainingArguments refused its flags ({first_line(error)})") from error
    if arguments.n_gpu > 1:
        raise ConfigError(f"peer: HF Trainer would use {arguments.n_gpu} GPUs; set CUDA_VISIBLE_DEVICES=0")
    return arguments


def meter_of(config: Config, job: Job, args: TrainingArguments, *, on_gpu: bool) -> Meter:
    device = DeviceGPU(allow_tf32=bool(args.tf32 or args.torch_compile)) if on_gpu else DeviceCPU()
    return Meter(config, job.model, device, "amp_bf16" if args.bf16 else "amp_fp16" if args.fp16 else "fp32")


class JobTrainer:
    """Mixin for a subclass of transformers' Trainer: the job's loader, learning rates and weight decay, and a meter."""

    args: Any
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any
    last_loss: torch.Tensor

    def __init__(
        self, job: Job, *, plan: Plan, meter: Meter, config: Config, grad_norm: bool = True, **kwargs: Any
    ) -> None:
        self._job, self._plan, self._meter, self._grad_norm = job, plan, meter, grad_norm
        self._config = config
        self._on_host: deque[Any] = deque()  # batches whose step has not run yet
        self._new_epoch = True
        super().__init__(callbacks=[_Steps(self, plan, meter)], **kwargs)  # type: ignore[call-arg]
        self.remove_callback(PrinterCallback)  # type: ignore[attr-defined]

    def get_train_dataloader(self) -> DataLoader:
        prepared = self.accelerator.prepare(self._job.train)
        prepared.base_dataloader = _Tap(prepared.base_dataloader, self._on_host, self.inputs_of)
        return prepared

    def inputs_of(self, batch: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The Trainer's inputs for a batch of the job, both on the host."""
        return batch

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            optimizer = optimizer or _unwrapped(self.optimizer)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._plan.rate)
        return self.lr_scheduler

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        decays_all = self._config.optimizer.decay_bias_and_norm
        return [name for name, p in model.named_parameters() if decays_all or p.ndim > 1]

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        if not self._new_epoch:
            self._meter.waiting()
        samples = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        # accelerate's loader starts its workers here, which is not data wait in the suite's measurement
        if self._new_epoch:
            self._meter.waiting()
        self._new_epoch = False
        self._meter.loaded(self._on_host.popleft())
        return samples

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.last_loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        return self.last_loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        return super()._get_grad_norm(*args, **kwargs) if self._grad_norm else None  # type: ignore[misc]

    def run(self, folder: RunFolder, peer: str, own: Mapping[str, Any]) -> None:
        """Train, and write the report; its evidence has the peer's own flags, too."""
        before = compile_counts()
        self.train()  # type: ignore[attr-defined]
        self._meter.end()
        graphs = compile_counts().since(before).graphs
        self._meter.write(folder, peer, {**own, **self._evidence(), "graphs": graphs})

    def _evidence(self) -> dict[str, Any]:
        """What the run used, read from the objects if possible."""
        args = self.args
        return {
            "fused": bool(self._meter.state.optimizers[0].param_groups[0].get("fused")),
            "attention": self._job.model.model.config._attn_implementation,
            "bf16": args.bf16,
            "tf32": args.tf32,
            "torch_compile": args.torch_compile,
            "torch_compile_mode": args.torch_compile_mode,
            "train_sampling_strategy": args.train_sampling_strategy,
            "max_grad_norm": args.max_grad_norm,
        }


class _Steps(TrainerCallback):
    def __init__(self, trainer: JobTrainer, plan: Plan, meter: Meter) -> None:
        self._trainer, self._plan, self._meter = trainer, plan, meter

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._meter.begin(_unwrapped(self._trainer.optimizer), self._plan.batches)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._meter.between_epochs()
        self._trainer._new_epoch = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._meter.end_batch(self._trainer.last_loss)
        control.should_evaluate = self._trainer._job.eval is not None and state.global_step in self._plan.evaluate_after


class _Tap:
    """A loader that puts each batch, still on the host, into a queue, and gives accelerate the inputs made of it."""

    def __init__(self, loader: Any, queue: deque[Any], inputs_of: Callable[[Any], Any]) -> None:
        self._loader, self._queue, self._inputs_of = loader, queue, inputs_of

    def __iter__(self) -> Iterator[Any]:
        self._queue.clear()
        for batch in self._loader:
            self._queue.append(batch)
            yield self._inputs_of(batch)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's wrapper, if it has one."""
    return getattr(optimizer, "optimizer", optimizer)
