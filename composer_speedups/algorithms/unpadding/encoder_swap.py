"""Find a model's encoders, replace their class by one that runs unpadded, and restore it.

In a loop without Composer's Trainer, a model's first calls are compared with the untouched model's.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from composer_speedups.core.stock import model_differences, outermost_models
from composer_speedups.families.blocks import blocks_of
from composer_speedups.families.family import Family, Reads, family_of, family_titles
from composer_speedups.packing.attention import PackedAttentionConfig
from composer_speedups.packing.call import CallRules, ModelAroundEncoder
from composer_speedups.packing.comparison import (
    SIXTEEN_BITS,
    Check,
    Tolerance,
    compare,
    outcome_of,
    tolerance_of,
    with_padding,
)
from composer_speedups.packing.derived_classes import derived_class, restore_class, stock_class
from composer_speedups.packing.encoder import LabelledHead, MLMHead, Packing, UnpaddedEncoder, check_labelled_head
from composer_speedups.packing.layout import MULTIPLE, run_eagerly
from composer_speedups.packing.rows import RowRules
from composer_speedups.packing.untouched import untouched, with_everything_packed

_REFUSED = {Reads.PADDING: "whose loss includes padding positions", Reads.DECODER: "which is a decoder"}
_COMPARED_EAGERLY = (
    "unpadding compares this model with the untouched one in its first calls; call it once before compiling, or set "
    "check='never'"
)


class _Encoder(NamedTuple):
    module: Any
    family: Family
    direct_parents: list[PreTrainedModel]  # models that call the encoder themselves; ModernBERT's encoder is its own
    outermost_models: list[PreTrainedModel]  # several heads may share an encoder

    @property
    def heads(self) -> dict[str, Reads]:
        """Map the class name of each outermost model to what it reads of the encoder's result."""
        config, names = self.direct_parents[0].config, (type(model).__name__ for model in self.outermost_models)
        return {name: self.family.reads(name, config) for name in names}


def unpad(
    model: nn.Module, pad_to_multiple_of: int | None = MULTIPLE, mlm_head: MLMHead = "all", *, check: Check = "never"
) -> list[str]:
    """Make every encoder in ``model`` run unpadded, and return the names of the newly changed ones; ValueError, before
    anything is changed, if that is impossible. The settings of the last call hold.

    Unless ``check="never"``, first calls are compared (:class:`FirstCall`). If unknown code reads the result, batches
    stay padded until gradients show that this code does not read padding.
    """
    encoders = _find_encoders(model)
    for encoder in encoders.values():
        _check(encoder)
        if mlm_head == "labelled":
            for outer in encoder.outermost_models:
                check_labelled_head(outer)
    changed = []
    for name, encoder in encoders.items():
        if not isinstance(encoder.module, UnpaddedEncoder):
            _change_classes(encoder)
            changed.append(name)
        encoder.module.packing = _packing_of(encoder, pad_to_multiple_of, None if check != "never" else False)
    reads_real_tokens = getattr(model, "reads_real_tokens", False)  # as this package's tasks do
    outermost = {*outermost_models(model).values()}
    around: Any
    for around_name, around in _models_around(model).items():
        paths = tuple(name for name, module in around.named_modules() if isinstance(module, UnpaddedEncoder))
        if not paths:
            continue
        if not isinstance(around, ModelAroundEncoder):
            around.__class__ = derived_class(ModelAroundEncoder, type(around))
        is_outermost = any(around is outer for encoder in encoders.values() for outer in encoder.outermost_models)
        compared = check != "never" and around in outermost
        around.call_rules = CallRules(
            paths,
            around_directly=any(around is base for encoder in encoders.values() for base in encoder.direct_parents),
            unknown_reader=check != "never" and not _has_known_head(around) and not reads_real_tokens,
            pooling=getattr(around.config, "classifier_pooling", None),
            pad_to_multiple_of=pad_to_multiple_of,
            compare=FirstCall(around_name, check, model).compare if compared else None,
            labelled_head=LabelledHead(pad_to_multiple_of) if mlm_head == "labelled" and is_outermost else None,
        )
    changed_modules = [m for m in model.modules() if isinstance(m, (UnpaddedEncoder, ModelAroundEncoder))]
    vars(model)["changed_modules"] = changed_modules  # which every step looks for
    return changed


