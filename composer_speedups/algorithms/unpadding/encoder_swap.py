"""Find a model's encoders, replace their class by one that runs unpadded, and restore it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from composer_speedups.families.blocks import blocks_of
from composer_speedups.families.family import Reads, family_of, family_titles
from composer_speedups.packing.attention import PackedAttentionConfig
from composer_speedups.packing.call import ModelAroundEncoder
from composer_speedups.packing.derived_classes import derived_class, stock_class
from composer_speedups.packing.encoder import PaddingReader, UnpaddedEncoder, unpadded_encoders
from composer_speedups.packing.labelled_head import (
    LabelledHead,
    MLMHead,
    check_labelled_head,
)

_REFUSED = {
    Reads.PADDING: "whose loss includes padding positions",
    Reads.DECODER: "which is a decoder",
}


class _Found(NamedTuple):
    encoder: Any
    bases: list[PreTrainedModel]  # the models directly around the encoder; ModernBERT's encoder is itself one
    outer: list[PreTrainedModel]  # the outermost models; several heads may share an encoder

    @property
    def heads(self) -> dict[str, Reads]:
        """Map the class name of each outermost model to what it reads of the encoder's result."""
        family = family_of(type(self.encoder))
        assert family is not None
        config = self.bases[0].config
        return {name: family.reads(name, config) for name in (type(model).__name__ for model in self.outer)}


def swap_encoders(
    model: nn.Module,
    pad_to_multiple_of: int,
    mlm_head: MLMHead = "all",
    owner: int | None = None,
    *,
    observe: bool = False,
    guard: bool = False,
) -> list[str]:
    """Make every encoder in ``model`` run unpadded, and return the names of the newly changed ones.

    Args:
        model: The model; changed in place.
        pad_to_multiple_of, mlm_head: See :func:`apply_unpadding`.
        owner: See :class:`UnpaddedEncoder`. Encoders of another owner get this one.
        observe: Whether the code that reads the model's outputs is unknown, so that gradients must show whether it
            reads padding.
        guard: Whether that code is unknown, but was compared with the untouched model: batches are packed at once, and
            a gradient at padding is an error.

    Raises:
        ValueError: The model has no encoder, one that cannot run unpadded, or a head that does not support
            ``mlm_head``. Nothing is changed.
    """
    found = _find(model)
    for each in found.values():
        _check(each)
        if mlm_head == "labelled":
            for outer in each.outer:
                check_labelled_head(outer)
    changed = []
    for name, each in found.items():
        encoder: Any
        encoder, base, reads = each.encoder, each.bases[0], {*each.heads.values()}
        shared = isinstance(encoder, UnpaddedEncoder)  # perhaps with the head of an earlier call
        if not shared:
            _change_classes(encoder)
            encoder.owner = owner
            changed.append(name)
        elif encoder.owner is not None:
            encoder.owner = owner
        encoder.model_config = base.config
        by_token, reads_first = (encoder.by_token, encoder.reads_first) if shared else (False, False)
        encoder.by_token = by_token or bool(reads & {Reads.LABELLED_TOKENS, Reads.UNKNOWN})
        encoder.pad_to_multiple_of = pad_to_multiple_of
        encoder.reads_first = reads_first or not reads <= {Reads.LABELLED_TOKENS, Reads.REAL_TOKENS}
        if (observe or guard) and encoder.padding_reader is None:
            encoder.padding_reader = PaddingReader(reads=None if observe else False)
    encoders = {id(each.encoder) for each in found.values()}
    reads_real_tokens = getattr(model, "reads_real_tokens", False)  # as this package's tasks do
    around: Any
    for around in _around(model).values():
        paths = tuple(name for name, module in around.named_modules() if id(module) in encoders)
        if not paths:
            continue
        if not isinstance(around, ModelAroundEncoder):
            around.__class__ = derived_class(ModelAroundEncoder, type(around))
        around.encoder_paths = paths
        around.around_directly = any(around is base for each in found.values() for base in each.bases)
        around.unknown_reader = (observe or guard) and not _has_known_head(around) and not reads_real_tokens
        is_outermost = any(around is outer for each in found.values() for outer in each.outer)
        labelled = mlm_head == "labelled" and is_outermost
        around.labelled_head = around.labelled_head or LabelledHead(pad_to_multiple_of) if labelled else None
    return changed


def _has_known_head(around: ModelAroundEncoder) -> bool:
    """Whether a model is one of transformers' own with a head, whose code reads what :class:`Reads` says."""
    kind = stock_class(type(around))
    return "For" in kind.__name__ and kind.__module__.startswith("transformers.models.")


