"""Check whether a module is exactly what its library builds: class, children, parameters, settings, no hooks.

A technique that computes a module's result itself does not call the module's code, and would silently ignore a hook or
another activation. PEFT's plain LoRA layers are known: what they wrap is compared, and :func:`adapter_of` reads what
they add. PEFT is not imported: its classes are recognized by name, as families recognize those of transformers.

Shapes of adapters: I inputs and O outputs of a Linear, R the adapter's rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from composer_speedups.packing.derived_classes import is_derived

HOOKS = {  # attribute of a module → what one of its entries is
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
}
_EVERYWHERE = [getattr(torch_modules, f"_global{kind}") for kind in HOOKS]
# transformers installs these hooks when hidden states or attentions are requested; they only observe.
_RECORDERS = "transformers.utils.output_capturing"
_CASTS = "accelerate.utils.operations"
# Either read by the techniques themselves (rates and epsilons), or without effect on the result.
_FREE = {"training", "layer_idx", "p", "eps", "inplace", "name_or_path", "warnings_issued"}
_FREE |= {"is_gradient_checkpointing", "gradient_checkpointing", "attn_implementation"}
_PLAIN = (bool, int, float, str, type(None), tuple, FunctionType, BuiltinFunctionType)


def differences(
    module: nn.Module,
    reference: nn.Module,
    name: str,
    *,
    ours: bool = False,
    around: bool = False,
    skip: Collection[nn.Module] = (),
) -> Iterator[str]:
    """Yield the differences between a user's module and what its library builds, as sentences that begin with ``name``.

    Dropout probabilities, epsilons, weights, dtypes, devices and ``requires_grad`` may differ, and modules inside may
    have LoRA adapters. ``ours`` ignores changes by this package; ``around`` ignores the module's own hooks and this
    package's ``forward`` around the class's, because they run independently of the class's ``forward``.
    """
    if type(module) is not type(reference) and not (ours and _is_ours(type(module))):
        yield f"{name} is {_described(type(module))} instead of {_described(type(reference))}"
        return
    if not isinstance(module, type(reference)):
        return
    yield from _other_code(module, name, ours=ours, around=around)
    yield from _other_contents(module, reference, name, getattr(type(module), "own_buffers", ()) if ours else ())
    yield from _other_settings(module, reference, name)
    for child, built in reference._modules.items():
        held = module._modules.get(child)
        if held is not None and built is not None and held not in skip:
            yield from _other_module(held, built, f"{name}.{child}" if name else child, ours=ours, skip=skip)


def _other_code(module: nn.Module, name: str, *, ours: bool, around: bool = False) -> Iterator[str]:
    if not all(_is_harmless(hook) for hooks in _EVERYWHERE for hook in hooks.values()):
        yield "every module has a hook (torch.nn.modules.module.register_module_…_hook)"
    if not _is_ours(type(module)) and _is_patched(type(module)):
        yield f"{_described(type(module), article=False)}.forward was replaced in its class"
    yield from _own_methods(module, name, ours=ours or around)
    if not around:
        yield from hooks_on(module, name, ours=ours)


def _other_module(
    held: nn.Module, built: nn.Module, name: str, *, ours: bool, skip: Collection[nn.Module]
) -> Iterator[str]:
    """As :func:`differences`, and PEFT's wrappers are seen through."""
    if (refusal := adapter_refusal(held)) is not None:
        yield f"{name} {refusal}"
        return
    inner, wrappers = without_adapter(held)
    for wrapper in wrappers:
        yield from _other_code(wrapper, name, ours=ours)
    yield from differences(inner, built, name, ours=ours, skip=skip)


def hooks_on(module: nn.Module, name: str, *, ours: bool) -> Iterator[str]:
    """The kinds of hooks on a module itself; ``ours``: without this package's."""
    for attribute, description in HOOKS.items():
        if not all(_is_harmless(hook, ours=ours) for hook in getattr(module, attribute).values()):
            yield f"{name} has {description}"


def _is_harmless(hook: Any, *, ours: bool = True) -> bool:
    return getattr(hook, "__module__", None) == _RECORDERS or (ours and _is_ours(hook))


def _other_settings(module: nn.Module, reference: nn.Module, name: str) -> Iterator[str]:
    for attribute, value in vars(reference).items():
        if attribute.startswith("_") or attribute in _FREE or not isinstance(value, _PLAIN):
            continue
        held = vars(module).get(attribute, _MISSING)
        if held is not value and (type(held) is not type(value) or held != value):
            yield f"{name}.{attribute} is {vars(module).get(attribute, 'missing')!r} instead of {value!r}"


def model_differences(model: PreTrainedModel, name: str = "", *, skip: Collection[nn.Module] = ()) -> list[str]:
    """How a transformers model differs from what its class builds, apart from this package's changes."""
    kind = next(c for c in type(model).__mro__ if not _is_ours(c))
    label = name or kind.__name__
    if not kind.__module__.startswith("transformers.models."):
        return [f"{label} is {_described(kind)}, which is not one of transformers' classes"]
    try:
        without = {"add_pooling_layer": False} if getattr(model, "pooler", _MISSING) is None else {}
        reference = built_on_meta(kind, model.config, **without)
    except Exception as error:  # a configuration that its class no longer accepts
        return [f"{label} cannot be rebuilt from its configuration ({type(error).__name__})"]
    attention = model.config._attn_implementation or "eager"
    own = [] if _is_known_attention(attention) else [f"{label}'s attention is {attention!r}"]
    return own + list(differences(model, reference, name, ours=True, skip=skip))


