"""bitsandbytes' AdamW, with overrides and paged memory that are its own and not the process's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["bnb_adamw", "page_again", "paged_tensors"]

_PAGED = ("state1", "state2")
_LEAST_PAGED = 100_000  # values; bitsandbytes leaves smaller tensors in GPU memory


def bnb_adamw(
    groups: Iterable[dict[str, Any]],
    bits: int,
    *,
    paged: bool = False,
    full_precision: Iterable[Tensor] = (),
    min_8bit_size: int = 4096,
) -> Optimizer:
    """bitsandbytes' AdamW.

    Args:
        groups: Parameter groups with ``lr``, ``betas``, ``eps`` and ``weight_decay``.
        bits: 8 (blocks of 256 values) or 32.
        paged: State in memory that the driver moves between GPU and host.
        full_precision: Parameters that keep 32-bit state.
        min_8bit_size: Parameters of fewer values keep 32-bit state too.

    Source: bitsandbytes; Dettmers et al., arXiv 2110.02861.
    """
    from bitsandbytes.functional import GlobalPageManager
    from bitsandbytes.optim import AdamW, GlobalOptimManager

    # bitsandbytes keeps overrides by id() in one manager for the whole process, where they would outlive the
    # run and hit whichever parameter gets that id next, and paged tensors in another one, which would keep
    # them alive. This optimizer gets managers of its own.
    manager = GlobalOptimManager.__new__(GlobalOptimManager)
    manager.initialize()
    manager.override_config(list(full_precision), "optim_bits", 32)
    pages = GlobalPageManager.__new__(GlobalPageManager)
    pages.initialize()
    optimizer: Any = AdamW(list(groups), optim_bits=bits, min_8bit_size=min_8bit_size, is_paged=paged)
    optimizer.mng, optimizer.page_mng = manager, pages
    return optimizer


def paged_tensors(optimizer: Optimizer) -> list[Tensor]:
    """The state tensors that lie in paged memory."""
    tensors = (state.get(name) for state in optimizer.state.values() for name in _PAGED)
    return [t for t in tensors if getattr(t, "is_paged", False)]


def page_again(optimizer: Any) -> int:
    """Move state back to paged memory: loading a checkpoint puts it into plain GPU memory.

    Returns:
        How many tensors were moved.
    """
    moved = 0
    for parameter, state in optimizer.state.items():
        for name in _PAGED:
            loaded = state.get(name)
            if loaded is None or loaded.numel() < _LEAST_PAGED or getattr(loaded, "is_paged", False):
                continue
            state[name] = optimizer.get_state_buffer(parameter, dtype=loaded.dtype)
            torch.cuda.synchronize(parameter.device)  # it is zeroed on the GPU, then written from the host
            state[name].copy_(loaded)
            moved += 1
    return moved
