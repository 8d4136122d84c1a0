"""The config's optimizer and learning-rate schedule."""

from __future__ import annotations

from typing import Any

import torch
from composer.optim import (
    ComposerScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingWithWarmupScheduler,
    LinearWithWarmupScheduler,
)

from composer_speedups.train.config.schema import OptimizerConfig, SchedulerConfig


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
    if config.name == "cosine":
        return CosineAnnealingWithWarmupScheduler(config.warmup, alpha_f=config.final_fraction)
    if config.name == "linear":
        return LinearWithWarmupScheduler(config.warmup, alpha_f=config.final_fraction)
    return ConstantWithWarmupScheduler(config.warmup)
