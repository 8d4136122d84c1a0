"""Capture a forward pass as one CUDA graph, and its backward pass, if any, as one graph per segment.

This follows the steps of ``torch.cuda.make_graphed_callables``. There, each captured shape allocates gradients for all
parameters. Here, all shapes share the gradient buffers, so a further shape takes only the memory of its graph.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from composer_speedups.algorithms.cuda_graphs.segments import Segments
from composer_speedups.kernels.common import FirstDerivative


class Captured:
    """The captured forward and backward pass of a call: its graphs, and the memory that they read and write.

    Calling it with tensors of the shapes and dtypes of ``static`` copies them there and replays the graphs. The outputs
    are in the graph's memory, and valid until the next replay, or copies. A call overwrites what the backward pass of
    the last one reads, so that must have run (:attr:`last_call`). Only ``leaves`` get gradients: the placeholders that
    stand for ``shared.parameters`` in the call. The backward pass has one graph per segment (:mod:`.segments`); a call
    that cannot be cut has one. If called with ``accumulate``, a backward pass of one segment adds the gradients to
    ``parameter.grad`` itself, which skips about 200 AccumulateGrad nodes; :func:`torch.autograd.grad` then returns no
    gradients, and hooks of parameters are not called.
    """

    def __init__(
        self,
        call: Callable[..., tuple[Tensor, ...]],
        static: Sequence[Tensor],
        leaves: Sequence[nn.Parameter],
        shared: SharedGradients,
        recorder: Any,  # a CUDARecorder; tests have their own
        cut_behind: Sequence[nn.Module] = (),
        copies: bool = False,
    ) -> None:
        self._static, self._leaves, self._shared, self._copies = static, leaves, shared, copies
        # Returns the autograd node of the last call, as long as its backward pass has not begun and still can.
        self.last_call: Callable[[], Any] = bool
        # the static gradient of each output, an input of the backward pass; None for outputs without one
        self.output_gradients: list[Tensor | None] = []
        self._trained: list[frozenset[nn.Parameter]] = []  # parameters that get a gradient, by segment
        segments = Segments(call, cut_behind)
        if not cut_behind or not self._can_be_cut(segments, recorder):
            segments = Segments(call, ())
            self._warm_up(segments, recorder)

        def forward() -> tuple[Tensor, ...]:
            return tuple(output.detach() for output in segments.forward(static))

        def backward(segment: int) -> None:
            # Tied weights may already have a gradient from another segment.
            begun = frozenset[nn.Parameter]().union(*self._trained[:segment])
            shared.fill(segments.differentiate(segment, self.output_gradients, leaves), begun)

        with shared.offered(leaves if len(segments) == 1 else ()):
            self._outputs, self._replay_forward = recorder.record(forward)
        shared.release()  # the recorders of tests execute the function, which writes the buffers
        self._replays = [recorder.record(partial(backward, segment))[1] for segment in range(len(segments))]
        segments.release()

        later = [frozenset[nn.Parameter]().union(*self._trained[i + 1 :]) for i in range(len(segments))]
        complete = [trained - rest for trained, rest in zip(self._trained, later, strict=True)]
        complete[0] |= frozenset(shared.parameters).difference(*self._trained)
        # The parameters whose gradients are complete after each segment; the first also has the parameters without one.
        self.completed = [[p for p in shared.parameters if p in segment] for segment in complete]
        self._token = torch.zeros((), device=leaves[0].device) if len(segments) > 1 else None
        self._anchor = torch.zeros((), requires_grad=True)  # makes autograd call the backward pass
        self._pairs = shared.pairs(self._trained[0])
        self._memory = [gradient.detach() for _, gradient in self._pairs]  # that the graph writes
        self._gradients = [*map(shared.of, self.completed, self._trained)]  # by segment
        self._copied = [i for i, tensor in enumerate(static) if tensor.numel()]  # their numbers
        self._destinations = [static[i] for i in self._copied]
        # The source of each static gradient: None for zeros, a scalar tensor with its version, or () for others.
        self._taken: list[tuple[Any, int]] = [(None, 0)] * len(self.output_gradients)

    @property
    def segments(self) -> int:
        return len(self._replays)

    def _can_be_cut(self, segments: Segments, recorder: Any) -> bool:
        try:
            self._warm_up(segments, recorder)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # it cannot be cut, or an error of autograd; any other error recurs in the next warm-up
            segments.release()
            return False
        return True

    def _warm_up(self, segments: Segments, recorder: Any) -> None:
        def both() -> None:
            outputs = segments.forward(self._static)
            self.output_gradients = [torch.zeros_like(o) if o.requires_grad else None for o in outputs]
            self._trained = []
            for segment in range(len(segments)):
                wanted = [*self._leaves, *self._shared.parameters]
                gradients = segments.differentiate(segment, self.output_gradients, wanted, check=True)
                if any(gradient is not None for gradient in gradients[len(self._leaves) :]):
                    raise RuntimeError("the call uses a parameter that is not registered in a module")
                self._trained.append(self._shared.prepare(gradients[: len(self._leaves)]))
            segments.release()  # so that the capture can use the memory

        _warm_up(recorder, both)

    def __call__(self, tensors: Sequence[Tensor], accumulate: bool) -> tuple[Tensor, ...]:
        if accumulate and self.segments == 1:
            return _AccumulatingReplay.apply(self, self._anchor, *tensors)
        token = None
        for segment in range(self.segments - 1, 0, -1):
            token = _apply(_Link, self, segment, token, *self.completed[segment])
        return _apply(_Replay, self, token, *tensors, *self.completed[0])

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        torch._foreach_copy_(self._destinations, [inputs[i] for i in self._copied])
        self._replay_forward()
        return tuple(output.clone() if self._copies else output.detach() for output in self._outputs)

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay the first segment, and return a gradient for each argument of the forward pass."""
        self._take(gradients)
        self._shared.release()  # so that the buffers hold only this backward pass's gradients
        return [None] * len(self._static) + self.backward_segment(0)

    def _take(self, gradients: Sequence[Tensor | None]) -> None:
        self.last_call = bool
        for i, (static, gradient) in enumerate(zip(self.output_gradients, gradients, strict=True)):
            if static is None:
                continue
            before, version = self._taken[i]
            if gradient is None and before is not None:
                static.zero_()
                self._taken[i] = (None, 0)
            elif gradient is not None and (gradient is not before or gradient._version != version):
                static.copy_(gradient)
                self._taken[i] = (() if gradient.ndim else gradient, gradient._version)

    def accumulate(self, gradients: Sequence[Tensor | None]) -> None:
        """Replay the backward pass, and add its gradients to ``parameter.grad``."""
        self._take(gradients)
        first = [parameter.grad is None for parameter, _ in self._pairs]
        if not all(first):
            self._shared.release()
        if self._pairs and self._pairs[-1][1].data_ptr() != self._memory[-1].data_ptr():
            for (_, gradient), memory in zip(self._pairs, self._memory, strict=True):
                gradient.data = memory  # other code has set parameter.grad.data
        self._replays[0]()
        if not all(first):
            further: list[Any] = [pair for pair, new in zip(self._pairs, first, strict=True) if not new]
            torch._foreach_add_([parameter.grad for parameter, _ in further], [gradient for _, gradient in further])
        for (parameter, gradient), new in zip(self._pairs, first, strict=True):
            if new:
                parameter.grad = gradient

    def differentiate(self, output: int, gradient: Tensor) -> None:
        """Accumulate the gradients that follow from the gradient of one output, given by its number."""
        self.accumulate([gradient if i == output else None for i in range(len(self.output_gradients))])

    def backward_segment(self, segment: int) -> list[Tensor | None]:
        """Replay a segment, and return the gradients of its :attr:`completed` parameters, in tensors that are new."""
        self._replays[segment]()
        return [None if buffer is None else buffer.data for buffer in self._gradients[segment]]

    def token(self) -> Tensor:
        """The tensor that links segments in autograd's graph. It is on the GPU, so one thread runs all."""
        assert self._token is not None
        return self._token.detach()