def _change_classes(encoder: Any) -> None:
    family = family_of(type(encoder))
    assert family is not None
    encoder.__class__ = derived_class(family.packed_encoder or UnpaddedEncoder, type(encoder))
    for module in encoder.modules():
        if family.packed_attention is not None:
            if family.has("attention", type(module)):
                module.__class__ = derived_class(family.packed_attention, type(module))
        elif "config" in vars(module) and module is not encoder and (eager := _eager_attention(type(module))):
            module.config = PackedAttentionConfig(module.config, eager)


def _eager_attention(kind: type[nn.Module]) -> Callable[..., Any] | None:
    """The function that a class of transformers calls for eager attention, which each family's file defines."""
    files = (vars(sys.modules[c.__module__]) for c in kind.__mro__ if c.__module__.startswith("transformers.models."))
    return next((names["eager_attention_forward"] for names in files if "eager_attention_forward" in names), None)


def restore_encoders(model: nn.Module, owner: int | None = None) -> list[str]:
    """Restore transformers' encoders and the models around them, and return the names of the changed encoders.

    Args:
        model: The model; changed in place.
        owner: Restore only the encoders of this owner; None restores all.
    """
    names = []
    for name, encoder in list(model.named_modules()):
        if not isinstance(encoder, UnpaddedEncoder) or (owner is not None and encoder.owner != owner):
            continue
        for module in encoder.modules():
            if _is_packed_attention(module):
                module.__class__ = stock_class(type(module))  # type: ignore[assignment]
            elif isinstance(config := vars(module).get("config"), PackedAttentionConfig):
                module.config = config.config
        _restore_class(encoder)
        names.append(name)
    for around in _around(model).values():
        if isinstance(around, ModelAroundEncoder) and not unpadded_encoders(around):
            _restore_class(around)
    return names


def _restore_class(module: nn.Module) -> None:
    module.__class__ = stock_class(type(module))  # type: ignore[assignment]
    for attribute in (*UnpaddedEncoder.__annotations__, *ModelAroundEncoder.__annotations__):
        vars(module).pop(attribute, None)


def _is_packed_attention(module: nn.Module) -> bool:
    family = family_of(type(module))
    kind = None if family is None else family.packed_attention
    return kind is not None and isinstance(module, kind)


def _around(model: nn.Module) -> dict[str, PreTrainedModel]:
    modules = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if isinstance(module, PreTrainedModel)}


def _bases(around: dict[str, PreTrainedModel], name: str, encoder: nn.Module) -> list[PreTrainedModel]:
    """Return the models around an encoder, outermost first; ModernBERT's encoder is itself the last one."""
    return [m for n, m in around.items() if m is encoder or n == "" or name.startswith(f"{n}.")]


def _find(model: nn.Module) -> dict[str, _Found]:
    around = _around(model)
    found: dict[str, _Found] = {}
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        family = family_of(type(module))
        if isinstance(module, UnpaddedEncoder) or (family is not None and family.has("encoder", type(module))):
            bases = _bases(around, name, module)
            if not bases:
                raise ValueError(
                    f"unpadding needs the model around an encoder, and {name or type(module).__name__} is only the "
                    "encoder; pass the whole model"
                )
            first = names.setdefault(module, name)
            each = found.setdefault(first, _Found(module, [], []))
            for models, model_around in ((each.bases, bases[-1]), (each.outer, bases[0])):
                if model_around not in models:
                    models.append(model_around)
    if not found:
        kinds = sorted({str(m.config.model_type) for m in around.values()}) or ["a model without transformers' modules"]
        raise ValueError(f"unpadding supports {family_titles()}, and this is {', '.join(kinds)}")
    return found


def _check(found: _Found) -> None:
    config = found.bases[0].config
    for head, reads in found.heads.items():
        if reads in _REFUSED:
            raise ValueError(f"unpadding does not support {head}, {_REFUSED[reads]}")
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ValueError("unpadding does not support decoders, whose attention is causal or has a second input")
    family = family_of(type(found.encoder))
    if family is not None and family.packed_attention is not None:
        kind, modules = family.packed_attention, [*found.encoder.modules()]
        known = [m for m in modules if isinstance(m, kind) or family.has("attention", type(m))]
        if len(known) != len(blocks_of(found.encoder)) or any("forward" in vars(module) for module in known):
            raise ValueError(
                f"unpadding does not support {family.title} with another attention than {family.attention}"
            )
    reason = None if family is None else family.refuses(found.encoder)
    if family is not None and reason is not None:
        raise ValueError(f"unpadding does not support {family.title} with {reason}")
    if getattr(config, "chunk_size_feed_forward", 0):
        raise ValueError("unpadding needs chunk_size_feed_forward=0: chunks need a fixed number of tokens")
    if getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        raise ValueError(f"unpadding supports absolute positions, and these are {config.position_embedding_type}")
