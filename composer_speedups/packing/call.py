"""What a forward pass of a model tells the unpadded encoder inside it.

Whether an encoder may pack a batch depends on what transformers does not pass to it: the caller's attention mask, the
labels, and which code reads the result. Each model around an encoder (``BertModel`` and
``BertForSequenceClassification`` around ``BertEncoder``) therefore gets a class derived from its own, whose ``forward``
describes the call in a :class:`Call` for as long as it runs. Calls are kept per thread, and a model finds its encoder
by name, so that threads and direct calls of ``forward`` each have their own.

Shapes: B rows, S slots per row, M slots that a masked-LM head reads, H hidden units.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from composer_speedups.packing.derived_classes import stock_class, wrap_forward
from composer_speedups.packing.tokens import TokenLayout, gather_tokens

__all__ = [
    "Call",
    "CallPlan",
    "CallRules",
    "FirstCalls",
    "ModelAroundEncoder",
    "call_of",
    "forced",
    "models_around_encoders",
    "refuse_replicas",
    "unwrapped",
]


@dataclass
class CallPlan:
    """What an encoder computes in one call. :meth:`.planning.Packing.plan_call` makes it.

    Attributes:
        layout: The layout of the packed tokens; None if the batch stays padded.
        first_tokens_only: Whether only each row's first token of the encoder's result is read.
        guarded: Whether a gradient at padding positions of the result is an error.
        observe: Called with the padded result, to see whether padding is read; None if that is known.
    """

    layout: TokenLayout | None = None
    first_tokens_only: bool = False
    guarded: bool = False
    observe: Callable[[Any], Any] | None = None


@dataclass
class Call:
    """One call of the outermost of the models around an encoder; the models inside it use the same object.

    Attributes:
        encoders: The encoders inside the model. One in a wrapper that may call it in any way is not among them, and
            stays padded.
        outermost: The outermost model.
        labels: The labels that the outermost model was called with.
        unknown_reader: Whether the code that reads the outermost model's result is unknown.
        first_tokens_only: Whether only each row's first token of the encoder's result is read.
        head_slots: The slots for which a masked-LM head computes logits, int64 (M,); None for all.
        head_base: With ``head_slots``, the model inside the outermost one whose hidden states the head reads.
        padded: Whether the encoder must compute the batch as the untouched model does.
        trust_unknown_reader: Whether the batch is packed even if its reader is unknown, as for a comparison with the
            untouched model.
        plan: What the encoder computes; None while no model directly around it runs.
    """

    encoders: tuple[Any, ...]
    outermost: Any = None
    labels: Tensor | None = None
    unknown_reader: bool = False
    first_tokens_only: bool = False
    head_base: nn.Module | None = None
    head_slots: Tensor | None = None
    padded: bool = False
    trust_unknown_reader: bool = False
    plan: CallPlan | None = None


@dataclass
class CallRules:
    """What is known beforehand of the calls of a model around an encoder.

    Attributes:
        encoder_paths: The names of the encoders inside it.
        around_directly: Whether it calls its encoder itself, not through another model.
        unknown_reader: See :class:`Call`; applies when it is the outermost model.
        pooling: The configuration's ``classifier_pooling``, which decides what the head reads. With another one, which
            heads look up in each call, batches stay padded.
        check: The setting by which ``first_calls`` was chosen.
        first_calls: A check of its first calls; None for no check.
        first_token_readers: The modules that read the encoder's result, if they read only first tokens; otherwise None.
            The last layer then computes first tokens only, until one of these modules is changed.
        labelled_head: The :class:`~.labelled_head.LabelledHead` of a masked-LM head that computes labelled tokens
            only; None for other heads.
    """

    encoder_paths: tuple[str, ...] = ()
    around_directly: bool = False
    unknown_reader: bool = False
    pooling: str | None = None
    check: str = "never"
    first_calls: FirstCalls | None = None
    first_token_readers: Any = None
    labelled_head: Any = None


class _Current(threading.local):
    # Each thread runs this. torch.compile would read a class attribute instead of the thread's own value.
    def __init__(self) -> None:
        self.call: Call | None = None
        self.forced: Literal["padded", "packed"] | None = None


_current = _Current()


def call_of(encoder: nn.Module) -> Call | None:
    """This thread's call of a model around the encoder; None if the encoder is called directly."""
    call = _current.call
    return call if call is not None and any(inside is encoder for inside in call.encoders) else None


@contextlib.contextmanager
def forced(mode: Literal["padded", "packed"]) -> Iterator[None]:
    """Make this thread's forward passes compute what the untouched model computes (``"padded"``), or pack batches
    although it is not known whether their padding is read (``"packed"``), to compare the two."""
    before, _current.forced = _current.forced, mode
    try:
        yield
    finally:
        _current.forced = before


def refuse_replicas(*_: Any) -> Any:
    """Raise ValueError, since torch.nn.DataParallel, which copies a model for each call, is not supported."""
    raise ValueError(
        "composer_speedups does not support nn.DataParallel; start one process per GPU (torchrun), or set "
        "CUDA_VISIBLE_DEVICES to one GPU"
    )


class FirstCalls(Protocol):
    """Checks an outermost model in its first calls."""

    def before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], positional: Sequence[str] = ()) -> bool:
        """Return whether this call must stay padded. Raises ValueError if the model cannot run packed.

        ``positional`` names the arguments in ``kwargs`` that were passed by position, after ``args``.
        """


