"""Gradient checkpointing: a block's activations are recomputed in the backward pass, not kept."""

from __future__ import annotations

from torch import nn

from composer_speedups.algorithms.gradient_checkpointing.recompute import is_checkpointed, undo, wrap
from composer_speedups.families.blocks import repeated_blocks

__all__ = ["apply_gradient_checkpointing", "undo_gradient_checkpointing"]


def apply_gradient_checkpointing(model: nn.Module, every: int = 1) -> list[str]:
    """Keep only the inputs of a model's repeated blocks, and recompute the rest in the backward pass.

    Args:
        model: A module with a ModuleList of one class of blocks, such as BERT's encoder layers; the blocks'
            ``forward`` changes in place, in training mode only. Dropout draws the same masks again.
        every: Every how many blocks one is recomputed. Default 1, all of them.

    Returns:
        Names of the blocks changed; none when the same ones were already.

    Raises:
        ValueError: ``every`` below 1, no repeated block, transformers' own checkpointing is on, or other blocks are
            recomputed already, by another ``every``.

    Source: arXiv 1604.06174; torch.utils.checkpoint without re-entrant autograd.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1, not {every}")
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ValueError(
            "transformers' own gradient checkpointing is on, and blocks would be recomputed twice; "
            "call gradient_checkpointing_disable() on the model"
        )
    blocks = repeated_blocks(model)
    chosen, before = list(blocks)[::every], [name for name, block in blocks.items() if is_checkpointed(block)]
    if before and before != chosen:
        raise ValueError(
            f"{len(before)} of the model's {len(blocks)} blocks are recomputed already, and every={every} asks for "
            f"{len(chosen)}; call undo_gradient_checkpointing(model) first"
        )
    return [name for name in chosen if wrap(blocks[name])]


def undo_gradient_checkpointing(model: nn.Module) -> list[str]:
    """Give the blocks back the ``forward`` they had; returns the names of those changed."""
    return [name for name, module in model.named_modules() if undo(module)]
