"""What a forward pass of a model tells the unpadded encoder inside it.

Whether an encoder may pack a batch depends on what transformers does not pass to it: the caller's attention mask, the
labels, the number of tokens, and which code reads the result. Each model around an encoder (``BertModel`` and
``BertForSequenceClassification`` around ``BertEncoder``) therefore gets a class derived from its own, whose ``forward``
describes the call in a :class:`Call` for as long as it runs. Calls are kept per thread, and a model finds its encoder
by name, so that threads and direct calls of ``forward`` each have their own.

Shapes: B rows, S slots per row, T packed tokens, M slots that a masked-LM head reads, H hidden units.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from composer_speedups.packing.derived_classes import stock_class, wrap_forward
from composer_speedups.packing.layout import MULTIPLE, SIZES, Layout, counts_on_host, packed_tokens
from composer_speedups.packing.rows import ROW_INDICES, ROW_LABELS, RowLengths, labels_of, lengths_key, token_masks
from composer_speedups.packing.untouched import is_untouched

_LENGTHS = lengths_key("attention_mask")


class Prefix(NamedTuple):
    """The output of an encoder's first blocks for a batch's packed tokens; the encoder starts after these blocks."""

    hidden: Tensor  # (1, T, H)
    blocks: int  # the number of these blocks


@dataclass
class CallPlan:
    """What an encoder computes in one call. :meth:`.encoder.Packing.plan_call` makes it."""

    layout: Layout | None = None  # of the packed tokens; None if the batch stays padded
    first_tokens_only: bool = False  # only each row's first token of the encoder's result is read
    observe: Callable[[Any], Any] | None = None  # called with the padded result, to see whether padding is read
    prefix: Prefix | None = None


@dataclass
class Call:
    """One call of the outermost of the models around an encoder; the models inside it use the same object."""

    encoders: tuple[Any, ...]  # inside the model, except those in wrappers, whose calls are unpredictable
    outermost: Any = None
    labels: Tensor | None = None  # the labels with which the outermost model was called
    unknown_reader: bool = False  # whether unknown code reads the outermost model's result
    first_tokens_only: bool = False  # only each row's first token of the encoder's result is read
    # The tokens for which a masked-LM head computes logits (None for all), and the model whose hidden states it reads.
    head_layout: Layout | None = None
    head_base: nn.Module | None = None
    padded: bool = False  # the encoder must compute the batch as the untouched model does
    plan: CallPlan | None = None  # None while no model directly around the encoder runs


@dataclass
class CallRules:
    """Properties that hold for all calls of a model around an encoder."""

    encoder_paths: tuple[str, ...] = ()  # the names of the encoders inside it
    around_directly: bool = False  # it calls its encoder itself, not through another model
    unknown_reader: bool = False  # whether unknown code reads its result, when it is the outermost model
    # The config's classifier_pooling, which decides what the head reads. Heads look it up in each call; if it has
    # changed, batches stay padded.
    pooling: str | None = None
    pad_to_multiple_of: int | None = MULTIPLE
    # Compares its first calls, given its arguments by name, and the names of those that were passed by position.
    compare: Callable[[Any, dict[str, Any], Sequence[str]], None] | None = None
    first_tokens_only: bool = False  # everything that reads the encoder's result reads only first tokens
    hooks: tuple[dict[int, Any], ...] = ()  # of modules around the blocks, where a later hook reads all tokens
    labelled_head: Any = None  # the LabelledHead of a masked-LM head that computes labelled tokens only


class KnownRows(NamedTuple):
    """A mask or labels, on their device, with the host's count. The forward pass lays out the tokens itself, as part of
    a captured or compiled graph."""

    values: Tensor
    # Empty, of length T; None if the batch stays padded. A number would be a constant in compiled code's first graph.
    packed: Tensor | None
    prefix: Prefix | None = None  # from a cache


class KnownBatch(NamedTuple):
    """The host's counts for the batch of one forward pass: the tokens of its masks, and the labelled tokens."""

    rows: tuple[KnownRows, ...] = ()
    labelled: KnownRows | None = None
    lengths: tuple[RowLengths, ...] = ()  # of the masks in ``rows``
    uncounted: int = 0  # masks without row lengths
    indices: RowLengths | None = None  # of the rows' samples in their dataset

    def without(self, prefix: Prefix) -> KnownBatch:
        return self._replace(rows=tuple(r._replace(prefix=None) if r.prefix is prefix else r for r in self.rows))

    def of(self, mask: Tensor) -> KnownRows | None:
        """The counts of a mask, which may be a view (B · texts, S) of a counted mask (B, texts, S). Compiled code
        cannot detect views, so it uses the only mask of the right shape, if there is exactly one."""
        for rows in self.rows:
            if rows.values is mask:
                return rows
        views = [rows for rows in self.rows if rows.values.ndim > 2 and rows.values.flatten(0, -2).shape == mask.shape]
        if torch.compiler.is_compiling():
            return views[0] if len(views) == 1 else None
        return next((rows for rows in views if rows.values.data_ptr() == mask.data_ptr()), None)

    def lengths_of(self, mask: Tensor) -> dict[str, RowLengths]:
        """The keyword argument that passes the row lengths of a mask (B, S) to the model, so that code that slices the
        batch into chunks slices them, too; empty if they are unknown."""
        known = self.of(mask)
        for rows, lengths in zip(self.rows, self.lengths, strict=False):
            if known is not None and rows.values is known.values:
                return {_LENGTHS: lengths.flatten()}  # type: ignore[dict-item]
        return {}


