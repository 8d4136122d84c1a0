"""python -m benchmarks.peers.hf_trainer -f FILE [key=value ...] [peer.NAME=VALUE ...]: fine-tuning with HF Trainer.

The job is that of the config: the same samples in the same order, tokens, padding, batch size, initial weights,
dropout, AdamW settings, learning rate of every batch, clipping and evaluations. ``algorithms`` and
``trainer.precision`` are ignored; instead there are

- HF Trainer's fastest flags: bf16, TF32, torch.compile, fused AdamW, non-blocking copies, no logging; without a GPU,
  only those that do not need one.
- ``peer.attention``: an ``attn_implementation``. Default ``sdpa``, as in transformers.
- ``peer.regional_compile``: accelerate compiles one block and reuses it. Default false.
- ``peer.apply_recommended``: apply :func:`composer_speedups.apply_recommended` to the model first. Default false.
- ``peer.max_graphs``: apply the same techniques and ``CUDAGraphs(max_graphs=...)``, on the GPU. Default 0: do not.
- ``peer.disentangled_flash``: DeBERTa with the attention kernels of the package disentangled-flash. Default false.
- ``peer.lora``: train PEFT's LoRA adapters of a frozen model, and the classifier in full, as ``get_peft_model`` sets
  them up: ``{rank: 8, alpha: 16, targets: all-linear, dropout: 0}``; the last two are their defaults. Default null:
  train the whole model.
- ``peer.grad_norm``: compute the gradient norm, which HF Trainer does at every step even without clipping, and no flag
  disables. Default true; false removes it in a subclass.
- ``peer.NAME`` for every other name: a TrainingArguments field, such as ``peer.torch_compile_mode=reduce-overhead``.
  With ``peer.train_sampling_strategy=group_by_length``, which needs ``data.padding=longest``, transformers' sampler
  orders the samples, and only the number and size of batches are those of the job.

DataLoader settings are those of the ``data`` section. Writes report.json like train.py.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import EvalPrediction, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from benchmarks.peers.job import Job, build_job, plan_of, set_attention
from benchmarks.peers.job_trainer import JobTrainer, meter_of, read_flags, training_arguments
from composer_speedups import CUDAGraphs, FusedLayers, Unpadding, apply, apply_recommended
from composer_speedups.core.apply import Applied
from composer_speedups.core.errors import ConfigError
from composer_speedups.core.settings import Settings
from composer_speedups.train.cli import exit_codes
from composer_speedups.train.config.schema import Config
from composer_speedups.train.run_folder import RunFolder


class Flags(Settings):
    attention: str = "sdpa"
    regional_compile: bool = False
    apply_recommended: bool = False
    max_graphs: int = 0
    disentangled_flash: bool = False
    grad_norm: bool = True
    lora: dict[str, Any] | None = None


_LORA = {"rank": "r", "alpha": "lora_alpha", "targets": "target_modules", "dropout": "lora_dropout"}


def main(arguments: list[str]) -> None:
    config, own, flags, on_gpu = read_flags(arguments, Flags)
    if own.regional_compile:
        os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
    with RunFolder(config) as folder:
        job = build_job(config, on_gpu=on_gpu)
        plan = plan_of(config, len(job.train))
        args = training_arguments(TrainingArguments, config, plan, flags, on_gpu=on_gpu, folder=folder.path)
        if args.train_sampling_strategy == "group_by_length":
            job = job._replace(train=_grouped_by_length(job.train, config))
        meter = meter_of(config, job, args, on_gpu=on_gpu)
        set_attention(job.model, own.attention)
        applied = _apply(job.model.model, own, args.device)
        if own.disentangled_flash:
            from disentangled_flash import optimize_deberta_training

            optimize_deberta_training(job.model.model.deberta)
        model = job.model.model if own.lora is None else _with_lora(job.model.model, own.lora)
        of_job: dict[str, Any] = {"plan": plan, "meter": meter, "config": config, "grad_norm": own.grad_norm}
        trainer = _Peer(job, model=model, args=args, applied=applied, **of_job)
        trainer.run(folder, "hf_trainer", own.model_dump())


def _apply(model: Any, own: Flags, device: torch.device) -> Applied | None:
    if own.max_graphs:
        return apply(model.to(device), [Unpadding(), FusedLayers(gelu="auto"), CUDAGraphs(max_graphs=own.max_graphs)])
    return apply_recommended(model) if own.apply_recommended else None


def _grouped_by_length(loader: DataLoader[Any], config: Config) -> DataLoader[Any]:
    """The job's loader with the sampler that transformers uses for ``group_by_length``."""
    if config.data.padding != "longest":
        raise ConfigError("peer.train_sampling_strategy: group_by_length saves nothing here; set data.padding=longest")
    rows: Any = loader.dataset
    size = config.data.batch_size
    assert size is not None  # a job is one of batch_size
    return DataLoader(
        rows,
        batch_size=size,
        sampler=LengthGroupedSampler(
            size, lengths=rows.lengths.tolist(), generator=torch.Generator().manual_seed(config.seed)
        ),
        collate_fn=loader.collate_fn,
        drop_last=loader.drop_last,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def _with_lora(model: Any, settings: dict[str, Any]) -> Any:
    """PEFT's model around a classifier, with adapters inserted into the classifier itself."""
    from peft import LoraConfig, get_peft_model

    chosen = {"targets": "all-linear", **settings}
    return get_peft_model(model, LoraConfig(task_type="SEQ_CLS", **{_LORA[name]: v for name, v in chosen.items()}))


class _Peer(JobTrainer, Trainer):
    """HF Trainer on a job."""

    def __init__(
        self, job: Job, *, model: Any, args: TrainingArguments, applied: Applied | None, **kwargs: Any
    ) -> None:
        self._applied = applied
        super().__init__(
            job,
            model=model,
            args=args,
            train_dataset=job.train.dataset,
            eval_dataset=job.eval and job.eval.dataset,
            compute_metrics=_accuracy,
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
            **kwargs,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        if not hasattr(self, "_evaluation"):  # created once, so that its workers can persist
            self._evaluation = self.accelerator.prepare(self._job.eval)
        return self._evaluation

    def _evidence(self) -> dict[str, Any]:
        seen = self._applied.evidence if self._applied else {}
        graphs = {name: seen["cuda_graphs"][name] for name in ("replays", "eager_calls") if "cuda_graphs" in seen}
        return super()._evidence() | {"apply_recommended": sorted(seen)} | graphs

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self._meter.evaluating():
            metrics = super().evaluate(*args, **kwargs)
        self._meter.evaluated({name: metrics[f"eval_{name}"] for name in ("accuracy", "loss")})
        return metrics


def _accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy over labels that are not ignored: all of a classifier's, the masked ones of a masked LM."""
    predicted, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    return {"accuracy": float((predicted == labels)[labels != -100].mean())}


if __name__ == "__main__":
    with exit_codes():
        main(sys.argv[1:])
