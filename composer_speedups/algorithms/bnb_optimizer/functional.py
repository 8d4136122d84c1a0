"""bitsandbytes' AdamW: 8-bit or 32-bit state, paged if asked, with a stable embedding if asked."""

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
    """Put bitsandbytes' AdamW in the place of torch's.

    Args:
        model: Says which parameters are embeddings; changed only by ``stable_embedding``.
        optimizer: ``torch.optim.AdamW`` that has not stepped; must not step any more.
        bits: Bits a value of either moment: 8, or 32, which is AdamW up to rounding.
        paged: Keep state of 100,000 values and more in memory that the driver moves between GPU and host.
        stable_embedding: Normalise the rows of the word embedding, with a new LayerNorm; see
            :func:`.stable_embedding.apply_stable_embedding`. Its parameters join the group that holds the
            model's other LayerNorms, or else the embedding's.
        embeddings_32bit: Embeddings keep 32-bit state under ``bits=8``.
        min_8bit_size: Parameters of fewer values keep 32-bit state.

    Returns:
        The new optimizer, or ``optimizer`` if it is that already.

    Raises:
        ValueError: Another number of bits, an optimizer that cannot be swapped, or no embedding to make stable.

    Source: bitsandbytes; Dettmers et al., arXiv 2110.02861.
    """
    if bits not in (8, 32):
        raise ValueError(f"bits must be 8 or 32, not {bits!r}")
    if min_8bit_size < 0:
        raise ValueError(f"min_8bit_size must not be negative, and is {min_8bit_size}")
    label = f"bitsandbytes AdamW({bits=}, {embeddings_32bit=}, {min_8bit_size=}, {stable_embedding=})"
    if label_of(optimizer) == label and optimizer.is_paged != paged:  # type: ignore[attr-defined]
        raise UnfitOptimizerError(  # the label, which checkpoints keep, leaves out what their state does not show
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
        beside, groups = norms or {*embedding_weights(model)}, new.param_groups
        group = next((g for g in groups if not beside.isdisjoint(g["params"])), groups[0])  # schedulers count them
        group["params"].extend(parameters)
    return new
