"""A callable whose training calls are captured into CUDA graphs, one a combination of input shapes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from composer_speedups.algorithms.cuda_graphs.capture import Captured
from composer_speedups.algorithms.cuda_graphs.parameters import ParameterPlaceholders, SharedGradients
from composer_speedups.algorithms.cuda_graphs.recorders import CUDARecorder, Recorder
from composer_speedups.core.errors import first_line
from composer_speedups.core.operator_recorder import capturing


class CaptureError(RuntimeError):
    """A forward or backward pass that cannot be captured."""


class GraphedCalls:
    """Stands for a model's forward: captures its forward and backward pass at the first call of each shape.

    Calls in eval mode or without gradients, and those of further shapes once ``max_graphs`` are captured, go to
    the original function.

    Args:
        model: The module whose parameters get gradients.
        original: What a call of the model ran before.
        max_graphs: Shapes captured; each holds the memory of its activations for good.
        recorder: What makes a recorder for each capture, from the pool; by default :class:`CUDARecorder`.

    Attributes:
        carries: Modules and their attributes that a call reads beside its arguments: tensors and plain values, in
            tuples. They count as arguments; while one is None or empty, calls go to the original.
        cut_behind: Blocks of the model that part its backward pass into segments, a graph each; none at first. See
            :mod:`.segments`.
        pool: Memory pool that the graphs share, from ``torch.cuda.graph_pool_handle``; None gives each its own.
            Sharing needs every call's backward pass to come before the next call.
        replays: Calls that replayed a graph.
        eager_calls: Training calls that did not.
        eager_first: Training calls still to be left to the original, for those who want to watch it; 0 at first.
        held: Whether all training calls are left to it, until :meth:`begin`; False at first.
        on_failure: Gets the :class:`CaptureError` of a call that cannot be captured, and by default raises it. When
            it returns, the original function takes over for good.
    """

    def __init__(
        self,
        model: nn.Module,
        original: Callable[..., Any],
        max_graphs: int,
        recorder: Callable[[Any], Recorder] = CUDARecorder,
    ) -> None:
        self.model, self.original, self.max_graphs, self.recorder = model, original, max_graphs, recorder
        self.carries: list[tuple[nn.Module, str]] = []
        self.cut_behind: Sequence[nn.Module] = ()
        self.pool: Any = None
        self._graphs: dict[Hashable, _Graph] = {}
        self._gradients: SharedGradients | None = None
        self._attribute: str | None = None
        self.replays = self.eager_calls = self.eager_first = 0
        self.held = False
        self.on_failure: Callable[[CaptureError], None] = _raise

    @property
    def graphs(self) -> int:
        """Graphs captured; each is one of the forward pass and one of each segment of the backward pass."""
        return len(self._graphs)

    @property
    def backward_segments(self) -> int:
        """Segments that the backward pass has; the fewest of any shape's."""
        return min((graph.segments for graph in self._graphs.values()), default=1)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.model.training or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        args = tuple(dict(a) if isinstance(a, Mapping) else a for a in args)  # pytree knows no UserDict
        carried = tuple(getattr(module, attribute) for module, attribute in self.carries)
        leaves, spec = tree_flatten((args, kwargs, carried))
        leaves = _without_repeats(leaves)
        missing = any(value is None or (isinstance(value, tuple) and not value) for value in carried)
        key = None if self.held or self.eager_first or missing else _key(leaves, spec)
        self.eager_first = max(self.eager_first - 1, 0)
        if key is None or (key not in self._graphs and len(self._graphs) >= self.max_graphs):
            self.eager_calls += 1
            return self.original(*args, **kwargs)
        if key not in self._graphs:
            try:
                if self._gradients is None:
                    self._gradients = SharedGradients(self.model.parameters())
                self._graphs[key] = _Graph(self, self._gradients, leaves, spec)
            except CaptureError as error:
                self.on_failure(error)
                self.release()
        if key not in self._graphs:  # it failed, and what the error held is free
            self.eager_calls += 1
            return self.original(*args, **kwargs)
        self.replays += 1
        return self._graphs[key](leaves)

    def begin(self, places: Mapping[nn.Parameter, Tensor]) -> None:
        """Be held no longer; the gradients of the graphs go to ``places``, as :class:`SharedGradients` has it."""
        self.held, self._gradients = False, SharedGradients(self.model.parameters(), places)

    def install(self, attribute: str) -> None:
        """Become ``model.<attribute>``."""
        setattr(self.model, attribute, self)
        self._attribute = attribute

    def release(self) -> None:
        """Give the model its original function back, drop the graphs and their memory, and capture no more."""
        if self._attribute is not None and getattr(self.model, self._attribute) is self:
            setattr(self.model, self._attribute, self.original)
        self._graphs.clear()
        self._gradients = None
        self.max_graphs = 0


