"""A callable whose calls are captured as CUDA graphs, one per combination of input shapes."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from composer_speedups.algorithms.cuda_graphs.capture import Captured, CapturedForward, CUDARecorder, SharedGradients
from composer_speedups.algorithms.cuda_graphs.segments import blocks_to_cut
from composer_speedups.core.compile_counts import count_capture
from composer_speedups.core.errors import first_line
from composer_speedups.core.trainer_state import world_size
from composer_speedups.packing.call import KnownBatch, is_traced, known_batch, take_row_lengths, with_known_batch
from composer_speedups.packing.encoder import unpadded_encoders
from composer_speedups.packing.rows import RowLengths
from composer_speedups.packing.untouched import is_untouched


class CaptureError(RuntimeError):
    """A forward or backward pass that cannot be captured."""


class GraphedCalls:
    """Replaces a model's forward, and captures its forward and backward pass at the first call of each shape.

    In eval mode and without gradients, the forward pass alone is captured, at the second call of each shape, and
    calls return copies of its outputs. Other calls in eval mode or without gradients run the original function. So do
    calls with further shapes after ``max_graphs`` shapes were captured for training, or as many for evaluation.
    """

    def __init__(
        self,
        model: nn.Module,
        original: Callable[..., Any],
        max_graphs: int,
        recorder: Callable[[Any], Any] = CUDARecorder,
    ) -> None:
        self.model, self.original, self.max_graphs, self.recorder = model, original, max_graphs, recorder
        self.__signature__ = inspect.signature(original)  # Trainers remove the columns that it does not name
        # Whether calls need what the host counted of their batches, as an argument of the graph; others are eager.
        self.reads_known_batch = False
        # Blocks after which the backward pass is cut (see segments), except for frozen blocks, before which it ends.
        self.cut_behind: Sequence[nn.Module] = ()
        self.accumulate = False  # whether backward passes accumulate gradients without autograd; see Captured
        self.pool: Any = None  # the memory pool that all graphs of training share; None gives each its own
        self._graphs: dict[Hashable, _Graph] = {}
        self._last: _Graph | None = None  # the graph of the last training call that replayed one
        self._parameters: list[nn.Parameter] = []
        self._trained: list[bool] | None = None  # which of the parameters required gradients when last looked at
        # Whether each call looks for frozen parameters and for a first replay, and returns copies of outputs.
        self.in_other_loop = True
        self._gradients: SharedGradients | None = None
        self._attribute: str | None = None
        self.replays = self.eager_calls = 0  # numbers of training calls that replayed a graph, and that ran eagerly
        self._versions = deque[int](maxlen=20)  # of the parameters together, in the first calls; steps increase them
        # Evaluation's graphs; None for a shape that was called once. They share a recorder, and with it a memory pool,
        # because each call is complete when it returns, but not with training, whose backward pass may be due.
        self._evaluations: dict[Hashable, _Graph | None] = {}
        self._eval_recorder: Any = None
        # The modules inside the model when evaluation began, with what a replay depends on.
        self._modules: list[Any] = []
        self._device = next((p.device for p in model.parameters()), None)
        self._states: dict[Hashable, int] = {}  # addresses of weights and buffers, with adapters' settings, numbered
        self.eval_graphs = self.eval_replays = 0
        self.eval_note = ""  # why evaluation is not captured any more
        self.paused: Callable[[], bool] = bool  # whether this call must run the original function: it is observed
        self.held = False  # whether all training calls run the original function until begin()
        # Called with the reason why calls cannot be captured, and the fix; if it returns, later calls are eager.
        self.on_failure: Callable[[str, str], None] = _raise
        self.on_outdated: Callable[[], object] = bool  # called after the graphs were dropped: parameters were frozen

    @property
    def graphs(self) -> int:
        """The number of captured shapes."""
        return len(self._graphs)

    @property
    def backward_segments(self) -> int:
        """The number of segments of the backward pass, the minimum over the shapes."""
        return min((graph.replay.segments for graph in self._graphs.values()), default=1)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trains = self.model.training and torch.is_grad_enabled()
        if is_untouched() or not (trains or self._may_evaluate()):
            self._expect_replays()
            return self.original(*args, **kwargs)
        known, graph = known_batch() if self.reads_known_batch else _UNKNOWN, None
        if self.reads_known_batch and not known.rows and any(isinstance(v, RowLengths) for v in kwargs.values()):
            # the collator's, in a loop of one's own
            multiple = unpadded_encoders(self.model)[0].packing.pad_to_multiple_of
            with with_known_batch(take_row_lengths(kwargs, multiple)):
                return self(*args, **kwargs)
        if trains and self.in_other_loop:
            self.forget_if_frozen()
        if not ((self.held and trains) or (self.reads_known_batch and not known.rows) or self.paused()):
            arguments, tensors = (args, kwargs, known.rows, known.labelled), list[Tensor]()
            # Autocast is looked up for CUDA, where graphs are.
            autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
            key = _key(arguments, tensors, {})
            if key is not None:
                find = self._training if trains else self._evaluation
                graph = find((autocast, key), tensors, arguments)
        if graph is None:
            self.eager_calls += trains
            self._expect_replays()
            return self.original(*args, **kwargs)
        if trains:
            self.replays, self._last = self.replays + 1, graph
        self.eval_replays += not trains
        return graph(tensors, accumulate=trains and self.accumulate)

    def _expect_replays(self) -> None:
        """Fail if another loop than Composer's trains the model, and all its calls are eager."""
        awaits = self.in_other_loop and self.max_graphs and not (self.replays or self.paused() or is_untouched())
        if awaits and torch.is_grad_enabled():
            self._versions.append(sum(parameter._version for parameter in self.model.parameters()))
            if len(self._versions) == self._versions.maxlen and (self.model.training or len(set(self._versions)) > 2):
                fix = "call model(**batch) in train mode; unpadding needs a mask and with_row_lengths(collate, model)"
                self.on_failure("training goes on, and no call was captured", fix)

    def forget_if_frozen(self) -> None:
        """Drop all graphs if parameters were frozen or thawed since the last look; later calls are captured again."""
        self._parameters = self._parameters or list(self.model.parameters())
        before, self._trained = self._trained, [parameter.requires_grad for parameter in self._parameters]
        if before is not None and before != self._trained:
            self.forget()

    def forget(self) -> None:
        """Drop all graphs; later calls are captured again."""
        if self._graphs and self.pool is not None:  # a pool whose graphs were freed cannot be used again
            self.pool = torch.cuda.graph_pool_handle()
        self._drop()
        self.on_outdated()

    def _drop(self) -> None:
        self._graphs.clear()
        self._evaluations.clear()
        self._gradients = self._eval_recorder = self._last = None
        self._modules, self.eval_graphs = [], 0

    def _training(self, key: Hashable, tensors: list[Tensor], arguments: _Arguments) -> _Graph | None:
        """The graph of a shape, captured if it is new; None if that is impossible, or it waits for a backward pass."""
        if self._last and self._last.replay.last_call():
            return None  # a replay or a capture would overwrite what that call's backward pass reads
        if key in self._graphs or len(self._graphs) >= self.max_graphs:
            return self._graphs.get(key)
        if self._gradients is None:
            self._gradients = SharedGradients(self.model.parameters())
        try:
            self._graphs[key] = _Graph(self, self.recorder(self.pool), tensors, arguments, self._gradients)
        except CaptureError as error:
            self.on_failure(str(error), "remove it, or the code that synchronizes")
            self.release()
        return self._graphs.get(key)

    def _may_evaluate(self) -> bool:
        """Whether a replay can replace a call: not if it runs hooks, is traced, or may overlap with another call."""
        if torch.is_grad_enabled() or self.model.training or self.eval_note or torch.compiler.is_compiling():
            return False
        if not self._modules:
            modules: list[Any] = [*self.model.modules()]
            self._modules = modules[1:]
            self._tensors = [t for m in modules for t in (m._parameters, m._buffers) if t]
            self._adapted = [m for m in modules if "merged_adapters" in m.__dict__]  # PEFT's
            # The model's own hooks run outside of its forward.
            self._hooks = [hooks for m in self._modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        may_overlap = threading.current_thread() is not threading.main_thread() or (  # as servers call models
            torch.cuda.is_initialized() and torch.cuda.current_stream() != torch.cuda.default_stream()
        )
        hooks = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks or any(self._hooks)
        if hooks or may_overlap or is_traced() or _get_current_dispatch_mode() is not None:
            return False
        return True not in [module.training for module in self._modules]

    def _evaluation(self, key: Hashable, tensors: list[Tensor], arguments: _Arguments) -> _Graph | None:
        """The graph of a call in evaluation, captured if this is its second call; None for an eager call."""
        if [tensor for tensor in tensors if tensor.device != self._device and tensor.numel()]:
            return None
        memory = [t.data_ptr() for tensors in self._tensors for t in tensors.values() if t is not None]
        adapters = [
            (m.disable_adapters, *m.active_adapters, *m.merged_adapters, *getattr(m, "scaling", {}).values())
            for m in self._adapted
        ]
        key = (key, self._states.setdefault((*memory, *adapters), len(self._states)))
        if key not in self._evaluations and len(self._evaluations) < 1000:
            self._evaluations[key] = None
        elif self._evaluations.get(key) is None and self.eval_graphs < self.max_graphs:
            self._eval_recorder = self._eval_recorder or self.recorder(None)
            try:
                with torch.inference_mode(False), torch.no_grad():  # inference tensors could not be written later
                    self._evaluations[key] = _Graph(self, self._eval_recorder, tensors, arguments, None)
                self.eval_graphs += 1
            except Exception as error:  # one of the model recurs in the eager call
                self.eval_note = f"evaluation cannot be captured ({first_line(error)})"
                self.forget()  # the generator's state, which all graphs advance, was replaced
        return self._evaluations.get(key)

    def begin(self, buffers: Mapping[nn.Parameter, Tensor]) -> None:
        """Start capturing if :attr:`held`; graphs write gradients to ``buffers`` (see :class:`SharedGradients`)."""
        self.held, self._gradients = False, SharedGradients(self.model.parameters(), buffers)

    def install(self, attribute: str) -> None:
        """Replace ``model.<attribute>`` by this object."""
        setattr(self.model, attribute, self)
        self._attribute = attribute

    def release(self) -> None:
        """Restore the model's original function, and stop capturing; backward passes that are due keep their graphs."""
        if self._attribute is not None and getattr(self.model, self._attribute) is self:
            setattr(self.model, self._attribute, self.original)
        self._drop()
        self.max_graphs = 0


def _raise(reason: str, _fix: str) -> None:
    raise CaptureError(reason)


_UNKNOWN = KnownBatch()
_CONSTANTS = (bool, int, float, str, type(None))
# Those of a call, and what is known of its batch: masks with their number of packed tokens, and labels.
_Arguments = tuple[tuple[Any, ...], dict[str, Any], Any, Any]


def _is_dict(value: Any) -> bool:
    return type(value) in (dict, OrderedDict) or isinstance(value, UserDict)


def _key(values: Sequence[Any], tensors: list[Tensor], places: dict[int, int]) -> Hashable | None:
    """The key of a call's graph: shapes, dtypes and devices of tensors, other arguments by value; None if unsupported.

    Appends the tensors to ``tensors``, and stores their indices in ``places``, by id. A repeated tensor is represented
    by its index, because it is one tensor in the graph, too.
    """
    parts: list[Hashable] = []
    for value in values:
        part: Hashable
        if isinstance(value, Tensor):
            part = places.setdefault(id(value), len(tensors))
            if part == len(tensors):
                if value.requires_grad:  # its gradient would need static memory of the caller
                    return None
                tensors.append(value)
                part = (value.shape, value.dtype, value.device)
        elif isinstance(value, _CONSTANTS):
            part = (type(value), value)
        elif isinstance(value, (tuple, list)):
            part = _key(value, tensors, places)
        elif _is_dict(value):
            inside = _key([*value.values()], tensors, places)
            part = inside and (*value, inside)
        else:
            return None
        if part is None:
            return None
        parts.append(part)
    return (type(values), *parts)


def _with(value: Any, static: Mapping[int, Tensor]) -> Any:
    """A copy of arguments with each tensor replaced by ``static[id(tensor)]``."""
    if isinstance(value, Tensor):
        return static[id(value)]
    if isinstance(value, (tuple, list)):
        entries = [_with(entry, static) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    return {name: _with(entry, static) for name, entry in value.items()} if _is_dict(value) else value


class _Graph:
    """The captured graphs of one shape, with conversion between the model's arguments and outputs and flat tensors."""

    def __init__(
        self,
        calls: GraphedCalls,
        recorder: Any,
        tensors: list[Tensor],
        arguments: _Arguments,
        gradients: SharedGradients | None,
    ) -> None:
        """Capture a call; without ``gradients``, its forward pass alone."""
        self._original = calls.original
        self._placeholders = None if gradients is None else ParameterPlaceholders(calls.model)
        self.replay: Any
        self._outputs: list[Any] = []  # the outputs that are not tensors, with None for tensors
        self._is_tensor: list[bool] = []
        self._output_spec: TreeSpec | None = None
        static = tuple(tensor.clone() for tensor in tensors)
        self._arguments = _with(arguments, dict(zip(map(id, tensors), static, strict=True)))
        self._static = {id(tensor): tensor for tensor in static}
        buffers = [(b, b.clone()) for b in calls.model.buffers()]  # warm-up changes running statistics
        try:
            # Autocast's cache would reuse tensors of one replay in the next.
            autocast = torch.autocast("cuda", enabled=torch.is_autocast_enabled("cuda"), cache_enabled=False)
            with generators_restored(), autocast:
                if gradients is None or self._placeholders is None:
                    self.replay = CapturedForward(self._call, static, recorder)
                    return
                placeholders = self._placeholders.of(gradients.parameters)
                count_capture()
                trained = [block for block in calls.cut_behind if any(p.requires_grad for p in block.parameters())]
                copies = calls.in_other_loop
                self.replay = Captured(self._call, static, placeholders, gradients, recorder, trained, copies)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, AssertionError) as error:
            raise CaptureError(first_line(error)) from error
        finally:
            for buffer, before in buffers:
                if not torch.equal(buffer, before):  # do not write needlessly: an unfinished pass may have saved it
                    buffer.copy_(before)

    def __call__(self, tensors: list[Tensor], *, accumulate: bool) -> Any:
        """Replay, and return the tensors in the model's output object."""
        assert self._output_spec is not None
        computed = iter(self.replay(tensors, accumulate))
        outputs = [next(computed) if t else c for t, c in zip(self._is_tensor, self._outputs, strict=True)]
        return tree_unflatten(outputs, self._output_spec)

    def _call(self, *_: Tensor) -> tuple[Tensor, ...]:
        args, kwargs, *known = _with(self._arguments, self._static)  # in new containers, which a forward may change
        in_place = contextlib.nullcontext() if self._placeholders is None else self._placeholders.in_place()
        with with_known_batch(KnownBatch(*known)), in_place:
            outputs, self._output_spec = tree_flatten(self._original(*args, **kwargs))
        if self._placeholders is None and not all(isinstance(leaf, (Tensor, *_CONSTANTS)) for leaf in outputs):
            raise RuntimeError("an output is not a tensor, and may contain some")
        self._outputs = [None if isinstance(leaf, Tensor) else leaf for leaf in outputs]
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in outputs]
        return tuple(leaf for leaf in outputs if isinstance(leaf, Tensor))


