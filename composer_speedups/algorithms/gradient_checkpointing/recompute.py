"""Wrap the ``forward`` of single blocks so that their activations are recomputed in the backward pass.

The new ``forward`` is an attribute of the instance; its class, parameters and names do not change. Hooks of the block
run around that ``forward``, hence once per step and not during recomputation.
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
    """Make ``block`` recompute its activations in every backward pass; return False if it already does."""
    if is_checkpointed(block):
        return False
    attributes = vars(block)
    if "forward" in attributes:  # the instance already overrides it
        attributes[_BEFORE] = attributes["forward"]
    attributes["forward"] = MethodType(_forward, block)  # a method, so that a deep copy is bound to the copied block
    attributes[_COUNT] = 0
    return True


def undo(block: nn.Module) -> bool:
    """Remove the wrapper; return False if there is none."""
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
    """Return how often the block ran inside a backward pass; runs of compiled code are not counted."""
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
    # The class's function, not a bound method, because compiled code would be specific to each block's method.
    return type(block).forward(block, *args, **kwargs) if before is None else before(*args, **kwargs)


class GraphWatch:
    """Counts the graphs that torch.compile captures between start and stop, and their regions to be recomputed.

    In compiled code, recomputation does not run any Python code that could count it. The graphs are inspected when
    dynamo passes them to the backend, by replacing a method: torch 2.7 to 2.11 has no hook there, and later steps may
    be skipped because of a cache on disk.

    Attributes:
        graphs: Number of captured graphs.
        regions: Number of calls of ``tag_activation_checkpoint`` in them; AOTAutograd recomputes the called subgraphs.
    """

    def __init__(self) -> None:
        self.graphs = self.regions = 0
        self._counting = ExitStack()

    def start(self) -> None:
        # Not at the top, because importing the compiler is slow and only needed for compiled models.
        from torch._dynamo.output_graph import OutputGraph
        from torch._higher_order_ops.wrap import tag_activation_checkpoint

        self.stop()
        before = OutputGraph.call_user_compiler

        def call_user_compiler(output: Any, graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            self.graphs += 1
            subgraphs = (each for each in graph.modules() if isinstance(each, torch.fx.GraphModule))
            nodes = (node for each in subgraphs for node in each.graph.nodes)
            self.regions += sum(node.target is tag_activation_checkpoint for node in nodes)
            return before(output, graph, *args, **kwargs)

        self._counting.enter_context(temporary_attribute(OutputGraph, "call_user_compiler", call_user_compiler))

    def stop(self) -> None:
        self._counting.close()