def _raise(error: CaptureError) -> None:
    raise error


class _SameAs(NamedTuple):
    """In the place of a tensor that is among the arguments already: in a graph too the two must be one."""

    leaf: int


def _without_repeats(leaves: list[Any]) -> list[Any]:
    first: dict[int, int] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            first.setdefault(id(leaf), index)
    return [
        _SameAs(first[id(leaf)]) if isinstance(leaf, Tensor) and first[id(leaf)] != index else leaf
        for index, leaf in enumerate(leaves)
    ]


def _key(leaves: list[Any], spec: TreeSpec) -> Hashable | None:
    """What one graph serves: shapes, dtypes, other arguments by value and autocast; None for what none can."""
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    parts: list[Hashable] = [repr(spec), autocast]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:  # its gradient would need a static place of the caller's
                return None
            parts.append((leaf.shape, leaf.dtype, leaf.device))
        elif leaf is None or isinstance(leaf, (bool, int, float, str, _SameAs)):
            parts.append(leaf)
        else:
            return None
    return tuple(parts)


class _Graph:
    """One captured forward and backward pass, of the call with tensors alone on both sides and stand-ins inside."""

    def __init__(self, calls: GraphedCalls, gradients: SharedGradients, leaves: list[Any], spec: TreeSpec) -> None:
        self._original, self._carries = calls.original, calls.carries
        self._placeholders = ParameterPlaceholders(calls.model)
        self._leaves, self._spec = leaves, spec
        self._outputs: list[Any] = []  # what is no tensor among them
        self._is_tensor: list[bool] = []
        self._output_spec: TreeSpec | None = None
        static = tuple(leaf.clone() for leaf in leaves if isinstance(leaf, Tensor))
        buffers = [(b, b.clone()) for b in calls.model.buffers()]  # warm-up moves running statistics
        recorder = calls.recorder(calls.pool)
        try:
            # The cache of autocast would hand tensors of one replay to the next.
            autocast = torch.autocast("cuda", enabled=torch.is_autocast_enabled("cuda"), cache_enabled=False)
            with _undone_when_it_fails(), autocast:
                stand_ins = self._placeholders.of(gradients.parameters)
                recorder.settle()
                with capturing():
                    self._replay = Captured(self._call, static, stand_ins, gradients, recorder, calls.cut_behind)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, AssertionError) as error:
            raise CaptureError(first_line(error)) from error
        finally:
            for buffer, before in buffers:
                if not torch.equal(buffer, before):  # a pass that is under way may have saved it
                    buffer.copy_(before)

    @property
    def segments(self) -> int:
        return self._replay.segments

    def __call__(self, leaves: list[Any]) -> Any:
        """The model's own output object around a replay's tensors."""
        assert self._output_spec is not None
        computed = iter(self._replay(*(leaf for leaf in leaves if isinstance(leaf, Tensor))))
        outputs = [next(computed) if t else c for t, c in zip(self._is_tensor, self._outputs, strict=True)]
        return tree_unflatten(outputs, self._output_spec)

    def _call(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        leaves = [leaves[leaf.leaf] if isinstance(leaf, _SameAs) else leaf for leaf in leaves]
        args, kwargs, carried = tree_unflatten(leaves, self._spec)
        with _carrying(self._carries, carried), self._placeholders.in_place():
            outputs, self._output_spec = tree_flatten(self._original(*args, **kwargs))
        self._outputs = [None if isinstance(leaf, Tensor) else leaf for leaf in outputs]
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in outputs]
        return tuple(leaf for leaf in outputs if isinstance(leaf, Tensor))


@contextlib.contextmanager
def _undone_when_it_fails() -> Iterator[None]:
    """A capture that fails leaves its stream the current one, and the generator where nothing else can draw."""
    if not torch.cuda.is_available():
        yield
        return
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    numbers, stream = generator.clone_state(), torch.cuda.current_stream()
    try:
        yield
    except BaseException:
        torch.cuda.set_stream(stream)
        generator.graphsafe_set_state(numbers)
        raise


@contextlib.contextmanager
def _carrying(carries: list[tuple[nn.Module, str]], values: Iterable[Any]) -> Iterator[None]:
    """The attributes at the graph's own tensors, which a replay fills."""
    before = [getattr(module, attribute) for module, attribute in carries]
    for (module, attribute), value in zip(carries, values, strict=True):
        setattr(module, attribute, value)
    try:
        yield
    finally:
        for (module, attribute), value in zip(carries, before, strict=True):
            setattr(module, attribute, value)
