"""Fuse the layers of an unpadded model, undo that, and save and load the scales of 8-bit layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from composer_speedups.algorithms.fused_layers.modules import WITHOUT_ADAPTERS, FusedEmbeddings, FusedLayer
from composer_speedups.core.stock import (
    built_on_meta,
    differences,
    hooks_on,
    is_adapted,
    model_differences,
    outermost_models,
)
from composer_speedups.families.blocks import blocks_of
from composer_speedups.families.family import Block, Reads, config_value, family_of, family_titles
from composer_speedups.packing.call import ModelAroundEncoder, models_around_encoders
from composer_speedups.packing.derived_classes import derived_class, restore_class, stock_class
from composer_speedups.packing.encoder import UnpaddedEncoder, unpadded_encoders

_HEAD_SIZES = (16, 32, 64, 128)

LastLayer = Literal["needed", "all"]
Precision = Literal["bf16", "fp8"]
Gelu = Literal["exact", "tanh", "auto"]
_EPILOGUE_MIN_WIDTH = 768  # at 384, GELU in products' epilogues saves nothing (docs/results.md, small models)
_TANH = ("gelu_new", "gelu_pytorch_tanh")  # transformers' names of GELU's tanh form


def fuse(
    model: nn.Module,
    last_layer: LastLayer = "needed",
    precision: Precision = "bf16",
    fp8_min_width: int = 0,
    gelu: Gelu = "exact",
) -> None:
    """Make the encoder layers of an unpadded model compute with fused kernels.

    Parameters may be frozen, and Linears may have PEFT's LoRA adapters. With ``precision="fp8"``, layers whose hidden
    size is below ``fp8_min_width`` compute in bf16. ``gelu="tanh"`` computes the tanh form of GELU in every layer,
    ``gelu="auto"`` in the layers that do so faster: on a GPU, in 16 bits, without adapters, of at least 768 units.

    Raises:
        ValueError: The model has no unpadded encoder, or a layer that is not exactly what transformers builds from the
            model's configuration, or of a kind or width without fused kernels.
            Nothing is changed.
    """
    encoders = unpadded_encoders(model)
    if not encoders:
        raise ValueError("fused_layers needs packed tokens, and the model has no unpadded encoder; add unpadding")
    configs = {id(layer): encoder.packing.config for encoder in encoders for layer in _layers_of(encoder)}
    layers: dict[str, Any] = {name: layer for name, layer in model.named_modules() if id(layer) in configs}
    built: dict[Any, nn.Module] = {}
    fresh = {name: layer for name, layer in layers.items() if not isinstance(layer, FusedLayer)}
    for name, layer in fresh.items():
        config = configs[id(layer)]
        reason = _unsupported(config, layer, precision, fp8_min_width, tanh=_is_tanh(config, gelu))
        if reason := reason or _why_not(layer, name, config, built):
            raise ValueError(f"fused_layers cannot fuse every layer: {reason}")
    embeddings = [*_embeddings(model)]
    for module in fresh.values():
        module.__class__ = derived_class(FusedLayer, type(module))
    for module in embeddings:
        module.__class__ = derived_class(FusedEmbeddings, type(module))
    # A layer may be both: some models use one layer at several positions.
    inner = {id(layer) for encoder in encoders for layer in [*blocks_of(encoder)][:-1]}
    for layer in layers.values():
        runs_once = not layer.family.inner_layer
        layer.is_last, layer.precision = runs_once and id(layer) not in inner, precision
        if precision == "fp8" and layer.hidden_size < fp8_min_width:
            layer.precision = "bf16"
        layer.approximate = "tanh" if _is_tanh(configs[id(layer)], gelu) else "none"
        layer.has_epilogues = layer.approximate == "tanh" or (gelu == "auto" and _is_faster_by_epilogues(layer))
        if layer.precision == "fp8" and "float8_scales" not in layer._buffers:
            layer.register_buffer("float8_scales", _new_scales(layer), persistent=False)
    _choose_tokens(model, last_layer)


def unfuse(model: nn.Module) -> None:
    """Restore the classes of layers and embeddings."""
    for module in model.modules():
        if isinstance(module, FusedLayer | FusedEmbeddings):
            restore_class(module)
            for attribute in ("precision", "approximate", "has_epilogues", "is_last"):
                vars(module).pop(attribute, None)
            if "float8_scales" in module._buffers:
                del module.float8_scales
    for around in models_around_encoders(model):
        around.call_rules.first_tokens_only = False


def _embeddings(model: nn.Module) -> Iterator[nn.Module]:
    """The embeddings that are exactly transformers' and not fused yet."""
    for name, module in model.named_modules():
        family = family_of(type(module))
        if family is not None and family.has_berts_layers and family.has("embeddings", type(module)):
            models = ((outer, m) for outer, m in model.named_modules() if isinstance(m, PreTrainedModel))
            around = [m for outer, m in models if outer == "" or name.startswith(f"{outer}.")]
            if _why_not(module, name, around[-1].config, {}) is None:
                yield module


