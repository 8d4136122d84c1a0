"""Replace the ``forward`` of a block so that its activations are recomputed in the backward pass.

Hooks of the block run around the new ``forward``, so they run once per step and not again during recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from composer_speedups.core.temporary_attribute import temporary_attribute
from composer_speedups.surgery.instance_forward import Inner, call_inner, has_forward, replace_forward, restore_forward

_COUNT = "_recomputations"  # attribute of a block: the number of recomputations


def wrap(block: nn.Module) -> bool:
    """Make ``block`` recompute its activations in the backward pass; return False if it already does."""
    if is_checkpointed(block):
        return False
    replace_forward(block, _forward)
    forget_recomputations(block)
    return True


def undo(block: nn.Module) -> bool:
    """Restore the block's ``forward``; return False if :func:`wrap` has not replaced it."""
    if not is_checkpointed(block):
        return False
    restore_forward(block)
    del vars(block)[_COUNT]
    return True


def is_checkpointed(block: nn.Module) -> bool:
    """Return whether :func:`wrap` has replaced the block's ``forward``."""
    return has_forward(block, _forward)


def recomputations(block: nn.Module) -> int:
    """Return how often the block was recomputed; recomputations in compiled code are not counted."""
    return int(vars(block).get(_COUNT, 0))


def forget_recomputations(block: nn.Module) -> None:
    """Count the recomputations of a block from 0 again."""
    vars(block)[_COUNT] = 0


def _forward(block: nn.Module, inner: Inner, /, *args: Any, **kwargs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return call_inner(block, inner, *args, **kwargs)
    if kwargs.get("past_key_values") is not None:
        raise ValueError("a block that writes a key-value cache cannot be recomputed; set use_cache=False")
    return checkpoint(partial(_counted_forward, block, inner), *args, use_reentrant=False, **kwargs)


def _counted_forward(block: nn.Module, inner: Inner, /, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:  # inside a backward pass
        vars(block)[_COUNT] += 1
    return call_inner(block, inner, *args, **kwargs)


class GraphWatch:
    """Counts the checkpointed regions in the graphs that torch.compile captures.

    Compiled code recomputes activations without running Python code that could count. Instead, each graph is inspected
    when dynamo passes it to the backend. This replaces a method of dynamo, because torch 2.7 to 2.11 has no hook at
    this point, and everything after it may be skipped if the compiled code is in a cache on disk.

    Attributes:
        graphs: Number of captured graphs.
        regions: Number of calls of ``tag_activation_checkpoint`` in the graphs. AOTAutograd recomputes the subgraph
            that such a call runs.
    """

    def __init__(self) -> None:
        self.graphs = self.regions = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the graphs that are captured inside the ``with`` block."""
        # Imported here, because the import is slow and only compiled models need it.
        from torch._dynamo.output_graph import OutputGraph
        from torch._higher_order_ops.wrap import tag_activation_checkpoint

        original = OutputGraph.call_user_compiler

        def call_user_compiler(output: Any, graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            self.graphs += 1
            subgraphs = [module.graph for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
            nodes = (node for subgraph in subgraphs for node in subgraph.nodes)
            self.regions += sum(node.target is tag_activation_checkpoint for node in nodes)
            return original(output, graph, *args, **kwargs)

        with temporary_attribute(OutputGraph, "call_user_compiler", call_user_compiler):
            yield