class _Current(threading.local):
    # Each thread runs this. It is not a ContextVar, which torch.compile cannot trace.
    def __init__(self) -> None:
        self.call: Call | None = None
        self.batch = KnownBatch()


_current = _Current()


def call_of(encoder: nn.Module) -> Call | None:
    """This thread's call of a model around the encoder; None if the encoder is called directly."""
    call = _current.call
    return call if call is not None and any(inside is encoder for inside in call.encoders) else None


def known_batch() -> KnownBatch:
    """What is known of the batch of this thread's forward pass; other calls count their tokens."""
    return _current.batch


def know_batch(batch: KnownBatch) -> None:
    """Let this thread's forward passes use what the host counted of their batch, until the next call."""
    _current.batch = batch


@contextlib.contextmanager
def with_known_batch(batch: KnownBatch) -> Iterator[None]:
    """Let this thread's forward passes use what the host counted of their batch."""
    before, _current.batch = _current.batch, batch
    try:
        yield
    finally:
        _current.batch = before


def take_row_lengths(batch: MutableMapping[str, Any], pad_to_multiple_of: int | None, sizes: int = SIZES) -> KnownBatch:
    """Take the row lengths (:func:`.count_rows`) out of a batch. The result omits masks without lengths."""
    entries = {name: batch.pop(name) for name, value in [*batch.items()] if isinstance(value, RowLengths)}

    def known(values: Tensor, counts: Any) -> KnownRows:
        if counts.min(initial=0) < 0:
            return KnownRows(values, None)
        packed = torch.empty(packed_tokens(int(counts.sum()), values.shape, pad_to_multiple_of, sizes), 0)
        torch._dynamo.maybe_mark_dynamic(packed, 0)
        return KnownRows(values, packed)

    masks, labels, labelled = token_masks(batch), labels_of(batch), None
    rows, of_rows = [], []
    for name, mask in masks.items():
        lengths = entries.get(lengths_key(name))
        if lengths is not None and (counts := lengths.numpy()).shape == mask.shape[:-1]:
            rows.append(known(mask, counts))
            of_rows.append(lengths)
    if ROW_LABELS in entries and labels is not None and labels.ndim == 2:
        labelled = known(labels, entries[ROW_LABELS].numpy())
    return KnownBatch(tuple(rows), labelled, tuple(of_rows), len(masks) - len(rows), entries.get(ROW_INDICES))


_take_eagerly = counts_on_host(take_row_lengths)


