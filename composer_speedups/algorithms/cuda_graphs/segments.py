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


class _Cut:
    """A cut after a block: its output, the leaf that replaces it, and the leaf's gradient so far."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden, self.leaf = hidden, hidden.detach().requires_grad_()
        self.gradient: Tensor | None = None


class Segments:
    """A call whose backward pass runs in segments: from the outputs to the last cut, then to the one before, and so on.

    Args:
        call: A function from tensors to tensors.
        blocks: Modules after which it is cut, in the order of their calls; empty for one segment.
    """

    def __init__(self, call: Callable[..., tuple[Tensor, ...]], blocks: Sequence[nn.Module]) -> None:
        self._call, self._blocks = call, list(blocks)
        self._outputs: tuple[Tensor, ...] = ()  # with their autograd graph
        self._cuts: list[_Cut] = []
        self._called: list[nn.Module] = []
        self._visited: set[Any] = set()

    def __len__(self) -> int:
        return len(self._blocks) + 1

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the call's outputs; call :meth:`differentiate` for each segment afterwards.

        Raises:
            RuntimeError: A block was not called exactly once and in order, or its output cannot be cut.
        """
        self.release()
        with self._cutting():
            self._outputs = self._call(*inputs)
        if self._called != self._blocks:
            raise RuntimeError("not every block is called exactly once and in order")
        return self._outputs

    def differentiate(
        self, segment: int, grad_outputs: Sequence[Tensor | None], inputs: Sequence[Tensor], *, check: bool = False
    ) -> list[Tensor | None]:
        """Compute the gradients of a segment.

        Args:
            segment: Number of the segment; 0 ends with the outputs. Segments must be differentiated in order.
            grad_outputs: The gradient of each output; None for outputs without one.
            inputs: Leaves of the call.
            check: Whether to check that earlier segments have no autograd node in common with this one.

        Returns:
            A gradient for each of ``inputs``, None if the segment does not use it. The caller sums them over segments.

        Raises:
            RuntimeError: The segments overlap, or nothing uses the output at which this segment ends.
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
        """Visit the autograd nodes that lead to the outputs, except for leaves, which segments may share."""
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