def _choose_tokens(model: nn.Module, last_layer: LastLayer) -> None:
    """Compute only each row's first token in the last layer of every model whose head reads no others.

    That is sufficient if only transformers' own classification head reads the output and the call comes through it.
    """
    for name, outer in outermost_models(model).items():
        encoders, family = unpadded_encoders(outer), family_of(type(outer))
        if len(encoders) != 1 or family is None or not isinstance(outer, ModelAroundEncoder):
            continue
        blocks, reads = blocks_of(encoders[0]), family.reads(type(outer).__name__, outer.config)
        # Hooks of the last layer could read its output; the other layers do not have it.
        read_by_others = [*hooks_on(blocks[-1], "", ours=True), *hooks_on(blocks, "", ours=True)]
        outer.call_rules.first_tokens_only = (
            last_layer == "needed"
            and reads is Reads.FIRST_TOKEN
            and isinstance(blocks[-1], FusedLayer)
            and not read_by_others
            and not model_differences(outer, name, skip=[blocks])
        )
        around = {*outer.modules()} - {outer, *blocks.modules()}
        every = (hooks for module in around for hooks in (module._forward_hooks, module._forward_pre_hooks))
        outer.call_rules.hooks = tuple(hooks for hooks in every if not hooks)  # those that are there were judged above


def float8_scales(model: nn.Module) -> dict[str, list[list[int]]]:
    """The scales of a model's 8-bit layers by name, a row of numbers for each operand. Synchronizes."""
    return {name: layer.float8_scales.tolist() for name, layer in _float8_layers(model).items()}


def load_float8_scales(model: nn.Module, scales: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Load scales that :func:`float8_scales` returned; ValueError if the model has other 8-bit layers."""
    layers = _float8_layers(model)
    if layers.keys() != scales.keys():
        unmatched = ", ".join(sorted(layers.keys() ^ scales.keys()))
        raise ValueError(f"the scales and the model have different 8-bit layers: {unmatched}")
    for name, layer in layers.items():
        layer.float8_scales.copy_(torch.tensor(scales[name], dtype=torch.int32).view_as(layer.float8_scales))


def _float8_layers(model: nn.Module) -> dict[str, FusedLayer]:
    modules = model.named_modules()
    return {name: m for name, m in modules if isinstance(m, FusedLayer) and m.precision == "fp8"}


def _new_scales(layer: FusedLayer) -> torch.Tensor:
    from composer_speedups.algorithms.fused_layers.layer import OPERANDS  # imports Triton
    from composer_speedups.kernels.float8 import new_scales

    return new_scales(len(OPERANDS), next(layer.parameters()).device)


def _layers_of(encoder: UnpaddedEncoder) -> list[nn.Module]:
    """An encoder's blocks, or the layers in blocks that run several times."""
    blocks, family = [*blocks_of(encoder)], family_of(type(encoder))
    if family is None or not family.inner_layer:
        return blocks
    return [m for block in blocks for m in block.modules() if family.has("inner_layer", stock_class(type(m)))]


def _is_tanh(config: Any, gelu: Gelu) -> bool:
    return gelu == "tanh" or config_value(config, "activation") in _TANH


def _is_faster_by_epilogues(layer: FusedLayer) -> bool:
    supported = layer.precision != "fp8" and layer.family.block not in WITHOUT_ADAPTERS
    return supported and layer.hidden_size >= _EPILOGUE_MIN_WIDTH and not any(map(is_adapted, layer.modules()))


def _unsupported(config: Any, layer: nn.Module, precision: Precision, fp8_min_width: int, *, tanh: bool) -> str | None:
    """Why a kind of layer has no fused kernels; None if it has."""
    family = family_of(type(layer))
    role = "inner_layer" if family is not None and family.inner_layer else "layer"
    if family is None or family.block is None or not family.has(role, type(layer)):
        known = family_titles(lambda family: family.block)
        return f"it supports the layers of {known}, and this model's are {type(layer).__name__}"
    activation = config_value(config, "activation", "gelu")
    if activation not in ("gelu", *_TANH):
        return f"it supports GELU, and this model's activation is {activation!r}"
    if tanh and (precision == "fp8" or family.block in WITHOUT_ADAPTERS):
        where = "with precision='fp8'" if precision == "fp8" else f"in {type(layer).__name__}"
        return f"it supports the exact GELU {where}, not the tanh form"
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size not in _HEAD_SIZES:
        return f"it supports heads of {', '.join(map(str, _HEAD_SIZES))} units, and these have {size}"
    if family.block is Block.GATED and any(name.endswith("bias") for name, _ in layer.named_parameters()):
        return f"it supports {type(layer).__name__} without biases, and this one has some"
    if family.block in WITHOUT_ADAPTERS and any(map(is_adapted, layer.modules())):
        return f"it supports adapters in BERT's layers and similar ones, not in {type(layer).__name__}"
    if precision == "fp8":
        # a scale follows the magnitudes of one place in the model
        if family.inner_layer or not family.has_berts_layers:
            return f"precision='fp8' supports BERT's layers and similar ones, not {type(layer).__name__}"
        assert family.layer_modules is not None
        up = family.layer_modules(layer).up
        if up.in_features >= fp8_min_width and (up.in_features % 16 or up.out_features % 16):
            widths = f"{up.in_features} and {up.out_features}"
            return f"precision='fp8' needs widths that are multiples of 16, and the layers have {widths} units"
    return None


def _why_not(module: nn.Module, name: str, config: Any, built: dict[Any, nn.Module]) -> str | None:
    """The first difference of a layer or of embeddings from what transformers builds, which ``built`` caches."""
    # ModernBERT's layers differ by their index.
    index = {name: value for name, value in vars(module).items() if name == "layer_idx"}
    kind = (type(module), id(config), *index.values())
    if kind not in built:
        built[kind] = built_on_meta(type(module), config, **index)
        family = family_of(type(module))
        if family is not None and family.packed_attention is not None:  # unpadding changed the layer's attention
            for inner in built[kind].modules():
                if family.has("attention", type(inner)):
                    inner.__class__ = derived_class(family.packed_attention, type(inner))
    return next(differences(module, built[kind], name, around=True), None)
