"""bitsandbytes' AdamW with its own managers of overrides and paged memory, instead of the process-wide ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_PAGED = ("state1", "state2")
_LEAST_PAGED = 100_000  # number of values; bitsandbytes keeps smaller tensors in GPU memory


def bnb_adamw(groups: list[dict[str, Any]], full_precision: list[nn.Parameter], **settings: Any) -> Optimizer:
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
    tensors = (state.get(name) for state in optimizer.state.values() for name in _PAGED)
    return [t for t in tensors if getattr(t, "is_paged", False)]


def page_again(optimizer: Any) -> int:
    """Move state back to paged memory, after loading a checkpoint has put it into plain GPU memory.

    Returns:
        Number of moved tensors.
    """
    moved = 0
    for parameter, state in optimizer.state.items():
        for name in _PAGED:
            loaded = state.get(name)
            if loaded is None or loaded.numel() < _LEAST_PAGED or getattr(loaded, "is_paged", False):
                continue
            state[name] = optimizer.get_state_buffer(parameter, dtype=loaded.dtype)
            torch.cuda.synchronize(parameter.device)  # the GPU zeroes it before the host writes to it
            state[name].copy_(loaded)
            moved += 1
    return moved
