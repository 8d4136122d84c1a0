"""python -m benchmarks.peers.hf_trainer -f FILE [key=value ...] [peer.NAME=VALUE ...]: fine-tuning with HF Trainer.

The job is that of the config: the same samples in the same order, tokens, padding, batch size, initial weights,
dropout, AdamW settings, learning rate of every batch, clipping and evaluations. ``algorithms`` and
``trainer.precision`` are ignored; instead there are

- ``peer.preset``: ``best`` (default), HF Trainer's fastest flags: bf16, TF32, torch.compile, fused AdamW, non-blocking
  copies, no logging; without a GPU, only those that do not need one. ``plain``: the default flags.
- ``peer.attention``: an ``attn_implementation``. Default ``sdpa``, as in transformers.
- ``peer.regional_compile``: accelerate compiles one block and reuses it. Default false.
- ``peer.apply_recommended``: apply :func:`composer_speedups.apply_recommended` to the model first. Default false.
- ``peer.grad_norm``: compute the gradient norm, which HF Trainer does at every step even without clipping, and no flag
  disables. Default true; false removes it in a subclass.
- ``peer.NAME`` for every other name: a TrainingArguments field, such as ``peer.torch_compile_mode=reduce-overhead``.
  With ``peer.train_sampling_strategy=group_by_length``, which needs ``data.padding=longest``, transformers' sampler
  orders the samples, and only the number and size of batches are those of the job.

DataLoader settings are those of the ``data`` section. Writes report.json like train.py.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from composer.devices import DeviceCPU, DeviceGPU
from torch.utils.data import DataLoader
from transformers import EvalPrediction, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from benchmarks.peers.job import Job, Plan, build_job, plan_of, read_arguments, set_attention
from benchmarks.peers.meter import Meter
from composer_speedups.core.errors import ConfigError, did_you_mean, first_line
from composer_speedups.core.operator_recorder import compile_counts
from composer_speedups.recommendation import apply_recommended
from composer_speedups.train.cli import exit_codes
from composer_speedups.train.config.schema import Config
from composer_speedups.train.run_folder import RunFolder

_BEST = {"optim": "adamw_torch_fused", "logging_nan_inf_filter": False}
_BEST_ON_GPU = {"bf16": True, "tf32": True, "torch_compile": True, "accelerator_config": {"non_blocking": True}}
_OWN_FLAGS: dict[str, Any] = {
    "preset": "best",
    "attention": "sdpa",
    "regional_compile": False,
    "apply_recommended": False,
    "grad_norm": True,
}


def main(arguments: list[str]) -> None:
    config, flags = read_arguments(arguments)
    own = {name: flags.pop(name, default) for name, default in _OWN_FLAGS.items()}
    config.algorithms, config.trainer.precision = {}, "fp32"  # settings of the suite; the report shows what was used
    on_gpu = config.trainer.device != "cpu" and torch.cuda.is_available()
    if config.trainer.device == "gpu" and not on_gpu:
        raise ConfigError("trainer.device: there is no GPU here; set trainer.device=cpu or auto")
    if own["regional_compile"]:
        os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
    with RunFolder(config) as folder:
        job = build_job(config, on_gpu=on_gpu)
        plan = plan_of(config, len(job.train))
        args = _training_arguments(config, plan, own["preset"], flags, on_gpu, str(folder.path))
        if args.train_sampling_strategy == "group_by_length":
            job = job._replace(train=_grouped_by_length(job.train, config))
        device = DeviceGPU(allow_tf32=bool(args.tf32 or args.torch_compile)) if on_gpu else DeviceCPU()
        meter = Meter(config, job.model, device, _precision(args))
        set_attention(job.model, own["attention"])
        if own["apply_recommended"]:
            own["apply_recommended"] = {name: len(names) for name, names in apply_recommended(job.model.model).items()}
        trainer = _Peer(job, plan, meter, args, config, grad_norm=own["grad_norm"])
        before = compile_counts()
        trainer.train()
        meter.end()
        evidence = {**own, **_evidence(trainer, args), "graphs": compile_counts().since(before).graphs}
        meter.write(folder, "hf_trainer", evidence)


def _training_arguments(
    config: Config, plan: Plan, preset: str, flags: dict[str, Any], on_gpu: bool, folder: str
) -> TrainingArguments:
    """The job's settings, overridden by the preset's flags, overridden by the user's.

    Raises:
        ConfigError: An unknown name, or a value that TrainingArguments refuse.
    """
    if preset not in ("best", "plain"):
        raise ConfigError(f"peer.preset: must be best or plain, not {preset!r}")
    known = [field.name for field in dataclasses.fields(TrainingArguments) if field.init]
    unknown = next((name for name in flags if name not in known), None)
    if unknown is not None:
        raise ConfigError(f"unknown key 'peer.{unknown}'{did_you_mean(unknown, [*known, *_OWN_FLAGS])}")
    optimizer, data = config.optimizer, config.data
    job = {
        "output_dir": folder,
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
    best = {**_BEST, **(_BEST_ON_GPU if on_gpu else {})} if preset == "best" else {}
    try:
        arguments = TrainingArguments(**{**job, **best, **flags})
    except (ValueError, ImportError) as error:
        raise ConfigError(f"peer: TrainingArguments refused its flags ({first_line(error)})") from error
    if arguments.n_gpu > 1:
        raise ConfigError(f"peer: HF Trainer would use {arguments.n_gpu} GPUs; set CUDA_VISIBLE_DEVICES=0")
    return arguments


def _grouped_by_length(loader: DataLoader[Any], config: Config) -> DataLoader[Any]:
    """The job's loader with the sampler that transformers uses for ``group_by_length``.

    Raises:
        ConfigError: The batches are padded to a fixed length, so grouping would change nothing.
    """
    if config.data.padding != "longest":
        raise ConfigError("peer.train_sampling_strategy: group_by_length saves nothing here; set data.padding=longest")
    rows: Any = loader.dataset
    return DataLoader(
        rows,
        batch_size=loader.batch_size,
        sampler=LengthGroupedSampler(
            config.data.batch_size, lengths=rows.lengths.tolist(), generator=torch.Generator().manual_seed(config.seed)
        ),
        collate_fn=loader.collate_fn,
        drop_last=loader.drop_last,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def _precision(args: TrainingArguments) -> str:
    return "amp_bf16" if args.bf16 else "amp_fp16" if args.fp16 else "fp32"


class _Peer(Trainer):
    """HF Trainer with the job's loaders and learning rates, and with a meter."""

    def __init__(
        self, job: Job, plan: Plan, meter: Meter, args: TrainingArguments, config: Config, *, grad_norm: bool
    ) -> None:
        self._job, self._plan, self._meter, self._grad_norm = job, plan, meter, grad_norm
        self._decays_all = config.optimizer.decay_bias_and_norm
        self._on_host: deque[Any] = deque()  # batches whose step has not run yet
        self._new_epoch = True
        super().__init__(
            model=job.model.model,
            args=args,
            train_dataset=job.train.dataset,
            eval_dataset=job.eval and job.eval.dataset,
            callbacks=[_Steps(self, plan, meter)],
            compute_metrics=_accuracy,
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        )
        self.remove_callback(PrinterCallback)

    def get_train_dataloader(self) -> DataLoader:
        prepared = self.accelerator.prepare(self._job.train)
        prepared.base_dataloader = _Tap(prepared.base_dataloader, self._on_host)
        return prepared

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        if not hasattr(self, "_evaluation"):  # created once, so that its workers can persist
            self._evaluation = self.accelerator.prepare(self._job.eval)
        return self._evaluation

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or _unwrapped(self.optimizer), self._plan.rate
            )
        return self.lr_scheduler

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        return [name for name, p in model.named_parameters() if self._decays_all or p.ndim > 1]

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        if not self._new_epoch:
            self._meter.waiting()
        samples = super().get_batch_samples(epoch_iterator, num_batches, device)
        # accelerate's loader starts its workers here, which is not data wait in the suite's measurement
        if self._new_epoch:
            self._meter.waiting()
        self._new_epoch = False
        self._meter.loaded(self._on_host.popleft())
        return samples

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.last_loss = super().training_step(*args, **kwargs)
        return self.last_loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self._meter.evaluating():
            metrics = super().evaluate(*args, **kwargs)
        self._meter.metrics.update({name: metrics[f"eval_{name}"] for name in ("accuracy", "loss")})
        return metrics

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        return super()._get_grad_norm(*args, **kwargs) if self._grad_norm else None


