"""Functions for gradient checkpointing, which recomputes a block's activations in the backward pass."""

from __future__ import annotations

from torch import nn

from composer_speedups.algorithms.gradient_checkpointing.recompute import is_checkpointed, undo, wrap
from composer_speedups.families.blocks import repeated_blocks

__all__ = ["apply_gradient_checkpointing", "undo_gradient_checkpointing"]


def apply_gradient_checkpointing(model: nn.Module, every: int = 1) -> list[str]:
    """Keep only the inputs of a model's repeated blocks, and recompute the activations in the backward pass.

    Args:
        model: A module with a ModuleList of blocks of one class, such as BERT's encoder layers. The blocks' ``forward``
            is replaced in place, with an effect in training mode only. Dropout uses the same masks when recomputed.
        every: Recompute one of every n blocks. Default 1, all of them.

    Returns:
        Names of the changed blocks; empty if the same blocks already are recomputed.

    Raises:
        ValueError: ``every`` is below 1, there is no repeated block, transformers' own checkpointing is enabled, or
            other blocks already are recomputed, with another ``every``.

    Source: arXiv 1604.06174; torch.utils.checkpoint without re-entrant autograd.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1, not {every}")
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ValueError(
            "transformers' gradient checkpointing is enabled, so blocks would be recomputed twice; "
            "call gradient_checkpointing_disable() on the model"
        )
    blocks = repeated_blocks(model)
    chosen, before = list(blocks)[::every], [name for name, block in blocks.items() if is_checkpointed(block)]
    if before and before != chosen:
        raise ValueError(
            f"{len(before)} of the model's {len(blocks)} blocks already are recomputed, and every={every} would "
            f"recompute {len(chosen)}; call undo_gradient_checkpointing(model) first"
        )
    return [name for name in chosen if wrap(blocks[name])]


def undo_gradient_checkpointing(model: nn.Module) -> list[str]:
    """Restore the blocks' ``forward``, and return the names of the changed blocks."""
    return [name for name, module in model.named_modules() if undo(module)]
