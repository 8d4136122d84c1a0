"""Models with LoRA adapters, and optimizers with two groups, for the tests of LoRA."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from composer_speedups import apply_lora
from tests.helpers.common import tiny_bert

TINY: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
QUERIES_AND_VALUES = [f"bert.encoder.layer.{i}.attention.self.{n}" for i in (0, 1) for n in ("query", "value")]


def trained_bert() -> Any:
    """A tiny BERT with adapters and classifier of some size, as after training."""
    model = tiny_bert()
    apply_lora(model, rank=4)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model


def two_groups(model: nn.Module) -> torch.optim.AdamW:
    named = dict(model.named_parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for n, p in named.items() if "classifier" in n], "lr": 5e-3},
            {"params": [p for n, p in named.items() if "query" in n and p.ndim > 1], "weight_decay": 0.0},
            {"params": [p for n, p in named.items() if "embeddings" in n]},
            {"params": [p for n, p in named.items() if "key" in n]},
        ],
        lr=1e-3,
    )
