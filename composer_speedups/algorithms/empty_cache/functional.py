"""Release the allocator's cached blocks."""

from __future__ import annotations

import torch

__all__ = ["apply_empty_cache"]


def apply_empty_cache() -> int:
    """Release the allocator's unused blocks to the GPU.

    Returns:
        Number of released bytes; 0 if torch has not used a GPU.

    Source: torch.cuda.empty_cache.
    """
    if not torch.cuda.is_initialized():
        return 0
    before = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    return before - torch.cuda.memory_reserved()
