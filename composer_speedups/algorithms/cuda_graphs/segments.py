"""A forward pass that is cut behind some of its blocks, so that its backward pass can be run in segments.

A graph's gradients are there at its end. Were the backward pass one graph, DDP could send none before all are computed;
with a graph for each segment it sends those of the last blocks while the GPU is at the first ones.

A cut gives the next block a leaf in place of the block's output. The segment behind it is differentiated with respect
to the parameters and the leaf, and what the leaf gets is where the segment before the cut continues. This is exact:

- All leaves are asked for in every segment, the parameters and each earlier cut, so that what jumps over a cut from an
  earlier one (a skip connection, say) gets there too. No other leaf is in the call, or its capture is refused.
- Whatever uses a cut was computed after it and so is differentiated before it: its gradient is whole by its turn.
- What jumps over a cut from before it and from no other cut would be gone through in two segments, with what autograd
  keeps for it freed by the first. That the segments have no node in common is looked at, before anything is captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class CutError(RuntimeError):
    """A forward pass that cannot be cut."""


class _Cut:
    """Behind a block: its output, the leaf in its place, and the leaf's gradient so far."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden, self.leaf = hidden, hidden.detach().requires_grad_()
        self.gradient: Tensor | None = None


class Segments:
    """A call, and its backward pass from its outputs to its last cut, from there to the one before, and so on.

    Args:
        call: Tensors to tensors.
        blocks: Modules behind which it is cut, in the order in which it calls them; none for one segment.
    """

    def __init__(self, call: Callable[..., tuple[Tensor, ...]], blocks: Sequence[nn.Module]) -> None:
        self._call, self._blocks = call, list(blocks)
        self._outputs: tuple[Tensor, ...] = ()  # with what autograd knows of them
        self._cuts: list[_Cut] = []
        self._called: list[nn.Module] = []
        self._visited: set[Any] = set()

    def __len__(self) -> int:
        return len(self._blocks) + 1

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The call's outputs; :meth:`differentiate` follows for each segment.

        Raises:
            CutError: A block was not called once, in its turn, or its output cannot be cut.
        """
        self.forget()
        with self._cutting():
            self._outputs = self._call(*inputs)
        if self._called != self._blocks:
            raise CutError("not every block is called once and in its turn")
        return self._outputs

    def differentiate(
        self, segment: int, weights: Sequence[Tensor | None], inputs: Sequence[Tensor], *, check: bool = False
    ) -> list[Tensor | None]:
        """The gradients that a segment gives.

        Args:
            segment: 0 is the one that ends with the outputs; they come in turn.
            weights: The gradient of each output; None for those that have none.
            inputs: Leaves of the call.
            check: Look whether an earlier segment went through a part of this one.

        Returns:
            One for each of ``inputs``, None where the segment gives it none. They are summed over the segments.

        Raises:
            CutError: The segments overlap, or nothing uses the cut that this one ends with.
        """
        if segment == 0:
            pairs = [(o, w) for o, w in zip(self._outputs, weights, strict=True) if w is not None]
            outputs, grad_outputs = [output for output, _ in pairs], [weight for _, weight in pairs]
        else:
            cut = self._cuts.pop()
            if cut.gradient is None:
                raise CutError("nothing uses a block's output")
            outputs, grad_outputs = [cut.hidden], [cut.gradient]
        if check:
            self._visit(outputs)
        leaves = [cut.leaf for cut in self._cuts]
        found = torch.autograd.grad(outputs, [*leaves, *inputs], grad_outputs, allow_unused=True)
        for cut, gradient in zip(self._cuts, found, strict=False):
            if gradient is not None:
                cut.gradient = gradient if cut.gradient is None else cut.gradient + gradient
        return list(found[len(leaves) :])

    def forget(self) -> None:
        """Let go of the last call's tensors, whose memory is the next one's to use."""
        self._outputs, self._cuts, self._called = (), [], []
        self._visited.clear()

    @contextlib.contextmanager
    def _cutting(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for block in self._blocks:
                compiled = block._compiled_call_impl
                if compiled is None:
                    stack.callback(block.register_forward_hook(self._cut).remove)
                else:  # a hook would be part of what is compiled
                    block._compiled_call_impl = self._behind(block, compiled)
                    stack.callback(setattr, block, "_compiled_call_impl", compiled)
            yield

    def _behind(self, block: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._cut(block, args, compiled(*args, **kwargs))

    def _cut(self, block: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling():
            return output  # and is missed after the call
        rest = output[1:] if type(output) is tuple else None
        hidden = output if rest is None else next(iter(output), None)
        if not isinstance(hidden, Tensor) or not hidden.requires_grad:
            raise CutError("a block's output is no tensor that gradients go through")
        self._called.append(block)
        self._cuts.append(_Cut(hidden))
        leaf = self._cuts[-1].leaf
        return leaf if rest is None else (leaf, *rest)

    def _visit(self, outputs: Sequence[Tensor]) -> None:
        """Go through what autograd would, as far as the leaves, which segments may have in common."""
        own: set[Any] = set()
        nodes: list[Any] = [output.grad_fn for output in outputs]
        while nodes:
            node = nodes.pop()
            if node is None or node in own or type(node).__name__ == "AccumulateGrad":
                continue
            if node in self._visited:
                raise CutError("what comes before a cut is used behind it")
            own.add(node)
            nodes.extend(following for following, _ in node.next_functions)
        self._visited |= own
