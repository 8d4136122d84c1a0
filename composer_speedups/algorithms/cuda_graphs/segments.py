"""Cut a forward pass after some of its blocks, so that its backward pass can run in segments.

The gradients of a CUDA graph are available only at its end. With one graph for the backward pass, DDP could not send
any gradient before all are computed. With a graph per segment, it sends the gradients of the last blocks while the GPU
computes those of the first.

At a cut, the next block gets a leaf tensor in place of the block's output. The segment after the cut is differentiated
with respect to the parameters and the leaf. The leaf's gradient is the output gradient of the segment before the cut.
This is exact:

- Every segment is differentiated with respect to all leaves (the parameters and all earlier cuts), so gradients also
  flow through connections from an earlier cut that skip this one. A call with any other leaf is not captured.
- All users of a cut are computed after it and hence differentiated before it, so its gradient is complete when needed.
- A connection that skips a cut and starts between two cuts would be differentiated in two segments, the first of which
  frees its saved tensors. Before capturing, a check ensures that segments do not have a common autograd node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from composer_speedups.families.blocks import repeated_blocks

_MIN_SEGMENT = 50 * 2**20  # minimum bytes of gradients per segment


class _Cut:
    """A cut after a block: its output, the leaf that replaces it, and the leaf's gradient so far."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden, self.leaf = hidden, hidden.detach().requires_grad_()
        self.gradient: Tensor | None = None


class Segments:
    """A call whose backward pass is cut behind ``blocks``, which are called in this order."""

    def __init__(self, call: Callable[..., tuple[Tensor, ...]], blocks: Sequence[nn.Module]) -> None:
        self._call, self._blocks = call, list(blocks)
        self._outputs: tuple[Tensor, ...] = ()  # with their autograd graph
        self._cuts: list[_Cut] = []
        self._called: list[nn.Module] = []
        self._visited: set[Any] = set()

    def __len__(self) -> int:
        return len(self._blocks) + 1

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the call's outputs; RuntimeError if a block is not called once and in order, or cannot be cut."""
        self.release()
        with self._cutting():
            self._outputs = self._call(*inputs)
        if self._called != self._blocks:
            raise RuntimeError("not every block is called exactly once and in order")
        return self._outputs

    def differentiate(
        self, segment: int, grad_outputs: Sequence[Tensor | None], inputs: Sequence[Tensor], *, check: bool = False
    ) -> list[Tensor | None]:
        """Compute a segment's gradient for each of ``inputs``, leaves of the call; None if it does not use it.

        Segments are differentiated in order, and 0 ends with the outputs. ``check`` raises RuntimeError if earlier
        segments have an autograd node in common with this one.
        """
        if segment == 0:
            pairs = [(o, g) for o, g in zip(self._outputs, grad_outputs, strict=True) if g is not None]
            outputs, grad_outputs = [output for output, _ in pairs], [gradient for _, gradient in pairs]
        else:
            cut = self._cuts.pop()
            if cut.gradient is None:
                raise RuntimeError("nothing uses a block's output")
            outputs, grad_outputs = [cut.hidden], [cut.gradient]
        if check:
            self._visit(outputs)
        leaves = [cut.leaf for cut in self._cuts]
        gradients = torch.autograd.grad(outputs, [*leaves, *inputs], grad_outputs, allow_unused=True)
        for cut, gradient in zip(self._cuts, gradients, strict=False):
            if gradient is not None:
                cut.gradient = gradient if cut.gradient is None else cut.gradient + gradient
        return list(gradients[len(leaves) :])

    def release(self) -> None:
        """Release the last call's tensors, so that the next call can use their memory."""
        self._outputs, self._cuts, self._called = (), [], []
        self._visited.clear()

    @contextlib.contextmanager
    def _cutting(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for block in self._blocks:
                compiled = block._compiled_call_impl
                if compiled is None:
                    stack.callback(block.register_forward_hook(self._cut).remove)
                else:  # a hook would become part of the compiled code
                    block._compiled_call_impl = self._behind(block, compiled)
                    stack.callback(setattr, block, "_compiled_call_impl", compiled)
            yield

    def _behind(self, block: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._cut(block, args, compiled(*args, **kwargs))

    def _cut(self, block: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling():
            return output  # forward() then raises, because the block was not recorded
        rest = output[1:] if type(output) is tuple else None
        hidden = output if rest is None else next(iter(output), None)
        if not isinstance(hidden, Tensor) or not hidden.requires_grad:
            raise RuntimeError("a block's output is not a tensor that requires gradients")
        self._called.append(block)
        self._cuts.append(_Cut(hidden))
        leaf = self._cuts[-1].leaf
        return leaf if rest is None else (leaf, *rest)

    def _visit(self, outputs: Sequence[Tensor]) -> None:
        """Visit the autograd nodes that the outputs depend on, except for leaves, which segments may share."""
        own: set[Any] = set()
        nodes: list[Any] = [output.grad_fn for output in outputs]
        while nodes:
            node = nodes.pop()
            if node is None or node in own or type(node).__name__ == "AccumulateGrad":
                continue
            if node in self._visited:
                raise RuntimeError("a tensor from before a cut is used after it")
            own.add(node)
            nodes.extend(following for following, _ in node.next_functions)
        self._visited |= own


def cut_points(sizes: Sequence[int], least: int = _MIN_SEGMENT) -> list[int]:
    """The indices of the blocks to cut behind, so that every segment has few blocks and at least ``least`` bytes of
    gradients, of which each block has ``sizes``. The first segment gets the remaining blocks."""
    points: list[int] = []
    size, left = 0, sum(sizes)
    for i in range(len(sizes) - 1, 0, -1):
        size, left = size + sizes[i], left - sizes[i]
        if size >= least and left >= least:
            points.append(i - 1)
            size = 0
    return points[::-1]


def blocks_to_cut(model: nn.Module, least: int = _MIN_SEGMENT) -> list[nn.Module]:
    """The blocks after which a backward pass is cut by its gradients' size (:func:`cut_points`); none in a model
    without repeated blocks, or with a compiled module around them."""
    try:
        blocks = repeated_blocks(model)
    except ValueError:
        return []
    around = {name: module for name, module in model.named_modules() if module._compiled_call_impl is not None}
    if any(name.startswith(f"{outer}." if outer else "") for name in blocks for outer in around):
        return []
    points = cut_points([sum(p.nbytes for p in b.parameters() if p.requires_grad) for b in blocks.values()], least)
    return [list(blocks.values())[i] for i in points]