def _has_known_head(around: ModelAroundEncoder) -> bool:
    """Whether a model is one of transformers' own with a head, whose code reads what :class:`Reads` says."""
    kind = stock_class(type(around))
    return "For" in kind.__name__ and kind.__module__.startswith("transformers.models.")


def _change_classes(encoder: _Encoder) -> None:
    module, family = encoder.module, encoder.family
    module.__class__ = derived_class(family.packed_encoder or UnpaddedEncoder, type(module))
    for inside in module.modules():
        if family.packed_attention is not None:
            if family.has("attention", type(inside)):
                inside.__class__ = derived_class(family.packed_attention, type(inside))
        elif "config" in vars(inside) and inside is not module and (eager := _eager_attention(type(inside))):
            inside.config = PackedAttentionConfig(inside.config, eager)


def _packing_of(encoder: _Encoder, pad_to_multiple_of: int | None, reads_padding: bool | None) -> Packing:
    """The packing rules of an encoder for the heads around it, in addition to the rules of an earlier call."""
    config, reads = encoder.direct_parents[0].config, {*encoder.heads.values()}
    before = vars(encoder.module)["packing"].rules if "packing" in vars(encoder.module) else RowRules()
    rules = RowRules(
        before.head_has_token_loss or bool(reads & {Reads.LABELLED_TOKENS, Reads.UNKNOWN}),
        before.head_reads_first_slot or not reads <= {Reads.LABELLED_TOKENS, Reads.REAL_TOKENS},
        encoder.family.max_width_with_holes(config),
    )
    return Packing(config, pad_to_multiple_of, rules, reads_padding, encoder.family.blocks)


def _eager_attention(kind: type[nn.Module]) -> Callable[..., Any] | None:
    """The function that a class of transformers calls for eager attention, which each family's file defines."""
    files = (vars(sys.modules[c.__module__]) for c in kind.__mro__ if c.__module__.startswith("transformers.models."))
    return next((names["eager_attention_forward"] for names in files if "eager_attention_forward" in names), None)


def restore_encoders(model: nn.Module) -> list[str]:
    """Restore transformers' encoders and the models around them, and return the names of the changed encoders."""
    names = []
    for name, encoder in list(model.named_modules()):
        vars(encoder).pop("changed_modules", None)
        if not isinstance(encoder, UnpaddedEncoder):
            continue
        family = family_of(type(encoder))
        packed_attention = None if family is None else family.packed_attention
        for module in encoder.modules():
            if packed_attention is not None and isinstance(module, packed_attention):
                restore_class(module)
            elif isinstance(config := vars(module).get("config"), PackedAttentionConfig):
                module.config = config.config
        _restore_class(encoder)
        names.append(name)
    for around in _models_around(model).values():
        if isinstance(around, ModelAroundEncoder):
            _restore_class(around)
    return names


def _restore_class(module: nn.Module) -> None:
    restore_class(module)
    for attribute in ("packing", "call_rules"):
        vars(module).pop(attribute, None)


def _models_around(model: nn.Module) -> dict[str, PreTrainedModel]:
    modules = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if isinstance(module, PreTrainedModel)}