class CapturedForward:
    """The captured forward pass of a call without gradients. It returns copies, which later replays do not change."""

    def __init__(self, call: Callable[..., tuple[Tensor, ...]], static: Sequence[Tensor], recorder: Any) -> None:
        self._static = static
        _warm_up(recorder, lambda: call(*static))
        self._outputs, self._replay = recorder.record(lambda: call(*static))

    def __call__(self, tensors: Sequence[Tensor], _: bool) -> tuple[Tensor, ...]:
        for static, value in zip(self._static, tensors, strict=True):
            static.copy_(value)
        self._replay()
        return tuple(output.clone() for output in self._outputs)


def _warm_up(recorder: Any, run: Callable[[], object]) -> None:
    compiled = None
    while compiled != counters["stats"]["unique_graphs"]:  # compiling synchronizes, which a capture forbids
        compiled = counters["stats"]["unique_graphs"]
        recorder.warm_up(run)


NO_SECOND_DERIVATIVE = (
    "cuda_graphs replays gradients, which have no second derivative (create_graph=True); release the graphs, or remove "
    "cuda_graphs"
)


class _Replay(FirstDerivative):
    """The forward pass, and the first segment of the backward pass."""

    refusal = NO_SECOND_DERIVATIVE

    @staticmethod
    def forward(ctx: Any, captured: Captured, token: Tensor | None, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = captured.forward(inputs)
        ctx.captured, captured.last_call = captured, weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for o, g in zip(outputs, captured.output_gradients, strict=True) if g is None))
        return outputs

    @staticmethod
    def backward(ctx: Any, *output_gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradients = ctx.captured.backward(output_gradients)
        return (None, ctx.captured.token() if ctx.needs_input_grad[1] else None, *gradients)


class _AccumulatingReplay(FirstDerivative):
    """The forward pass, and the whole backward pass with the accumulation of its gradients."""

    refusal = NO_SECOND_DERIVATIVE

    @staticmethod
    def forward(ctx: Any, captured: Captured, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.differentiate = captured.differentiate  # for early_loss, whose backward pass can do without autograd
        return _Replay.forward(ctx, captured, None, *inputs)

    @staticmethod
    def backward(ctx: Any, *output_gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.captured.accumulate(output_gradients)
        return (None,) * len(ctx.needs_input_grad)


class _Link(FirstDerivative):
    """Another segment of the backward pass. DDP's hooks of its parameters run before the next segment is replayed."""

    refusal = NO_SECOND_DERIVATIVE

    @staticmethod
    def forward(ctx: Any, captured: Captured, segment: int, token: Tensor | None, *parameters: Tensor) -> Tensor:
        ctx.captured, ctx.segment = captured, segment
        return captured.token()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradients = ctx.captured.backward_segment(ctx.segment)
        return (None, None, ctx.captured.token() if ctx.needs_input_grad[2] else None, *gradients)


def _apply(function: type[FirstDerivative], *inputs: Any) -> Any:
    """``function.apply`` without its search of all inputs for leftover torch.func wrappers; within torch.func,
    ``apply`` itself, which refuses the function."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*inputs)
    return super(torch.autograd.Function, function).apply(*inputs)  # type: ignore[misc]


class SharedGradients:
    """One gradient buffer per trained parameter, shared by all captured graphs; it has the gradient of the last replay.

    If a parameter has no gradient, autograd sets ``parameter.grad`` to the buffer itself. ``buffers`` are given ones.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], buffers: Mapping[nn.Parameter, Tensor] | None = None
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self._buffers = dict(buffers or {})

    def prepare(self, gradients: Sequence[Tensor | None]) -> frozenset[nn.Parameter]:
        """Allocate the buffers for such gradients, outside of a capture; return the parameters with a gradient."""
        trained = {p: g for p, g in zip(self.parameters, gradients, strict=True) if g is not None}
        for parameter, gradient in trained.items():
            if parameter not in self._buffers:
                # in the parameter's layout, as autograd accumulates them, and as fused optimizers need them
                self._buffers[parameter] = torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False)
        return frozenset(trained)

    @contextlib.contextmanager
    def offered(self, placeholders: Iterable[nn.Parameter]) -> Iterator[None]:
        """Let kernels write gradients directly to their buffers (:func:`~...kernels.common.gradient_buffer`); the
        placeholders stand for the parameters."""
        places = [(vars(place), self._buffers.get(p)) for place, p in zip(placeholders, self.parameters, strict=False)]
        for attributes, buffer in places:
            if buffer is not None and buffer.dtype == torch.float32 and buffer.data_ptr() % 16 == 0:
                attributes["gradient_buffer"] = buffer
        try:
            yield
        finally:
            for attributes, _ in places:
                attributes.pop("gradient_buffer", None)

    def fill(self, gradients: Sequence[Tensor | None], begun: Container[nn.Parameter] = ()) -> None:
        """Write the gradients to their buffers, if they are not there, or add them for the parameters in ``begun``."""
        trained = {p: g for p, g in zip(self.parameters, gradients, strict=True) if g is not None}
        added = [p for p in trained if p in begun]
        written = [p for p in trained if p not in begun and trained[p].data_ptr() != self._buffers[p].data_ptr()]
        for write, parameters in ((torch._foreach_copy_, written), (torch._foreach_add_, added)):
            if parameters:
                write([self._buffers[p] for p in parameters], [trained[p] for p in parameters])

    def release(self) -> None:
        """Copy the gradients that are buffers, before the buffers are overwritten."""
        for parameter, buffer in self._buffers.items():
            if parameter.grad is not None and parameter.grad.data_ptr() == buffer.data_ptr():
                parameter.grad = parameter.grad.clone()

    def pairs(self, trained: Container[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters in ``trained``, each with its buffer."""
        return [(p, self._buffers[p]) for p in self.parameters if p in trained]

    def of(self, parameters: Iterable[nn.Parameter], trained: Container[nn.Parameter]) -> list[Tensor | None]:
        """Return the buffers of ``parameters``, with None for those not in ``trained``."""
        return [self._buffers[p] if p in trained else None for p in parameters]


class CUDARecorder:
    """Captures CUDA graphs that share a memory pool, from ``torch.cuda.graph_pool_handle``; None creates one."""

    def __init__(self, pool: Any = None) -> None:
        self._pool = torch.cuda.graph_pool_handle() if pool is None else pool

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run once, so that work of a kernel's first launch is not captured."""
        torch.cuda.synchronize()
        with torch.cuda.stream(_side_stream(torch.cuda.current_device())):
            run()
        torch.cuda.synchronize()

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Return the result of ``run``, and a function that recomputes it in the same memory."""
        graph = torch.cuda.CUDAGraph()
        # The warm-up's stream: autograd nodes of the parameters may outlive the warm-up, and belong to its stream.
        stream = _side_stream(torch.cuda.current_device())
        # The default mode would forbid a DataLoader's thread to pin memory, and one of NCCL to query events.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            result = run()
        return result, graph.replay


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """Return the only side stream of a device, because cuBLAS keeps a workspace for each stream that uses it."""
    return torch.cuda.Stream(device)