class ParameterPlaceholders:
    """Parameters that replace a model's parameters while it is captured; they use the same memory.

    As long as a loss exists, autograd keeps the nodes that accumulate the parameters' gradients, and each node belongs
    to the stream on which it was created. A capture that uses such a node would make that stream wait for the capturing
    stream, which CUDA forbids. Other leaf tensors with the same memory have their own nodes. A parameter shared by
    several modules has one placeholder.
    """

    def __init__(self, model: nn.Module) -> None:
        self._slots = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
        self._placeholders = {parameter: _leaf(parameter) for _, _, parameter in self._slots}

    def of(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [self._placeholders[parameter] for parameter in parameters]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the placeholders into the modules, and restore the parameters on exit."""
        try:
            for module, name, parameter in self._slots:
                setattr(module, name, self._placeholders[parameter])  # setattr also updates the weight lists of RNNs
            yield
        finally:
            for module, name, parameter in self._slots:
                setattr(module, name, parameter)


def _leaf(parameter: nn.Parameter) -> nn.Parameter:
    leaf = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    leaf.__dict__.update(parameter.__dict__)
    return leaf


@contextlib.contextmanager
def generators_restored() -> Iterator[None]:
    """Restore the states of torch's generators, and the current stream if a capture fails. A replay, also in a resumed
    run, which captures again, therefore draws the dropout masks of an eager call."""
    on_cpu, on_gpu = torch.get_rng_state(), torch.cuda.is_available()
    if on_gpu:
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        numbers, stream = generator.clone_state(), torch.cuda.current_stream()
    try:
        yield
        if on_gpu:
            # Captured graphs hold the generator's current state object, so its numbers are set, and it is kept.
            generator.set_state(numbers.get_state())
    except BaseException:
        if on_gpu:
            torch.cuda.set_stream(stream)
            generator.graphsafe_set_state(numbers)
        raise
    finally:
        torch.set_rng_state(on_cpu)


def install(model: nn.Module, max_graphs: int = 4) -> GraphedCalls:
    """Make a model's calls replay CUDA graphs; ``release()`` of the result undoes that.

    The model is on a CUDA GPU, and already compiled or unpadded, if at all, but not wrapped in DDP (ValueError). On
    several ranks, backward passes are cut into segments (:func:`blocks_to_cut`), so that DDP sends the gradients of the
    last blocks while those of the first blocks are computed.
    """
    if isinstance(model, DistributedDataParallel):
        raise ValueError("communication cannot be captured; apply cuda_graphs before DDP wraps the model")
    attribute = "forward" if model._compiled_call_impl is None else "_compiled_call_impl"
    calls = GraphedCalls(model, getattr(model, attribute), max_graphs)
    calls.install(attribute)
    calls.cut_behind = blocks_to_cut(model) if world_size() > 1 else ()
    calls.reads_known_batch = bool(unpadded_encoders(model))
    return calls
