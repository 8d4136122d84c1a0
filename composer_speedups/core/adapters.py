"""Read PEFT's LoRA layers: what an adapter adds to its Linear, and which adapters add something else.

PEFT is not imported: its classes are recognized by name, as families recognize those of transformers.

Shapes: T tokens, I inputs and O outputs of a Linear, R the adapter's rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_LORA = ("peft.tuners.lora.layer", "Linear")
_TRAINED_COPY = ("peft.utils.other", "ModulesToSaveWrapper")


class Adapter(NamedTuple):
    """A LoRA adapter. It adds scale · B · A · dropout(x) to the Linear's result."""

    a: Tensor  # (R, I)
    b: Tensor  # (O, R)
    scale: float  # alpha / rank
    dropout: float  # probability that applies now: 0 in eval mode


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is PEFT's LoRA layer around a Linear."""
    return _is(module, _LORA)


def adapter_of(module: Any) -> Adapter | None:
    """The active adapter of a Linear without :func:`adapter_refusal`; None if there is none, or it is merged."""
    if not is_adapted(module) or module.disable_adapters or module.merged:
        return None
    name = next((name for name in module.active_adapters if name in module.lora_A), None)
    if name is None:
        return None
    dropout = module.lora_dropout[name]
    rate = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
    return Adapter(module.lora_A[name].weight, module.lora_B[name].weight, float(module.scaling[name]), rate)


def adapter_refusal(module: Any) -> str | None:
    """Why a LoRA layer does not compute as :class:`Adapter` says; None if it does, and for other modules."""
    if not is_adapted(module) or (module.disable_adapters and not module.merged):
        return None
    names = [name for name in module.active_adapters if name in module.lora_A]
    if module.disable_adapters or len(names) > 1 or not all(_is_plain(module, name) for name in names):
        return "has adapters other than one plain LoRA adapter"
    return None


def _is_plain(module: Any, name: str) -> bool:
    a, b, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
    known = type(a) is type(b) is nn.Linear and type(dropout) in (nn.Dropout, nn.Identity)
    other = name in module.lora_variant or module.fan_in_fan_out  # DoRA and others; transposed weights
    return known and a.bias is None and b.bias is None and not other


def merged_weight(weight: Tensor, adapter: Adapter | None) -> Tensor:
    """The weight that a Linear (O, I) and an adapter without dropout have together, in the weight's dtype."""
    if adapter is None or adapter.dropout > 0:
        return weight
    with torch.autocast(weight.device.type, enabled=False):  # which would round the sum to 16 bits
        return torch.addmm(weight, adapter.b.to(weight.dtype), adapter.a.to(weight.dtype), alpha=adapter.scale)


def without_adapter(module: Any) -> tuple[nn.Module, list[nn.Module]]:
    """The module that one of PEFT's wrappers stands for (the Linear of a LoRA layer, the copy that is trained in full),
    and the modules that the wrapper adds; any other module itself."""
    if is_adapted(module):
        base = module.base_layer
        return base, [part for part in module.modules() if part not in {*base.modules()}]
    if _is(module, _TRAINED_COPY):
        names = [] if module.disable_adapters else [n for n in module.active_adapters if n in module.modules_to_save]
        inner = module.modules_to_save[names[0]] if names else module.original_module
        return inner, [module, module.modules_to_save]
    return module, []


def _is(module: nn.Module, name: tuple[str, str]) -> bool:
    return (type(module).__module__, type(module).__qualname__) == name
