"""Attention masks of every kind, with batches and logits for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.helpers.common import VOCABULARY, Batch

KINDS = (
    "right padding",
    "left padding",
    "holes",
    "rows of nothing",
    "rows of one token",
    "short of a multiple of 8",
    "width 1",
    "one row",
    "no padding",
)


def draw_mask(kind: str, seed: int, *, widest: int = 17) -> Tensor:
    """A mask of one of :data:`KINDS`, (B, S) of 0 and 1 with at least one token."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    rows = 1 if kind == "one row" else number(2, 5)
    width = 1 if kind == "width 1" else number(2, widest)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    if kind == "rows of nothing":
        lengths[torch.randperm(rows, generator=generator)[: number(1, rows - 1)]] = 0
    elif kind == "rows of one token":
        lengths[torch.randperm(rows, generator=generator)[: number(1, rows)]] = 1
    elif kind == "width 1":
        lengths[1:] = torch.randint(0, 2, (rows - 1, 1), generator=generator)
    elif kind == "no padding":
        lengths[:] = width
    right = torch.arange(width) < lengths
    if kind == "short of a multiple of 8":
        total = 8 * number(1, rows * width // 8 or 1) - number(1, 2)
        right = (torch.arange(rows * width) < total).view(rows, width)
    if kind == "left padding":
        return right.flip(-1).long()
    if kind == "holes":
        holes = torch.rand(rows, width, generator=generator) < 0.6
        holes[:, 0] |= ~holes.any(-1) | bool(number(0, 1))  # a classifier's head reads that slot
        return holes.long()
    return right.long()


def random_masks(count: int, *, widest: int = 17) -> list[Tensor]:
    """Masks of all :data:`KINDS` in turn."""
    return [draw_mask(KINDS[seed % len(KINDS)], seed, widest=widest) for seed in range(count)]


def masked_batch(mask: Tensor, head: str, *, seed: int = 0) -> Batch:
    """Return random tokens for a mask, with labels that the loss ignores at padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCABULARY, mask.shape, generator=generator)
    if head in ("mlm", "tokens"):
        labels = (ids if head == "mlm" else ids % 2).masked_fill(mask == 0, -100)
    else:
        labels = torch.randint(0, 2, (len(mask),), generator=generator).masked_fill(mask.sum(-1) == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def real_logits(output: Any, mask: Tensor) -> Tensor:
    """Return the logits of real tokens, or of rows with at least one."""
    logits = output.logits
    assert logits.isfinite().all()
    return logits[mask.bool() if logits.ndim == 3 else mask.bool().any(-1)]