class _Steps(TrainerCallback):
    def __init__(self, trainer: _Peer, plan: Plan, meter: Meter) -> None:
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
    """A loader that also puts each batch, still on the host, into a queue before accelerate receives it."""

    def __init__(self, loader: Any, queue: deque[Any]) -> None:
        self._loader, self._queue = loader, queue

    def __iter__(self) -> Iterator[Any]:
        self._queue.clear()
        for batch in self._loader:
            self._queue.append(batch)
            yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's wrapper, if it has one."""
    return getattr(optimizer, "optimizer", optimizer)


def _accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy over labels that are not ignored: all of a classifier's, the masked ones of a masked LM."""
    predicted, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    return {"accuracy": float((predicted == labels)[labels != -100].mean())}


def _evidence(trainer: _Peer, args: TrainingArguments) -> dict[str, Any]:
    """What the run used, read from the objects if possible."""
    return {
        "fused": bool(trainer._meter.state.optimizers[0].param_groups[0].get("fused")),
        "attention": trainer._job.model.model.config._attn_implementation,
        "bf16": args.bf16,
        "tf32": args.tf32,
        "torch_compile": args.torch_compile,
        "torch_compile_mode": args.torch_compile_mode,
        "train_sampling_strategy": args.train_sampling_strategy,
        "max_grad_norm": args.max_grad_norm,
    }


if __name__ == "__main__":
    with exit_codes():
        main(sys.argv[1:])