def changes_to(model: nn.Module) -> list[str]:
    """How a model, inside Composer's HuggingFaceModel or not, differs from one that is entirely transformers' own.

    A bare encoder is a difference, because unknown code reads its result; this package's tasks say that they read real
    tokens only.
    """
    outermost = outermost_models(model)
    changes = []
    kind = next(c for c in type(model).__mro__ if not _is_ours(c))
    if "" not in outermost and not kind.__module__.startswith("composer.models."):
        changes.append(f"the model is {_described(kind)}, which is not one of transformers' classes")
    if "" not in outermost:
        changes += _own_methods(model, "the model", ours=True)
    for name, inner in outermost.items():
        if "For" not in type(inner).__name__ and not getattr(model, "reads_real_tokens", False):
            changes.append(f"{name or 'the model'} is {_described(type(inner))} without a head")
        changes += model_differences(inner, name)
    return changes


def built_on_meta(kind: Callable[..., nn.Module], *arguments: Any, **settings: Any) -> Any:
    """Build a module without allocating its weights; without ``no_init_weights``, which affects all threads."""
    with torch.device("meta"):
        return kind(*arguments, **settings)


def outermost_models(model: nn.Module) -> dict[str, PreTrainedModel]:
    """The outermost transformers models in a module, by name (``""`` is the module itself)."""
    outermost: dict[str, PreTrainedModel] = {}
    for name, module in model.named_modules():
        inside = any(outer == "" or name.startswith(f"{outer}.") for outer in outermost)
        if isinstance(module, PreTrainedModel) and not inside:
            outermost[name] = module
    return outermost


_MISSING = object()


def _own_methods(module: nn.Module, name: str, *, ours: bool) -> Iterator[str]:
    """Functions that were set on the instance instead of its class."""
    for attribute, value in vars(module).items():
        if not isinstance(getattr(type(module), attribute, None), FunctionType) or (ours and _is_ours(value)):
            continue
        if not _is_forward_of(type(module), value):
            yield f"{name} has its own {attribute}"


def _is_forward_of(kind: type[nn.Module], method: Any) -> bool:
    """Whether a function is a class's ``forward``, alone or in accelerate's autocast, which mixed precision adds."""
    known = {vars(c)["forward"] for c in kind.__mro__ if "forward" in vars(c) and not _is_ours(c)} | {kind.forward}
    function = getattr(method, "__func__", method)
    if getattr(function, "__module__", "") == _CASTS:
        function = inspect.unwrap(function, stop=lambda wrapped: getattr(wrapped, "__func__", wrapped) in known)
    return getattr(function, "__func__", function) in known


def _other_contents(module: nn.Module, reference: nn.Module, name: str, added: Collection[str]) -> Iterator[str]:
    for kind in ("parameters", "buffers", "modules"):
        held, built = (
            {key for key, value in getattr(owner, f"_{kind}").items() if value is not None and key not in added}
            for owner in (module, reference)
        )
        if held != built:
            yield f"{name} has other {kind} than its class builds ({', '.join(sorted(held ^ built))})"
            return
    for key, expected in reference._parameters.items():
        parameter = module._parameters[key]
        if parameter is None or expected is None:
            continue
        if type(parameter) is not nn.Parameter or not parameter.is_floating_point():
            yield f"{name}.{key} is {_described(type(parameter))} instead of a plain floating-point tensor"
        elif parameter.shape != expected.shape:
            yield f"{name}.{key} has shape {tuple(parameter.shape)} instead of {tuple(expected.shape)}"


def _is_patched(kind: type[nn.Module]) -> bool:
    owner = next(c for c in kind.__mro__ if "forward" in vars(c))
    if owner is nn.Module:  # a container, which is never called
        return False
    function = vars(owner)["forward"]
    return (function.__module__, function.__qualname__) != (owner.__module__, f"{owner.__qualname__}.forward")


def _is_ours(thing: Any) -> bool:
    """A class, function or object of this package."""
    if is_derived(thing):  # which may have the name of its stock class
        return True
    thing = getattr(thing, "__func__", thing)
    module = getattr(thing, "__module__", None) or type(thing).__module__
    return str(module).startswith("composer_speedups.")


def _is_known_attention(name: str) -> bool:
    """Whether it computes the same as eager attention; users can register their own under any name."""
    function = AttentionInterface().get(name)
    theirs = (getattr(function, "__module__", None) or "").startswith("transformers.")
    return theirs or _is_ours(function) or (name == "eager" and function is None)


def _described(kind: type, *, article: bool = True) -> str:
    package = kind.__module__.partition(".")[0]
    named = kind.__name__ if package in ("__main__", "builtins") else f"{package} {kind.__name__}"
    return f"a {named}" if article else named


# PEFT's LoRA layers

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
    return _has_name(module, _LORA)


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
    if _has_name(module, _TRAINED_COPY):
        names = [] if module.disable_adapters else [n for n in module.active_adapters if n in module.modules_to_save]
        inner = module.modules_to_save[names[0]] if names else module.original_module
        return inner, [module, module.modules_to_save]
    return module, []


def _has_name(module: nn.Module, name: tuple[str, str]) -> bool:
    return (type(module).__module__, type(module).__qualname__) == name
