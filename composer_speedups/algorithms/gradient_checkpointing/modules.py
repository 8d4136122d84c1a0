"""A block's ``forward`` that keeps only its inputs, and recomputes the activations in the backward pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from composer_speedups.core.reversible import Inner, call_inner
from composer_speedups.kernels.observing import ran


def recomputed(block: nn.Module, inner: Inner, /, *args: Any, **kwargs: Any) -> Any:
    """Hooks of the block run around it, so once per step, and not again when it is recomputed."""
    if not (block.training and torch.is_grad_enabled()):
        return call_inner(block, inner, *args, **kwargs)
    if kwargs.get("past_key_values") is not None:
        raise ValueError("a block that writes a key-value cache cannot be recomputed; set use_cache=False")
    return checkpoint(partial(_observed, block, inner), *args, use_reentrant=False, **kwargs)


def _observed(block: nn.Module, inner: Inner, /, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:  # inside a backward pass
        ran("recomputed_block")
    return call_inner(block, inner, *args, **kwargs)
