"""Fuse the layers of an unpadded model, undo that, and save and load the scales of 8-bit layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from composer_speedups.algorithms.fused_layers.first_tokens import compute_all_tokens, compute_first_tokens
from composer_speedups.algorithms.fused_layers.modules import (
    FusedBiasedLayer,
    FusedDisentangledLayer,
    FusedEmbeddings,
    FusedGatedLayer,
    FusedLayer,
    FusedPreNormLayer,
    FusedRotaryLayer,
)
from composer_speedups.core.adapters import is_adapted
from composer_speedups.core.requirements import needs_triton, unsuitable_device
from composer_speedups.core.stock import Untouched, built_on_meta, differences
from composer_speedups.families.blocks import blocks_of
from composer_speedups.families.family import config_value, family_of, family_titles
from composer_speedups.packing.derived_classes import derived_class, restore_class, stock_class
from composer_speedups.packing.encoder import UnpaddedEncoder, unpadded_encoders

__all__ = ["float8_scales", "fuse", "load_float8_scales", "unfuse", "unfused_layers"]
_HEAD_SIZES = (16, 32, 64, 128)
_NO_ADAPTERS = "fused_layers supports adapters in BERT's layers and similar ones, not in {}"
_FLOAT8_CAPABILITY = (8, 9)  # compute capability of torch._scaled_mm

LastLayer = Literal["needed", "all"]
Precision = Literal["autocast", "fp8"]


def fuse(model: nn.Module, last_layer: LastLayer, precision: Precision, owner: int | None = None) -> list[str]:
    """Make the encoder layers of an unpadded model compute with fused kernels, and return the changed names.

    A layer is fused only if it is exactly what transformers builds from the model's configuration, with or without
    PEFT's LoRA adapters on its Linears. A layer with any difference runs its own forward on the packed tokens.

    Raises:
        ValueError: The model has no unpadded encoder or no supported layer, or cannot compute with this precision.
    """
    if last_layer not in ("needed", "all"):
        raise ValueError(f"last_layer must be 'needed' or 'all', not {last_layer!r}")
    if precision not in ("autocast", "fp8"):
        raise ValueError(f"precision must be 'autocast' or 'fp8', not {precision!r}")
    encoders = unpadded_encoders(model)
    if not encoders:
        raise ValueError("fused_layers needs packed tokens, and the model has no unpadded encoder; add unpadding")
    layers = _layers(model)
    fused = [layer for layer in layers.values() if isinstance(layer, FusedLayer)]
    for layer in fused:
        applied = {"last_layer": layer.last_layer, "precision": layer.precision}
        if applied != {"last_layer": last_layer, "precision": precision}:
            raise ValueError(f"the model already has fused layers with {applied}; build a new model")
    reasons = unfused_layers(model)
    if not fused and len(reasons) == len(layers):
        raise ValueError(f"fused_layers cannot fuse any layer: {next(iter(reasons.values()))}")
    if precision == "fp8":
        check_float8(layers.values())
    if _on_gpu(layers.values()):
        for missing in needs_triton("fused_layers"):
            raise missing
    for name, layer in layers.items():
        if name in reasons and isinstance(layer, FusedLayer) and not _why_not(layer, name, _config_around(model, name)):
            layer.untouched = Untouched.inside(layer)  # it has got adapters since, or lost them
    mixins = _new_mixins(model, layers.keys() - reasons.keys())
    for name, mixin in mixins.items():
        module: Any = model.get_submodule(name)
        module.untouched = Untouched.inside(module)
        module.__class__ = derived_class(mixin, type(module))
    for name, module in model.named_modules():
        if name in mixins or (isinstance(module, FusedLayer | FusedEmbeddings) and module.owner is not None):
            module.owner = owner
    # A layer may be both: some models use one layer at several positions.
    inner = {id(layer) for encoder in encoders for layer in [*blocks_of(encoder)][:-1]}
    for layer in layers.values():
        if isinstance(layer, FusedLayer):
            layer.is_last, layer.last_layer, layer.precision = id(layer) not in inner, last_layer, precision
            if family_of(type(layer)).inner_layer:  # type: ignore[union-attr]
                layer.is_last = False  # it runs several times
            if precision == "fp8" and "float8_scales" not in layer._buffers:
                layer.register_buffer("float8_scales", _new_scales(layer), persistent=False)
    if last_layer == "needed":
        compute_first_tokens(model)
    return [*mixins]


def _new_mixins(model: nn.Module, layers: Collection[str]) -> dict[str, type[FusedLayer | FusedEmbeddings]]:
    """Return the mixins for ``layers`` and for embeddings that are exactly transformers', by name, without those that
    already are fused."""
    mixins: dict[str, type[FusedLayer | FusedEmbeddings]] = {}
    for name, module in model.named_modules():
        if name in layers and _has_role("layer", module):
            mixins[name] = _layer_mixin(module)
        elif _has_role("embeddings", module) and not _why_not(module, name, _config_around(model, name)):
            mixins[name] = FusedEmbeddings
    return mixins


def unfuse(model: nn.Module, owner: int | None = None) -> list[str]:
    """Restore the stock class of fused layers and embeddings, and return their names."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, FusedLayer | FusedEmbeddings) and owner in (None, module.owner):
            restore_class(module)
            for attribute in ("untouched", "last_layer", "precision", "is_last", "owner", "ran"):
                vars(module).pop(attribute, None)
            if "float8_scales" in module._buffers:
                del module.float8_scales
            names.append(name)
    if not any(isinstance(module, FusedLayer) for module in model.modules()):
        compute_all_tokens(model)
    return names


