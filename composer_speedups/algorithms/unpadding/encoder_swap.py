"""Find a model's encoders, replace their class by one that runs unpadded, and restore it."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from composer_speedups.families.blocks import blocks_of
from composer_speedups.families.family import Reads, family_of, family_titles
from composer_speedups.families.labelled_head import (
    LabelledHead,
    MLMHead,
    check_labelled_head,
    install_labelled_head,
)
from composer_speedups.families.packed_attention import IMPLEMENTATION
from composer_speedups.families.packed_encoder import UnpaddedEncoder
from composer_speedups.surgery.module_classes import derived_class, stock_class

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


class _MaskHook:
    """A forward pre-hook of the model around an encoder.

    It passes the model's mask to the encoder, and whether hidden states were requested.
    """

    def __init__(self, base: PreTrainedModel, encoder: UnpaddedEncoder) -> None:
        self.encoder = encoder
        self._names = list(inspect.signature(type(base).forward).parameters)[1:]

    def keep(self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = {**dict(zip(self._names, args, strict=False)), **kwargs}
        mask, hidden_states = inputs.get("attention_mask"), inputs.get("output_hidden_states")
        self.encoder.call_mask = mask if isinstance(mask, Tensor) else None
        self.encoder.call_hidden_states = bool(
            self.encoder.model_config.output_hidden_states if hidden_states is None else hidden_states
        )


class _LabelsHook:
    """A forward pre-hook and a forward hook of the outermost model, which pass its labels to the encoder."""

    def __init__(self, encoder: UnpaddedEncoder) -> None:
        self.encoder = encoder

    def keep(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        labels = kwargs.get("labels")
        self.encoder.call_labels = labels if isinstance(labels, Tensor) and labels.ndim > 0 else None

    def forget(self, model: nn.Module, args: Any, output: Any) -> None:
        self.encoder.call_labels = None


def swap_encoders(
    model: nn.Module, pad_to_multiple_of: int, mlm_head: MLMHead = "all", owner: int | None = None
) -> list[str]:
    """Make every encoder in ``model`` run unpadded, and return the names of the newly changed ones.

    Args:
        model: The model; changed in place.
        pad_to_multiple_of, mlm_head: See :func:`apply_unpadding`.
        owner: See :class:`UnpaddedEncoder`. Encoders of another owner get this one.

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
        encoder, base, reads = each.encoder, each.bases[0], each.heads.values()
        if not isinstance(encoder, UnpaddedEncoder):
            family = family_of(type(encoder))
            assert family is not None
            encoder.__class__ = derived_class(family.packed_encoder or UnpaddedEncoder, type(encoder))
            if family.packed_attention is not None:
                for module in encoder.modules():
                    if family.has("attention", type(module)):
                        module.__class__ = derived_class(family.packed_attention, type(module))
            encoder.attention_before = base.config._attn_implementation or "eager"
            encoder.owner = owner
            for around in each.bases:
                if encoder is not around:
                    around.register_forward_pre_hook(_MaskHook(around, encoder).keep, with_kwargs=True)
            for outer in each.outer:
                if outer not in each.bases:
                    labels = _LabelsHook(encoder)
                    outer.register_forward_pre_hook(labels.keep, with_kwargs=True)
                    outer.register_forward_hook(labels.forget, always_call=True)
            changed.append(name)
        elif encoder.owner is not None:
            encoder.owner = owner
        for around in each.bases:
            if not _has_own_attention(encoder):
                around.set_attn_implementation(IMPLEMENTATION)
        for outer in each.outer:
            if mlm_head == "labelled":
                install_labelled_head(outer, encoder)
            else:
                _remove_hooks(outer, encoder, LabelledHead)
                _remove_hooks(outer.base_model, encoder, LabelledHead)
        encoder.model_config = base.config
        encoder.by_token = Reads.LABELLED_TOKENS in reads
        encoder.pad_to_multiple_of = pad_to_multiple_of
        encoder.reads_first = not {*reads} <= {Reads.LABELLED_TOKENS, Reads.REAL_TOKENS}
    return changed


def restore_encoders(model: nn.Module, owner: int | None = None) -> list[str]:
    """Restore transformers' encoders and their previous attention, and return the names of the changed encoders.

    Args:
        model: The model; changed in place.
        owner: Restore only the encoders of this owner; None restores all.
    """
    around = _around(model)
    names = []
    for name, encoder in list(model.named_modules()):
        if not isinstance(encoder, UnpaddedEncoder) or (owner is not None and encoder.owner != owner):
            continue
        for path, module in model.named_modules(remove_duplicate=False):
            base = _bases(around, path, module)[-1] if module is encoder else None
            if base is not None and base.config._attn_implementation == IMPLEMENTATION:
                base.set_attn_implementation(encoder.attention_before)
        for outer in around.values():
            _remove_hooks(outer, encoder, _MaskHook, _LabelsHook, LabelledHead)
        for module in encoder.modules():
            if _is_packed_attention(module):
                module.__class__ = stock_class(type(module))  # type: ignore[assignment]
        encoder.__class__ = stock_class(type(encoder))  # type: ignore[assignment]
        for attribute in UnpaddedEncoder.__annotations__:
            vars(encoder).pop(attribute, None)
        names.append(name)
    return names


def _remove_hooks(model: nn.Module, encoder: UnpaddedEncoder, *kinds: type[Any]) -> None:
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for handle, hook in list(hooks.items()):
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, kinds) and owner.encoder is encoder:
                del hooks[handle]
                for flags in ("_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"):
                    getattr(model, flags).pop(handle, None)


def _has_own_attention(encoder: nn.Module) -> bool:
    family = family_of(type(encoder))
    return family is not None and family.packed_attention is not None


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
