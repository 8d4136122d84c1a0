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
_VARIANTS = {"DoraLinearVariant": "DoRA", "ALoraLinearVariant": "aLoRA", "ArrowLinearVariant": "Arrow"}
_VARIANTS |= {"BdLoraLinearVariant": "BD-LoRA"}


class Adapter(NamedTuple):
    """A LoRA adapter. It adds scale · B · A · dropout(x) to the Linear's result.

    Attributes:
        a, b: A (R, I) and B (O, R).
        scale: alpha / rank.
        dropout: Dropout probability of the adapter's input that applies now; 0 in eval mode.
    """

    a: Tensor
    b: Tensor
    scale: float
    dropout: float


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is PEFT's LoRA layer around a Linear."""
    return _is(module, _LORA)


def adapter_of(module: Any) -> Adapter | None:
    """The active adapter of a Linear; None without one, and if adapters are disabled or merged into the weight.

    ``module`` is any Linear, for which :func:`adapter_refusal` returns None.
    """
    if not is_adapted(module) or module.disable_adapters or module.merged:
        return None
    name = next((name for name in module.active_adapters if name in module.lora_A), None)
    if name is None:
        return None
    dropout = module.lora_dropout[name]
    rate = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
    return Adapter(module.lora_A[name].weight, module.lora_B[name].weight, float(module.scaling[name]), rate)


def adapter_refusal(module: Any) -> str | None:
    """Return why a LoRA layer does not compute as :class:`Adapter` says; None if it does, and for other modules."""
    if not is_adapted(module):
        return None
    names = [name for name in module.active_adapters if name in module.lora_A]
    if module.disable_adapters:
        return "has merged adapters that are disabled" if module.merged else None
    if len(names) > 1:
        return f"has several active adapters ({', '.join(names)})"
    for name in names:
        if name in module.lora_variant:
            variant = type(module.lora_variant[name]).__name__
            return f"has an adapter with {_VARIANTS.get(variant, variant)}"
        if module.fan_in_fan_out:
            return "has an adapter for transposed weights (fan_in_fan_out)"
        a, b, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
        if type(a) is not nn.Linear or type(b) is not nn.Linear or a.bias is not None:
            return "has an adapter whose matrices are not plain Linear modules"
        if b.bias is not None:
            return "has an adapter with a bias (lora_bias)"
        if type(dropout) not in (nn.Dropout, nn.Identity):
            return f"has an adapter with {type(dropout).__name__} instead of Dropout"
    return None


def merged_weight(weight: Tensor, adapter: Adapter | None) -> Tensor:
    """Return the weight that a Linear (O, I) and its adapter have together, in the weight's dtype; differentiable.

    The weight itself is returned if there is no adapter, or one with dropout.
    """
    if adapter is None or adapter.dropout > 0:
        return weight
    with torch.autocast(weight.device.type, enabled=False):  # which would round the sum to 16 bits
        return torch.addmm(weight, adapter.b.to(weight.dtype), adapter.a.to(weight.dtype), alpha=adapter.scale)


def without_adapter(module: Any) -> tuple[nn.Module, list[nn.Module]]:
    """Return the module that one of PEFT's wrappers stands for, and the modules that the wrapper adds.

    That is the Linear of a LoRA layer, and the copy of a module that PEFT trains in full. Any other module is returned
    itself, without further ones.
    """
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
