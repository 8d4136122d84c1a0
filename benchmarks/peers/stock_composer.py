"""python -m benchmarks.peers.stock_composer -f FILE [key=value ...] [peer.NAME=VALUE ...]: Composer's Trainer only.

The job is that of the config; ``algorithms`` and ``trainer.precision`` are ignored. The Trainer has the settings that
the blog post "How to Quickly Finetune Your Transformer" recommends to Composer users: fp16, TF32, AdamW's foreach
kernels, ``compile_config={}``. It also has transformers' present default, SDPA, which did not exist then.

- ``peer.precision``: Composer's precision; default ``amp_fp16``, ``fp32`` without a GPU.
- ``peer.compile``: true for ``compile_config={}``, false, or a mapping for it; default true, false without a GPU.
- ``peer.attention``: an ``attn_implementation``; default ``sdpa``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from composer import Trainer
from composer.algorithms import GradientClipping
from composer.core import Callback, DataSpec, State
from composer.devices import DeviceCPU, DeviceGPU
from composer.loggers import Logger

from benchmarks.peers.job import build_job, read_arguments, set_attention
from benchmarks.peers.meter import monitors, write_report
from composer_speedups.core.errors import ConfigError, did_you_mean
from composer_speedups.core.operator_recorder import compile_counts
from composer_speedups.data.loader import real_tokens
from composer_speedups.train.cli import exit_codes
from composer_speedups.train.optimization import build_optimizer, build_scheduler
from composer_speedups.train.run_folder import RunFolder

_PRECISIONS = ("fp32", "amp_fp16", "amp_bf16")


class _Losses(Callback):
    """The loss of every batch; copied, because a later step may reuse its memory."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []

    def batch_end(self, state: State, logger: Logger) -> None:
        self.losses.append(torch.as_tensor(state.total_loss_dict["loss/train/total"]).detach().clone())


def main(arguments: list[str]) -> None:
    config, flags = read_arguments(arguments)
    on_gpu = config.trainer.device != "cpu" and torch.cuda.is_available()
    own: dict[str, Any] = {"precision": "amp_fp16" if on_gpu else "fp32", "compile": on_gpu, "attention": "sdpa"}
    for name in flags:
        if name not in own:
            raise ConfigError(f"unknown key 'peer.{name}'{did_you_mean(name, [*own])}")
    own |= flags
    if own["precision"] not in _PRECISIONS:
        raise ConfigError(f"peer.precision: must be {', '.join(_PRECISIONS)}, not {own['precision']!r}")
    config.algorithms, config.trainer.precision = {}, own["precision"]
    torch.set_float32_matmul_precision("high")
    with RunFolder(config) as folder:
        job = build_job(config, on_gpu=on_gpu)
        set_attention(job.model, own["attention"])
        optimizer = build_optimizer(job.model, config.optimizer)
        for group in optimizer.param_groups:
            group["foreach"] = True
        losses = _Losses()
        clip = config.optimizer.max_grad_norm
        before = compile_counts()
        trainer = Trainer(
            model=job.model,
            train_dataloader=DataSpec(job.train, get_num_tokens_in_batch=real_tokens),
            eval_dataloader=job.eval,
            eval_interval=config.trainer.evaluates_every if job.eval else 1,
            max_duration=config.trainer.max_duration,
            optimizers=optimizer,
            schedulers=build_scheduler(config.scheduler),
            algorithms=[] if clip is None else [GradientClipping("norm", clipping_threshold=clip)],
            callbacks=[*monitors(config), *([] if config.loggers.file is None else [losses])],
            run_name=config.run_name,
            progress_bar=False,
            device=DeviceGPU() if on_gpu else DeviceCPU(),
            precision=own["precision"],
            compile_config=_compile_config(own["compile"]),
            seed=config.seed,
        )
        trainer.fit()
        evidence = {
            **own,
            "foreach": bool(optimizer.param_groups[0]["foreach"]),
            "graphs": compile_counts().since(before).graphs,
        }
        kept = losses.losses if config.loggers.file else None
        write_report(trainer.state, config, folder, "stock_composer", evidence, kept)
        trainer.close()


def _compile_config(asked: Any) -> dict[str, Any] | None:
    if asked is False:
        return None
    if asked is not True and not isinstance(asked, dict):
        raise ConfigError(f"peer.compile: must be true, false or a mapping, not {asked!r}")
    return {} if asked is True else asked


if __name__ == "__main__":
    with exit_codes():
        main(sys.argv[1:])
