"""A forward and a backward pass captured as two CUDA graphs, whose gradients all shapes' graphs write to one place.

Like ``torch.cuda.make_graphed_callables``, whose order of steps this follows. There, each captured shape keeps
gradients of its own for all parameters; here a step ends by copying them into buffers that the shapes share, so that a
further shape costs no more memory than its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from composer_speedups.captures import capturing

__all__ = ["CUDARecorder", "Recorder", "SharedGradients", "capture_call"]


class Recorder(Protocol):
    """What captures; tests give their own."""

    def settle(self) -> None:
        """Wait for what was launched so far, which is no part of the capture's time."""

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run once, so that what is done at a kernel's first launch is not part of the graph."""

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """What ``run`` returns, and a function that computes it again, from and to the same memory."""


class CUDARecorder:
    """Records CUDA graphs that share one memory pool.

    Args:
        pool: From ``torch.cuda.graph_pool_handle``; None makes one.
    """

    def __init__(self, pool: Any = None) -> None:
        self._pool = torch.cuda.graph_pool_handle() if pool is None else pool

    def settle(self) -> None:
        torch.cuda.synchronize()

    def warm_up(self, run: Callable[[], None]) -> None:
        torch.cuda.synchronize()
        with torch.cuda.stream(_side_stream(torch.cuda.current_device())):
            run()
        torch.cuda.synchronize()

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = run()
        return result, graph.replay


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One for all: cuBLAS keeps a workspace for each stream that it is used on."""
    return torch.cuda.Stream(device)


class SharedGradients:
    """One buffer a parameter, for the gradients of whatever graph was replayed last.

    autograd takes a buffer itself as ``parameter.grad`` where there was none.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self._buffers: dict[nn.Parameter, Tensor] = {}

    def prepare(self, gradients: Sequence[Tensor | None]) -> frozenset[nn.Parameter]:
        """Make the buffers that gradients such as these need, outside of a capture; the parameters that have some."""
        found = [(p, g) for p, g in zip(self.parameters, gradients, strict=True) if g is not None]
        for parameter, gradient in found:
            if parameter not in self._buffers:
                self._buffers[parameter] = torch.empty_like(gradient)
        return frozenset(parameter for parameter, _ in found)

    def fill(self, gradients: Sequence[Tensor | None]) -> None:
        pairs = [(self._buffers[p], g) for p, g in zip(self.parameters, gradients, strict=True) if g is not None]
        if pairs:
            torch._foreach_copy_([buffer for buffer, _ in pairs], [gradient for _, gradient in pairs])

    def let_go(self) -> None:
        """Give parameters whose gradient lies in a buffer a copy of it, before the buffer is written to."""
        for parameter, buffer in self._buffers.items():
            if parameter.grad is not None and parameter.grad.data_ptr() == buffer.data_ptr():
                parameter.grad = parameter.grad.clone()

    def of(self, parameters: Container[nn.Parameter]) -> list[Tensor | None]:
        return [self._buffers[p].detach() if p in parameters else None for p in self.parameters]


def capture_call(
    call: Callable[..., tuple[Tensor, ...]],
    static: Sequence[Tensor],
    leaves: Sequence[nn.Parameter],
    shared: SharedGradients,
    recorder: Recorder,
) -> Callable[..., tuple[Tensor, ...]]:
    """Capture a call's forward and backward pass.

    Args:
        call: Tensors to tensors; it gives gradients to ``leaves``, and to nothing else.
        static: Its arguments, in memory that stays: a replay copies the caller's into it.
        leaves: What stands for each of ``shared.parameters`` in the call.
        shared: Where each backward pass leaves the gradients.
        recorder: What captures.

    Returns:
        A function of tensors such as ``static`` that replays. Its outputs lie in the graph's memory, until the next
        replay.
    """
    recorder.settle()
    with capturing():
        captured = _Captured(call, static, leaves, shared, recorder)

    class Replay(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
            outputs = captured.forward(inputs[: len(static)])
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*(o for o, w in zip(outputs, captured.weights, strict=True) if w is None))
            return outputs

        @staticmethod
        def backward(ctx: Any, *weights: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
            return (*(None for _ in static), *captured.backward(weights))

    return lambda *tensors: Replay.apply(*tensors, *shared.parameters)


class _Captured:
    """The two graphs, and the memory that they read from and write to.

    Attributes:
        weights: The gradient of each output, for the backward pass to read; None for outputs that have none.
    """

    def __init__(
        self,
        call: Callable[..., tuple[Tensor, ...]],
        static: Sequence[Tensor],
        leaves: Sequence[nn.Parameter],
        shared: SharedGradients,
        recorder: Recorder,
    ) -> None:
        self._static, self._shared = static, shared
        self._taught: frozenset[nn.Parameter] = frozenset()
        self._attached: tuple[Tensor, ...] = ()  # the outputs with what autograd knows of them
        self.weights: list[Tensor | None] = []

        def forward() -> tuple[Tensor, ...]:
            self._attached = call(*static)
            return tuple(output.detach() for output in self._attached)

        def backward() -> None:
            shared.fill(self._differentiate(leaves))

        def both() -> None:
            forward()
            self.weights = [torch.zeros_like(o) if o.requires_grad else None for o in self._attached]
            gradients = self._differentiate([*leaves, *shared.parameters])
            if any(gradient is not None for gradient in gradients[len(leaves) :]):
                raise RuntimeError("a parameter is used that its module does not hold")
            self._taught = shared.prepare(gradients[: len(leaves)])
            self._attached = ()  # its memory is the capture's to use

        compiled = None
        while compiled != counters["stats"]["unique_graphs"]:  # what is compiled waits for the GPU, or copies to it
            compiled = counters["stats"]["unique_graphs"]
            recorder.warm_up(both)
        self._outputs, self._replay_forward = recorder.record(forward)
        _, self._replay_backward = recorder.record(backward)
        self._attached = ()

    def _differentiate(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        pairs = [(o, w) for o, w in zip(self._attached, self.weights, strict=True) if w is not None]
        outputs, weights = [output for output, _ in pairs], [weight for _, weight in pairs]
        return list(torch.autograd.grad(outputs, inputs, weights, allow_unused=True))

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for place, given in zip(self._static, inputs, strict=True):
            place.copy_(given)
        self._replay_forward()
        return tuple(output.detach() for output in self._outputs)

    def backward(self, weights: Sequence[Tensor | None]) -> list[Tensor | None]:
        for place, given in zip(self.weights, weights, strict=True):
            if place is not None and given is None:
                place.zero_()
            elif place is not None and given is not None:
                place.copy_(given)
        self._shared.let_go()
        self._replay_backward()
        return self._shared.of(self._taught)
