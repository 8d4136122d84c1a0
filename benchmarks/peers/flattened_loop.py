"""python -m benchmarks.peers.flattened_loop -f FILE [key=value ...] [peer.torch_compile=BOOL]: a loop over flattened
batches, without this package's techniques.

It is what a user of transformers can write with torch 2.10 or newer: the real tokens of a batch become one row without
padding, positions start again with every text, and attention is ``torch.nn.attention.varlen.varlen_attn``, registered
as an attention implementation of transformers. On a GPU it uses bf16 autocast, TF32, fused AdamW and torch.compile with
dynamic shapes. The job is that of the config; ``algorithms`` and ``trainer.precision`` are ignored.

``varlen_attn`` has no dropout, so attention weights are not dropped, and the loop computes less than the others. On a
CPU, attention runs text by text. The model must be a BertForSequenceClassification.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertForSequenceClassification
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from benchmarks.peers.bare_loop import Loop
from benchmarks.peers.job import build_job, plan_of, read_arguments, set_attention
from benchmarks.peers.meter import Meter
from composer_speedups.core.errors import ConfigError
from composer_speedups.core.operator_recorder import compile_counts
from composer_speedups.core.trainer_state import torch_device
from composer_speedups.train.cli import exit_codes
from composer_speedups.train.optimization import build_optimizer
from composer_speedups.train.run_folder import RunFolder
from composer_speedups.train.trainer import open_device

_ATTENTION = "torch_varlen"


def main(arguments: list[str]) -> None:
    config, flags = read_arguments(arguments)
    device = open_device(config.trainer)
    on_gpu = torch_device(device).type == "cuda"
    compiled = flags.pop("torch_compile", on_gpu)
    if flags:
        raise ConfigError(f"unknown key 'peer.{next(iter(flags))}'; the flattened loop has peer.torch_compile only")
    AttentionInterface.register(_ATTENTION, varlen_attention)
    AttentionMaskInterface.register(_ATTENTION, lambda *_, **__: None)
    config.algorithms = {}
    torch.set_float32_matmul_precision("high")
    with RunFolder(config) as folder:
        job = build_job(config, on_gpu=on_gpu)
        if not isinstance(job.model.model, BertForSequenceClassification):
            kind = type(job.model.model).__name__
            raise ConfigError(f"model.name: the flattened loop trains BertForSequenceClassification only, not {kind}")
        set_attention(job.model, _ATTENTION)
        model = job.model.to(torch_device(device))
        optimizer = build_optimizer(model, config.optimizer)
        for group in optimizer.param_groups:
            group["fused"] = on_gpu
        before = compile_counts()
        meter = Meter(config, model, device, "amp_bf16" if on_gpu else "fp32")
        loop = FlattenedLoop(config, job, optimizer, torch.amp.GradScaler(enabled=False), meter)
        classify = functools.partial(_classify, job.model.model)
        loop.classify = torch.compile(classify, dynamic=True) if compiled else classify
        loop.fit(plan_of(config, len(job.train)))
        evidence = {"attention": _ATTENTION, "graphs": compile_counts().since(before).graphs}
        meter.write(folder, "flattened_loop", evidence)


class FlattenedLoop(Loop):
    """The loop of :mod:`.bare_loop`, with batches of one row."""

    classify: Any

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Any, Tensor]:
        inputs = {name: value.to(self.device, non_blocking=True) for name, value in flattened(batch).items()}
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss, logits = self.classify(inputs, batch["input_ids"].shape[1])
        return {"loss": loss, "logits": logits}, inputs["labels"]


def flattened(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Flatten a padded batch (B, S) on the CPU into one row of its T real tokens.

    Returns:
        ``input_ids``, ``token_type_ids`` (zeros if the batch has none) and ``position_ids``, (1, T); ``starts``, int32
        (B + 1,), where each text starts and the last one ends; ``labels`` (B,).
    """
    real = batch["attention_mask"].bool()
    lengths = real.sum(-1)
    types = batch.get("token_type_ids", torch.zeros_like(batch["input_ids"]))
    positions = torch.arange(real.shape[1]).expand_as(real)
    return {
        "input_ids": batch["input_ids"][real].unsqueeze(0),
        "token_type_ids": types[real].unsqueeze(0),
        "position_ids": positions[real].unsqueeze(0),
        "starts": F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
        "labels": batch["labels"],
    }


def _classify(model: Any, inputs: Mapping[str, Tensor], longest: int) -> tuple[Tensor, Tensor]:
    """Return the mean cross entropy and the logits (B, classes) of flattened texts of up to ``longest`` tokens."""
    starts = inputs["starts"]
    named = {name: inputs[name] for name in ("input_ids", "token_type_ids", "position_ids")}
    hidden = model.bert(**named, starts=starts, longest=longest).last_hidden_state
    first = hidden.squeeze(0).index_select(0, starts[:-1])
    logits = model.classifier(model.dropout(model.bert.pooler(first.unsqueeze(1))))
    return F.cross_entropy(logits, inputs["labels"]), logits


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    starts: Tensor | None = None,
    longest: int = 0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention (1, heads, T, units) → (1, T, heads, units), in which each token attends to those of its own text."""
    assert starts is not None
    if not query.is_cuda:
        texts = (x.split(starts.diff().tolist(), dim=2) for x in (query, key, value))
        results = [F.scaled_dot_product_attention(q, k, v, scale=scaling) for q, k, v in zip(*texts, strict=True)]
        return torch.cat(results, dim=2).transpose(1, 2), None
    from torch.nn.attention.varlen import varlen_attn  # torch 2.10 and newer

    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    attended: Any = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scaling)
    return attended.unsqueeze(0), None


if __name__ == "__main__":
    with exit_codes():
        main(sys.argv[1:])