class ModelAroundEncoder(nn.Module):
    """The methods of a model around an unpadded encoder, mixed into the model's own class."""

    prefix = ""
    inner_forward: ClassVar[Callable[..., Any]]
    argument_names: ClassVar[list[str]]
    call_rules: CallRules
    _replicate_for_data_parallel = refuse_replicas

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_derived_from" not in vars(cls):  # a mixin, or FSDP's subclass of a class that is complete
            return
        wrap_forward(cls, ModelAroundEncoder.describe_call)
        cls.argument_names = _argument_names(stock_class(cls))
        # The class has its original class's name, because transformers saves that name in config.json, Composer saves
        # it in checkpoints, and transformers looks up by it which outputs a model can record.
        stock = stock_class(cls)
        cls.__module__, cls.__name__, cls.__qualname__ = stock.__module__, stock.__name__, stock.__qualname__

    def describe_call(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the class's own forward, with a :class:`Call` that describes it."""
        positional = self.argument_names[: len(args)]
        if len(args) > len(positional) or any(name in kwargs for name in positional):
            return type(self).inner_forward(self, *args, **kwargs)  # raises the usual TypeError
        inputs = {**dict(zip(positional, args, strict=True)), **kwargs}
        at_paths = [_module_at(self, path) for path in self.call_rules.encoder_paths]
        encoders = tuple(module for module in at_paths if hasattr(type(module), "prepare_call"))
        around = call_of(encoders[0]) if encoders else None
        call = self._outermost_call(encoders, positional, inputs) if around is None else around
        before, _current.call = _current.call, call
        try:
            if self.call_rules.around_directly and encoders:
                inputs = encoders[0].prepare_call(call, inputs)
            # by position again, for a subclass whose forward takes *args or positional-only arguments
            rest = {name: value for name, value in inputs.items() if name not in positional}
            output = type(self).inner_forward(self, *(inputs[name] for name in positional), **rest)
        finally:
            # The plan is only for this call: the outermost model may still call the encoder directly.
            _current.call, call.plan = before, None
        if call.head_slots is not None and call.head_base is self:
            return _selected_hidden_states(output, call.head_slots)
        return output

    def _outermost_call(self: Any, encoders: tuple[Any, ...], positional: list[str], inputs: dict[str, Any]) -> Call:
        rules = self.call_rules
        call = Call(encoders, self, unknown_reader=rules.unknown_reader)
        other_pooling = getattr(self.config, "classifier_pooling", None) != rules.pooling
        call.padded = _current.forced == "padded" or other_pooling or _is_traced() or _has_adapter_per_row(self)
        call.trust_unknown_reader = _current.forced == "packed"
        if rules.first_calls is not None and _current.forced is None and not call.padded:
            call.padded = rules.first_calls.before(self, (), inputs, positional)
        labels = inputs.get("labels")
        if isinstance(labels, Tensor) and labels.ndim > 0:
            call.labels = labels
        if rules.first_token_readers is not None:
            call.first_tokens_only = rules.first_token_readers.is_unchanged()
        if rules.labelled_head is not None and not call.padded:
            rules.labelled_head.select(self, call, inputs)
        return call


def unwrapped(module: Any) -> Any:
    """A module without the wrappers of torch.compile and of FSDP1, which pass every call on to it unchanged."""
    while isinstance(module, nn.Module):
        inside = module._modules.get("_orig_mod", module._modules.get("_fsdp_wrapped_module"))
        if inside is None:
            break
        module = inside
    return module


def _module_at(model: nn.Module, path: str) -> Any:
    """The module of a name, without wrappers; None if there is none, as inside of some wrappers."""
    module: Any = model
    for name in path.split(".") if path else ():
        module = getattr(module, name, None)
    return unwrapped(module)


def models_around_encoders(model: nn.Module) -> list[ModelAroundEncoder]:
    """The models around unpadded encoders in a model, itself included."""
    return [module for module in model.modules() if isinstance(module, ModelAroundEncoder)]


def _argument_names(model_class: type[Any]) -> list[str]:
    """The names of positional arguments: those of transformers' class if a subclass's ``forward`` takes ``*args``."""
    for kind in model_class.__mro__:
        if "forward" in vars(kind):
            parameters = [*inspect.signature(vars(kind)["forward"]).parameters.values()][1:]
            if not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
                return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return []


def _is_traced() -> bool:
    """Whether the call is exported, traced by torch.jit, transformed by torch.func, or differentiated in forward mode.

    Such a call can neither read the number of tokens on the host nor use this package's autograd functions.
    """
    if torch.compiler.is_dynamo_compiling():  # where is_exporting() is always true
        return False
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    return transformed or forward_mode or torch.jit.is_tracing() or torch.compiler.is_exporting()


def _has_adapter_per_row(model: nn.Module) -> bool:
    """Whether PEFT was called with ``adapter_names``, for which it hooks each of its layers during the call."""
    if not hasattr(model, "peft_config"):
        return False
    adapted = next((module for module in model.modules() if hasattr(type(module), "adapter_layer_names")), None)
    hooks = [] if adapted is None else adapted._forward_pre_hooks.values()
    return any("adapter_names" in getattr(hook, "keywords", ()) for hook in hooks)


def _selected_hidden_states(output: Any, slots_M: Tensor) -> Any:
    """A model's output with the hidden states of some slots, (B, S, H) → (1, M, H), instead of all."""
    hidden = output[0]
    selected = gather_tokens(hidden.flatten(0, 1), slots_M).unsqueeze(0)
    if isinstance(output, tuple):
        return (selected, *output[1:])
    output.last_hidden_state = selected
    return output