def _find_encoders(model: nn.Module) -> dict[str, _Encoder]:
    """The encoders, by the first of their names."""
    around = _models_around(model)
    encoders: dict[str, _Encoder] = {}
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        family = family_of(type(module))
        if family is None or not (isinstance(module, UnpaddedEncoder) or family.has("encoder", type(module))):
            continue
        # outermost first; ModernBERT's encoder is itself the last one
        bases = [m for n, m in around.items() if m is module or n == "" or name.startswith(f"{n}.")]
        if not bases:
            raise ValueError(
                f"unpadding needs the model around an encoder, and {name or type(module).__name__} is only the "
                "encoder; pass the whole model"
            )
        first = names.setdefault(module, name)
        encoder = encoders.setdefault(first, _Encoder(module, family, [], []))
        for models, model_around in ((encoder.direct_parents, bases[-1]), (encoder.outermost_models, bases[0])):
            if model_around not in models:
                models.append(model_around)
    if not encoders:
        kinds = sorted({str(m.config.model_type) for m in around.values()}) or ["a model without transformers' modules"]
        raise ValueError(f"unpadding supports {family_titles()}, and this is {', '.join(kinds)}")
    return encoders


def _check(encoder: _Encoder) -> None:
    config, family = encoder.direct_parents[0].config, encoder.family
    for head, reads in encoder.heads.items():
        if reads in _REFUSED:
            raise ValueError(f"unpadding does not support {head}, {_REFUSED[reads]}")
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ValueError("unpadding does not support decoders, whose attention is causal or has a second input")
    if family.packed_attention is not None:
        kind, modules = family.packed_attention, [*encoder.module.modules()]
        known = [m for m in modules if isinstance(m, kind) or family.has("attention", type(m))]
        if len(known) != len(blocks_of(encoder.module)) or any("forward" in vars(module) for module in known):
            raise ValueError(
                f"unpadding does not support {family.title} with another attention than {family.attention}"
            )
    reason = family.refuses(encoder.module)
    if reason is not None:
        raise ValueError(f"unpadding does not support {family.title} with {reason}")
    if getattr(config, "position_embedding_type", None) not in (None, "absolute", "rotary"):
        kind = config.position_embedding_type
        raise ValueError(f"unpadding supports absolute and rotary positions, and these are {kind}")


class FirstCall:
    """Runs a transformers model's first call, and its first call with gradients, with and without packing; with
    ``"auto"``, only if it is not exactly its class's. A difference restores ``model``, in which it is ``name``."""

    def __init__(self, name: str, check: Check, model: nn.Module) -> None:
        self._name, self._model = name, model
        self._because = f"check={check!r}" if check == "always" else ""
        self._due = {False, True}  # without and with gradients

    def compare(self, module: nn.Module, inputs: dict[str, Any], names: Sequence[str]) -> None:
        """Compare a call, if that is due; ValueError if the results differ. See :class:`.CallRules`."""
        if torch.is_grad_enabled() in self._due and (self._because or not torch.compiler.is_dynamo_compiling()):
            self._compare(module, inputs, names)

    @run_eagerly(_COMPARED_EAGERLY)
    def _compare(self, module: nn.Module, inputs: dict[str, Any], names: Sequence[str]) -> None:
        self._because = self._because or next(iter(model_differences(module, self._name)), "")  # type: ignore[arg-type]
        due, self._due = self._due, set()  # the comparison calls the module too
        if not self._because:
            return

        def outcome() -> Any:
            given = {name: copy.copy(value) if isinstance(value, Mapping) else value for name, value in inputs.items()}
            return outcome_of(module, with_padding(given), names)

        with with_everything_packed():
            changed = outcome()
        with untouched(module):
            expected = outcome()
        difference = compare(expected, changed, _tolerance(module))
        if difference.beyond is not None:
            restore_encoders(self._model)
            raise ValueError(
                f"unpadding does not support this model: {difference.beyond} on the first batch ({self._because}); the "
                "model is restored; if the difference is intended, set check='never'"
            )
        self._due = due - {torch.is_grad_enabled(), False}


def _tolerance(module: nn.Module) -> Tolerance:
    """As :func:`tolerance_of`; a larger one in the autocast of the module's own ``forward``, as accelerate sets it."""
    device = next((p.device.type for p in module.parameters()), "cpu")
    return SIXTEEN_BITS if "forward" in vars(module) and torch.is_autocast_enabled(device) else tolerance_of(module)
