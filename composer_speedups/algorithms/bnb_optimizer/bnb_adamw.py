"""bitsandbytes' AdamW, with overrides and paged memory that are its own and not the process's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_PAGED = ("state1", "state2")
_LEAST_PAGED = 100_000  # values; bitsandbytes leaves smaller tensors in GPU memory


def bnb_adamw(groups: list[dict[str, Any]], full_precision: list[nn.Parameter], **settings: Any) -> Optimizer:
    """bitsandbytes' AdamW of its own ``settings``; the parameters of ``full_precision`` keep 32-bit state."""
    from bitsandbytes.functional import GlobalPageManager
    from bitsandbytes.optim import AdamW, GlobalOptimManager

    # bitsandbytes keeps overrides by id() in one manager for the whole process, where they would outlive the
    # run and hit whichever parameter gets that id next, and paged tensors in another one, which would keep
    # them alive. This optimizer gets managers of its own.
    manager = GlobalOptimManager.__new__(GlobalOptimManager)
    manager.initialize()
    manager.override_config(full_precision, "optim_bits", 32)
    pages = GlobalPageManager.__new__(GlobalPageManager)
    pages.initialize()
    optimizer: Any = AdamW(groups, **settings)
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
