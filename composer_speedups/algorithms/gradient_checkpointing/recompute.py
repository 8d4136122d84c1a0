"""Blocks whose activations are recomputed in the backward pass: one instance's ``forward`` at a time.

The instance gets a ``forward`` of its own; its class, parameters and names stay. Hooks on the block run around
that ``forward``, so once a step, and not again when it is recomputed.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from composer_speedups.core.temporary_attribute import temporary_attribute

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


class GraphWatch:
    """Between start and stop, counts the graphs that torch.compile captures and the regions in them marked for
    recomputation: nothing in Python runs twice there.

    It looks at each graph as dynamo hands it to the backend. What comes after may be taken from a cache on disk, and
    has no hook in torch 2.7 to 2.11; nor has this step, so its method is replaced meanwhile.

    Attributes:
        graphs: Graphs captured.
        regions: Calls of ``tag_activation_checkpoint`` in them; AOTAutograd recomputes what they hold.
    """

    def __init__(self) -> None:
        self.graphs = self.regions = 0
        self._counting = ExitStack()

    def start(self) -> None:
        # Not at the top: importing the compiler takes long, and this is for models that are compiled.
        from torch._dynamo.output_graph import OutputGraph
        from torch._higher_order_ops.wrap import tag_activation_checkpoint

        self.stop()
        before = OutputGraph.call_user_compiler

        def call_user_compiler(output: Any, graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            self.graphs += 1
            parts = (part for part in graph.modules() if isinstance(part, torch.fx.GraphModule))
            self.regions += sum(node.target is tag_activation_checkpoint for part in parts for node in part.graph.nodes)
            return before(output, graph, *args, **kwargs)

        self._counting.enter_context(temporary_attribute(OutputGraph, "call_user_compiler", call_user_compiler))

    def stop(self) -> None:
        self._counting.close()
