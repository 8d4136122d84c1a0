"""A forward pass captured as a CUDA graph, and a backward pass as one or, in segments, as several.

Like ``torch.cuda.make_graphed_callables``, whose order of steps this follows. There, each captured shape keeps
gradients of its own for all parameters; here they end up in buffers that the shapes share, so that a further shape
costs no more memory than its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from composer_speedups.algorithms.cuda_graphs.parameters import SharedGradients
from composer_speedups.algorithms.cuda_graphs.recorders import Recorder
from composer_speedups.algorithms.cuda_graphs.segments import Segments


class Captured:
    """A call's forward and backward pass: the graphs, and the memory that they read from and write to.

    It is called with tensors such as ``static``, and replays. Its outputs lie in the graph's memory, until the next
    replay.

    Args:
        call: Tensors to tensors; it gives gradients to ``leaves``, and to nothing else.
        static: Its arguments, in memory that stays: a replay copies the caller's into it.
        leaves: What stands for each of ``shared.parameters`` in the call.
        shared: Where each backward pass leaves the gradients.
        recorder: What captures.
        cut_behind: Blocks that part the backward pass into segments, a graph each. A call that cannot be cut there
            has one segment.

    Attributes:
        weights: The gradient of each output, for the backward pass to read; None for outputs that have none.
        inputs: The parameters that each segment of the backward pass gives their gradient, beginning with the one
            that is replayed first, which also has those that never get one.
    """

    def __init__(
        self,
        call: Callable[..., tuple[Tensor, ...]],
        static: Sequence[Tensor],
        leaves: Sequence[nn.Parameter],
        shared: SharedGradients,
        recorder: Recorder,
        cut_behind: Sequence[nn.Module] = (),
    ) -> None:
        self._static, self._leaves, self._shared = static, leaves, shared
        self.weights: list[Tensor | None] = []
        self._taught: list[frozenset[nn.Parameter]] = []  # by each segment
        segments = Segments(call, cut_behind)
        if cut_behind and not self._can_be_cut(segments, recorder):
            segments = Segments(call, ())
        if len(segments) == 1:
            self._warm_up(segments, recorder)

        def forward() -> tuple[Tensor, ...]:
            return tuple(output.detach() for output in segments.forward(static))

        def backward(segment: int) -> None:
            begun = frozenset[nn.Parameter]().union(*self._taught[:segment])  # a tied weight, which another had too
            shared.fill(segments.differentiate(segment, self.weights, leaves), begun)

        self._outputs, self._replay_forward = recorder.record(forward)
        shared.release()  # a recorder may run what it records
        self._replays = [recorder.record(partial(backward, segment))[1] for segment in range(len(segments))]
        segments.forget()

        later = [frozenset[nn.Parameter]().union(*self._taught[i + 1 :]) for i in range(len(segments))]
        whole = [taught - rest for taught, rest in zip(self._taught, later, strict=True)]
        whole[0] |= frozenset(shared.parameters).difference(*self._taught)
        self.inputs = [[p for p in shared.parameters if p in each] for each in whole]
        self._token = torch.zeros((), device=leaves[0].device) if len(segments) > 1 else None

    @property
    def segments(self) -> int:
        """Graphs of the backward pass."""
        return len(self._replays)

    def _can_be_cut(self, segments: Segments, recorder: Recorder) -> bool:
        try:
            self._warm_up(segments, recorder)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # CutError, or autograd's own; another cause shows again without cuts
            segments.forget()
            return False
        return True

    def _warm_up(self, segments: Segments, recorder: Recorder) -> None:
        def both() -> None:
            outputs = segments.forward(self._static)
            self.weights = [torch.zeros_like(o) if o.requires_grad else None for o in outputs]
            self._taught = []
            for segment in range(len(segments)):
                wanted = [*self._leaves, *self._shared.parameters]
                gradients = segments.differentiate(segment, self.weights, wanted, check=True)
                if any(gradient is not None for gradient in gradients[len(self._leaves) :]):
                    raise RuntimeError("a parameter is used that its module does not hold")
                self._taught.append(self._shared.prepare(gradients[: len(self._leaves)]))
            segments.forget()  # its memory is the capture's to use

        compiled = None
        while compiled != counters["stats"]["unique_graphs"]:  # what is compiled waits for the GPU, or copies to it
            compiled = counters["stats"]["unique_graphs"]
            recorder.warm_up(both)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        token = None
        for segment in range(self.segments - 1, 0, -1):
            token = _Link.apply(self, segment, token, *self.inputs[segment])
        return _Replay.apply(self, token, *tensors, *self.inputs[0])

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for static, value in zip(self._static, inputs[: len(self._static)], strict=True):
            static.copy_(value)
        self._replay_forward()
        return tuple(output.detach() for output in self._outputs)

    def backward(self, weights: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The first segment's gradients, one for each argument of the forward pass."""
        for static, weight in zip(self.weights, weights, strict=True):
            if static is not None and weight is None:
                static.zero_()
            elif static is not None and weight is not None:
                static.copy_(weight)
        self._shared.release()  # once: what a parameter gets from here on is of this backward pass
        return [*(None for _ in self._static), *self.backward_segment(0)]

    def backward_segment(self, segment: int) -> list[Tensor | None]:
        """The gradients of its :attr:`inputs`."""
        self._replays[segment]()
        return self._shared.of(self.inputs[segment], self._taught[segment])

    def token(self) -> Tensor:
        """What one segment hands the next, and the gradient of it: where the GPU is, so that one thread runs all."""
        assert self._token is not None
        return self._token.detach()


class _Replay(torch.autograd.Function):
    """The forward pass, and the segment of the backward pass that begins it."""

    @staticmethod
    def forward(ctx: Any, captured: Captured, token: Tensor | None, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = captured.forward(inputs)
        ctx.captured = captured
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for o, w in zip(outputs, captured.weights, strict=True) if w is None))
        return outputs

    @staticmethod
    def backward(ctx: Any, *weights: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradients = ctx.captured.backward(weights)
        return (None, ctx.captured.token() if ctx.needs_input_grad[1] else None, *gradients)


class _Link(torch.autograd.Function):
    """A further segment of the backward pass.

    autograd hands a node's gradients to the parameters before it runs the next node, so that DDP's hooks see them
    before the next segment is replayed.
    """

    @staticmethod
    def forward(ctx: Any, captured: Captured, segment: int, token: Tensor | None, *parameters: Tensor) -> Tensor:
        ctx.captured, ctx.segment = captured, segment
        return captured.token()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradients = ctx.captured.backward_segment(ctx.segment)
        return (None, None, ctx.captured.token() if ctx.needs_input_grad[2] else None, *gradients)