def float8_scales(model: nn.Module) -> dict[str, list[list[int]]]:
    """Return the scales of a model's 8-bit layers, to be saved in addition to its state dict. Synchronizes.

    Returns:
        A row of numbers for each operand, by name of each layer with 8-bit matmuls.
    """
    return {name: layer.float8_scales.tolist() for name, layer in _float8_layers(model).items()}


def load_float8_scales(model: nn.Module, scales: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Load scales that :func:`float8_scales` returned.

    Raises:
        ValueError: The scales do not match the model.
    """
    layers = _float8_layers(model)
    if layers.keys() != scales.keys():
        odd = ", ".join(sorted(layers.keys() ^ scales.keys()))
        raise ValueError(f"the scales and the model have different 8-bit layers: {odd}")
    for name, layer in layers.items():
        held = layer.float8_scales
        rows = scales[name]
        if (len(rows), {len(row) for row in rows}) != (held.shape[0], {held.shape[1]}):
            raise ValueError(f"{name}'s scales are not {held.shape[0]} rows of {held.shape[1]}")
        if not all(0 <= number < 2**31 for row in rows for number in row):
            raise ValueError(f"{name}'s scales are not the bits of positive numbers")
        held.copy_(torch.tensor(rows, dtype=torch.int32))


def _float8_layers(model: nn.Module) -> dict[str, FusedLayer]:
    modules = model.named_modules()
    return {name: m for name, m in modules if isinstance(m, FusedLayer) and m.precision == "fp8"}


def _on_gpu(layers: Iterable[nn.Module]) -> bool:
    return any(parameter.is_cuda for layer in layers for parameter in layer.parameters())


def check_float8(layers: Iterable[Any]) -> None:
    """Check that the layers can compute with 8-bit matmuls.

    Raises:
        ValueError: An unsupported kind of layer, device or width.
    """
    for layer in layers:
        family = family_of(type(layer))
        # a scale follows the magnitudes of one place in the model
        if family is not None and (family.inner_layer or not family.has_berts_layers):
            raise ValueError(f"precision='fp8' supports BERT's layers and similar ones, not {type(layer).__name__}")
        reason = unsuitable_device(next(layer.parameters()).device, "precision='fp8'", _FLOAT8_CAPABILITY)
        if reason is not None:
            raise ValueError(reason)
        if family is not None and family.layer_modules is not None:
            up = family.layer_modules(layer).up
            if up.in_features % 16 or up.out_features % 16:
                raise ValueError(
                    f"precision='fp8' needs widths that are multiples of 16, and the layers have {up.in_features} and "
                    f"{up.out_features} units"
                )


def _new_scales(layer: FusedLayer) -> Tensor:
    from composer_speedups.algorithms.fused_layers.float8_layer import OPERANDS  # imports Triton
    from composer_speedups.kernels.float8 import new_scales

    return new_scales(len(OPERANDS), next(layer.parameters()).device)


def unfused_layers(model: nn.Module) -> dict[str, str]:
    """Return why layers of a model's unpadded encoders are not fused or no longer run fused, by name."""
    encoders = {id(layer): encoder for encoder in unpadded_encoders(model) for layer in _layers_of(encoder)}
    reasons, built = {}, dict[Any, nn.Module]()
    for name, layer in _layers(model).items():
        config = encoders[id(layer)].packing.config
        if isinstance(layer, FusedLayer):
            changed = not layer.untouched.is_unchanged() or layer.refused_adapter() is not None
            reason = (_why_not(layer, name, config, built) or f"{name} was changed") if changed else None
        else:
            reason = _unsupported(config, layer) or _why_not(layer, name, config, built)
        if reason:
            reasons[name] = reason
    return reasons


def _layers(model: nn.Module) -> dict[str, Any]:
    wanted = {id(layer) for encoder in unpadded_encoders(model) for layer in _layers_of(encoder)}
    return {name: module for name, module in model.named_modules() if id(module) in wanted}


def _layers_of(encoder: UnpaddedEncoder) -> list[nn.Module]:
    """Return an encoder's blocks, or the layers in blocks that run several times."""
    blocks, family = [*blocks_of(encoder)], family_of(type(encoder))
    if family is None or not family.inner_layer:
        return blocks
    return [module for block in blocks for module in block.modules() if family.has("inner_layer", _stock(module))]


def _stock(module: nn.Module) -> type[nn.Module]:
    return stock_class(type(module))


def _has_role(role: str, module: nn.Module) -> bool:
    """Return whether a module is a layer, or embeddings, of a family that the kernels support."""
    family = family_of(type(module))
    if family is None or family.layer_modules is None:
        return False
    if role == "embeddings" and not family.has_berts_layers:
        return False
    return family.has("inner_layer" if role == "layer" and family.inner_layer else role, type(module))


def _layer_mixin(layer: nn.Module) -> type[FusedLayer]:
    family = family_of(type(layer))
    assert family is not None
    if family.position_table is not None:
        return FusedDisentangledLayer
    if family.pre_norm:
        return FusedPreNormLayer
    if family.position_bias:
        return FusedBiasedLayer
    if family.rotary:
        return FusedRotaryLayer
    return FusedGatedLayer if family.gated else FusedLayer


def _unsupported(config: Any, layer: nn.Module) -> str | None:
    if not _has_role("layer", layer):
        known = family_titles(lambda family: family.layer_modules)
        return f"fused_layers supports the layers of {known}, and this model's are {type(layer).__name__}"
    activation = config_value(config, "activation", "gelu")
    if activation != "gelu":
        return f"fused_layers supports the exact GELU, and this model's activation is {activation!r}"
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size not in _HEAD_SIZES:
        return f"fused_layers supports heads of {', '.join(map(str, _HEAD_SIZES))} units, and these have {size}"
    family = family_of(type(layer))
    if family is not None and (family.gated or family.pre_norm):
        if family.gated and any(name.endswith("bias") for name, _ in layer.named_parameters()):
            return f"fused_layers supports {type(layer).__name__} without biases, and this one has some"
        if any(map(is_adapted, layer.modules())):
            return _NO_ADAPTERS.format(type(layer).__name__)
    return None


def _why_not(module: nn.Module, name: str, config: Any, built: dict[Any, nn.Module] | None = None) -> str | None:
    """Return the first difference of a layer or of embeddings from what transformers builds; None without any.

    ``built`` caches the modules built for the comparison, for further modules of the class.
    """
    if isinstance(module, FusedGatedLayer | FusedPreNormLayer) and any(map(is_adapted, module.modules())):
        return _NO_ADAPTERS.format(stock_class(type(module)).__name__)
    built = {} if built is None else built
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


def _config_around(model: nn.Module, name: str) -> Any:
    """Return the config of the innermost transformers model around a module."""
    models = ((outer, module) for outer, module in model.named_modules() if isinstance(module, PreTrainedModel))
    around = [module for outer, module in models if outer == "" or name.startswith(f"{outer}.")]
    return around[-1].config
