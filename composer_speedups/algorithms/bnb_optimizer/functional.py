"""Replace torch's AdamW by bitsandbytes'."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composer_speedups.algorithms.bnb_optimizer.stable_embedding import apply_stable_embedding
from composer_speedups.core.optimizer_evidence import embedding_weights
from composer_speedups.surgery.optimizer_swap import UnfitOptimizerError, label_of, swap_optimizer

__all__ = ["apply_bnb_optimizer"]

_MOMENTS = ("state1", "state2")
_MIN_PAGED = 100_000  # number of values; bitsandbytes keeps smaller tensors in GPU memory


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
    new = swap_optimizer(optimizer, label, lambda groups: _bnb_adamw(groups, full_precision, **settings))
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


def _bnb_adamw(groups: list[dict[str, Any]], full_precision: list[nn.Parameter], **settings: Any) -> Optimizer:
    """Create bitsandbytes' AdamW with its ``settings``; the parameters in ``full_precision`` keep 32-bit state."""
    from bitsandbytes.functional import GlobalPageManager
    from bitsandbytes.optim import AdamW, GlobalOptimManager

    # bitsandbytes has process-wide managers. One keeps overrides by id(), which would outlive the run and apply to any
    # later parameter with the same id. The other keeps paged tensors alive. This optimizer has its own managers.
    manager = GlobalOptimManager.__new__(GlobalOptimManager)
    manager.initialize()
    manager.override_config(full_precision, "optim_bits", 32)
    pages = GlobalPageManager.__new__(GlobalPageManager)
    pages.initialize()
    optimizer: Any = AdamW(groups, **settings)
    optimizer.mng, optimizer.page_mng = manager, pages
    return optimizer


def paged_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Return the state tensors in paged memory."""
    tensors = (state.get(name) for state in optimizer.state.values() for name in _MOMENTS)
    return [t for t in tensors if getattr(t, "is_paged", False)]


def page_again(optimizer: Any) -> int:
    """Move state back to paged memory, after loading a checkpoint has put it into plain GPU memory.

    Returns:
        Number of moved tensors.
    """
    moved = 0
    for parameter, state in optimizer.state.items():
        for name in _MOMENTS:
            loaded = state.get(name)
            if loaded is None or loaded.numel() < _MIN_PAGED or getattr(loaded, "is_paged", False):
                continue
            state[name] = optimizer.get_state_buffer(parameter, dtype=loaded.dtype)
            torch.cuda.synchronize(parameter.device)  # the GPU zeroes it before the host writes to it
            state[name].copy_(loaded)
            moved += 1
    return moved
