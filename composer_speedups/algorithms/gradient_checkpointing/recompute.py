"""Blocks whose activations are recomputed in the backward pass: one instance's ``forward`` at a time.

The instance gets a ``forward`` of its own; its class, parameters and names stay. Hooks on the block run around
that ``forward``, so once a step, and not again when it is recomputed.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["is_checkpointed", "recomputations", "undo", "wrap"]

_BEFORE, _COUNT = "_forward_before_checkpointing", "_recomputations"


def wrap(block: nn.Module) -> bool:
    """Recompute ``block`` in every backward pass; False when it already was."""
    if is_checkpointed(block):
        return False
    attributes = vars(block)
    if "forward" in attributes:  # an instance's own forward, of somebody else
        attributes[_BEFORE] = attributes["forward"]
    attributes["forward"] = MethodType(_forward, block)  # a method: a deep copy of the block gets its own
    attributes[_COUNT] = 0
    return True


def undo(block: nn.Module) -> bool:
    """Take the wrapper off again; False when there was none."""
    if not is_checkpointed(block):
        return False
    attributes = vars(block)
    del attributes["forward"], attributes[_COUNT]
    if _BEFORE in attributes:
        attributes["forward"] = attributes.pop(_BEFORE)
    return True


def is_checkpointed(block: nn.Module) -> bool:
    return getattr(vars(block).get("forward"), "__func__", None) is _forward


def recomputations(block: nn.Module) -> int:
    """How often the block ran again inside a backward pass; compiled code does not count."""
    return int(vars(block).get(_COUNT, 0))


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not (self.training and torch.is_grad_enabled()):
        return _plain(self, *args, **kwargs)
    if kwargs.get("past_key_values") is not None:
        raise ValueError("a block that writes a key-value cache cannot be recomputed; set use_cache=False")
    return checkpoint(partial(_run, self), *args, use_reentrant=False, **kwargs)


def _run(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:  # inside a backward pass
        vars(block)[_COUNT] += 1
    return _plain(block, *args, **kwargs)


def _plain(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    before = getattr(block, _BEFORE, None)
    # The class's function and not a bound method: compiled blocks would guard on each block's own.
    return type(block).forward(block, *args, **kwargs) if before is None else before(*args, **kwargs)
