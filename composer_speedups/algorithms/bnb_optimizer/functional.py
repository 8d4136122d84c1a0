"""Replace torch's AdamW by bitsandbytes'."""

from __future__ import annotations

from typing import Literal

from torch import nn
from torch.optim import Optimizer

from composer_speedups.algorithms.bnb_optimizer.bnb_adamw import bnb_adamw
from composer_speedups.algorithms.bnb_optimizer.stable_embedding import (
    apply_stable_embedding,
)
from composer_speedups.core.optimizer_evidence import embedding_weights
from composer_speedups.surgery.optimizer_swap import UnfitOptimizerError, label_of, swap_optimizer

__all__ = ["apply_bnb_optimizer"]


def apply_bnb_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    bits: Literal[8, 32] = 8,
    paged: bool = False,
    stable_embedding: bool = False,
    embeddings_32bit: bool = True,
    min_8bit_size: int = 4096,
) -> Optimizer:
    """Replace torch's AdamW by bitsandbytes' AdamW.

    Args:
        model: The model, to find out which parameters are embeddings; changed only by ``stable_embedding``.
        optimizer: A ``torch.optim.AdamW`` that has not stepped; it must not be used afterwards.
        bits: Bits per value of each moment: 8, or 32, which is AdamW up to rounding.
        paged: Keep state tensors with 100,000 or more values in memory that the driver moves between GPU and host.
        stable_embedding: Normalise the rows of the word embedding with a new LayerNorm; see
            :func:`.stable_embedding.apply_stable_embedding`. Its parameters join the parameter group of the model's
            other LayerNorms, or without any, of the embedding.
        embeddings_32bit: Keep 32-bit state for embeddings with ``bits=8``.
        min_8bit_size: Parameters with fewer values keep 32-bit state.

    Returns:
        The new optimizer, or ``optimizer`` if it already is such an AdamW.

    Raises:
        ValueError: Another number of bits, an optimizer that cannot be replaced, or no suitable embedding.

    Source: bitsandbytes; Dettmers et al., arXiv 2110.02861.
    """
    if bits not in (8, 32):
        raise ValueError(f"bits must be 8 or 32, not {bits!r}")
    if min_8bit_size < 0:
        raise ValueError(f"min_8bit_size must be at least 0, not {min_8bit_size}")
    label = f"bitsandbytes AdamW({bits=}, {embeddings_32bit=}, {min_8bit_size=}, {stable_embedding=})"
    if label_of(optimizer) == label and optimizer.is_paged != paged:  # type: ignore[attr-defined]
        # The label does not include ``paged``: checkpoints save the label, and their state does not depend on it.
        raise UnfitOptimizerError(
            f"the optimizer is bitsandbytes AdamW with paged={not paged} already, and paged={paged} was requested",
            "swap a fresh torch.optim.AdamW",
        )
    norms = {p for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()}
    full_precision = embedding_weights(model) if embeddings_32bit else []
    settings = {"optim_bits": bits, "min_8bit_size": min_8bit_size, "is_paged": paged}
    new = swap_optimizer(optimizer, label, lambda groups: bnb_adamw(groups, full_precision, **settings))
    if stable_embedding:
        try:
            parameters = apply_stable_embedding(model)
        except ValueError as error:
            raise UnfitOptimizerError(str(error), "set stable_embedding=False") from error
        similar, groups = norms or {*embedding_weights(model)}, new.param_groups
        # Not a new group, because schedulers have a fixed number of groups.
        group = next((g for g in groups if not similar.isdisjoint(g["params"])), groups[0])
        group["params"].extend(parameters)
    return new
