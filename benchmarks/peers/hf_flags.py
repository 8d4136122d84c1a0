"""HF Trainer's flags: those that the job fixes, and those that make it fast."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import TrainingArguments

from benchmarks.peers.job import Plan
from composer_speedups.core.errors import ConfigError, did_you_mean, first_line
from composer_speedups.train.config.schema import Config

__all__ = ["OWN_FLAGS", "training_arguments"]

_BEST = {"optim": "adamw_torch_fused", "logging_nan_inf_filter": False}
_BEST_ON_GPU = {"bf16": True, "tf32": True, "torch_compile": True, "accelerator_config": {"non_blocking": True}}
OWN_FLAGS: dict[str, Any] = {"preset": "best", "attention": "sdpa", "regional_compile": False, "grad_norm": True}


def training_arguments(
    config: Config, plan: Plan, preset: str, flags: dict[str, Any], on_gpu: bool, folder: str
) -> TrainingArguments:
    """The job's settings, the preset's flags over them, and the user's over those.

    Raises:
        ConfigError: A name that TrainingArguments do not have, or a value that they refuse.
    """
    if preset not in ("best", "plain"):
        raise ConfigError(f"peer.preset: must be best or plain, not {preset!r}")
    known = [field.name for field in dataclasses.fields(TrainingArguments) if field.init]
    unknown = next((name for name in flags if name not in known), None)
    if unknown is not None:
        raise ConfigError(f"unknown key 'peer.{unknown}'{did_you_mean(unknown, [*known, *OWN_FLAGS])}")
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
        "max_grad_norm": optimizer.max_grad_norm or 0.0,  # 0: no clipping
        "seed": config.seed,
        "dataloader_drop_last": data.drop_last,
        "dataloader_pin_memory": data.pin_memory and on_gpu,
        "use_cpu": not on_gpu,
        "eval_strategy": "no",  # the plan says when
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
        raise ConfigError(f"peer: HF Trainer would spread over {arguments.n_gpu} GPUs; set CUDA_VISIBLE_DEVICES=0")
    return arguments