def refuse_replicas(*_: Any) -> Any:
    """Raise ValueError: torch.nn.DataParallel is not supported, because it copies the model for each call."""
    raise ValueError(
        "composer_speedups does not support nn.DataParallel; start one process per GPU (torchrun), or set "
        "CUDA_VISIBLE_DEVICES to one GPU"
    )


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
        names = self.argument_names[: len(args)]
        if len(args) > len(names) or any(name in kwargs for name in names):
            return type(self).inner_forward(self, *args, **kwargs)  # raises the usual TypeError
        inputs = {**dict(zip(names, args, strict=True)), **kwargs}
        at_paths = [module_at(self, path) for path in self.call_rules.encoder_paths]
        encoders = tuple(module for module in at_paths if hasattr(type(module), "prepare_call"))
        if any(isinstance(value, RowLengths) for value in inputs.values()):  # the collator's, in a loop of one's own
            with with_known_batch(_take_eagerly(inputs, self.call_rules.pad_to_multiple_of)):
                return self._describe_call(names, inputs, encoders)
        return self._describe_call(names, inputs, encoders)

    def _describe_call(self: Any, names: list[str], inputs: dict[str, Any], encoders: tuple[Any, ...]) -> Any:
        around = call_of(encoders[0]) if encoders else None
        call = self._outermost_call(encoders, names, inputs) if around is None else around
        before, _current.call = _current.call, call
        try:
            if self.call_rules.around_directly and encoders:
                inputs = encoders[0].prepare_call(call, inputs)
            # by position again, for a subclass whose forward takes *args or positional-only arguments
            rest = {name: value for name, value in inputs.items() if name not in names}
            output = type(self).inner_forward(self, *(inputs[name] for name in names), **rest)
        finally:
            # The plan is only for this call: the outermost model may still call the encoder directly.
            _current.call, call.plan = before, None
        if call.head_layout is not None and call.head_base is self:
            return _selected_hidden_states(output, call.head_layout)
        return output

    def _outermost_call(self: Any, encoders: tuple[Any, ...], names: list[str], inputs: dict[str, Any]) -> Call:
        rules = self.call_rules
        first_only = rules.first_tokens_only and not any(rules.hooks)
        call = Call(encoders, self, unknown_reader=rules.unknown_reader, first_tokens_only=first_only)
        other_pooling = getattr(self.config, "classifier_pooling", None) != rules.pooling
        call.padded = is_untouched() or other_pooling or is_traced() or _has_adapter_per_row(self)
        if rules.compare is not None and not call.padded:
            rules.compare(self, inputs, names)
        labels = inputs.get("labels")
        if isinstance(labels, Tensor) and labels.ndim > 0:
            call.labels = labels
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


def module_at(model: nn.Module, path: str) -> Any:
    """The module of a name, without wrappers; None if there is none, as inside of some wrappers."""
    module: Any = model
    for name in path.split(".") if path else ():
        module = getattr(module, name, None)
    return unwrapped(module)


def models_around_encoders(model: nn.Module) -> list[ModelAroundEncoder]:
    """The models around unpadded encoders in a model, itself included."""
    return [module for module in changed_modules(model) if isinstance(module, ModelAroundEncoder)]


def changed_modules(model: nn.Module) -> Iterable[nn.Module]:
    """The modules whose class unpadding changed in the model that it was applied to; all modules of other models."""
    return vars(model).get("changed_modules") or model.modules()


def _argument_names(model_class: type[Any]) -> list[str]:
    """The names of positional arguments: those of transformers' class if a subclass's ``forward`` takes ``*args``."""
    for kind in model_class.__mro__:
        if "forward" in vars(kind):
            parameters = [*inspect.signature(vars(kind)["forward"]).parameters.values()][1:]
            if not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
                return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return []


def is_traced() -> bool:
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


def _selected_hidden_states(output: Any, layout: Layout) -> Any:
    """A model's output with the hidden states of some slots, (B, S, H) → (1, M, H), instead of all."""
    selected = layout.gather(output[0]).unsqueeze(0)
    if isinstance(output, tuple):
        return (selected, *output[1:])
    output.last_hidden_state = selected
    return output
