"""Insert PEFT's LoRA layers into a model in place, keeping the model object, its class and its blocks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from transformers import PreTrainedModel

from composer_speedups.core.optimizer_state import replace_parameters
from composer_speedups.core.stock import outermost_models

ADAPTER = "default"  # PEFT's name for a single adapter
_SETTINGS = "_lora_settings"  # attribute of the model

_TASKS = {"SequenceClassification": "SEQ_CLS", "TokenClassification": "TOKEN_CLS", "QuestionAnswering": "QUESTION_ANS"}


def adapter_host(model: nn.Module) -> nn.Module:
    """Return the module to insert adapters into: the Hugging Face model inside ``model``, or ``model`` itself."""
    models = [*outermost_models(model).values()]
    return models[0] if len(models) == 1 else model


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the PEFT layer of every module with LoRA matrices, by name."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def trained_copies(model: nn.Module) -> dict[str, Any]:
    """Return the PEFT wrapper of every module that is fully trained, with its frozen original, by name."""
    from peft.utils.other import ModulesToSaveWrapper

    return {name: module for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)}


def replacements(model: nn.Module) -> dict[Parameter, list[Parameter]]:
    """Map each frozen parameter to the trained parameters that replace it in the optimizer; most have none."""
    replaced: dict[Parameter, list[Parameter]] = {}
    for layer in adapted_layers(model).values():
        replaced[layer.get_base_layer().weight] = [layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight]
    for wrapper in trained_copies(model).values():
        copied = dict(wrapper.modules_to_save[ADAPTER].named_parameters())
        replaced |= {original: [copied[name]] for name, original in wrapper.original_module.named_parameters()}
    return {p: replaced.get(p, []) for p in model.parameters() if not p.requires_grad}


def settings_of(model: nn.Module) -> dict[str, Any] | None:
    """The settings that :func:`insert` got for the adapters in ``model``; None without our adapters."""
    settings: dict[str, Any] | None = vars(adapter_host(model)).get(_SETTINGS)
    return settings if adapted_layers(model) else None


def add_adapters(
    model: nn.Module,
    optimizers: Iterable[Optimizer],
    *,
    rank: int,
    alpha: float,
    targets: Literal["all-linear"] | Sequence[str],
    dropout: float,
    modules_to_save: Sequence[str] | None,
) -> None:
    """Freeze a model, and train low-rank adapters of its Linears and copies of the modules to save.

    Frozen parameters are removed from the optimizers' groups, and each new parameter joins the group of the weight that
    it replaces. A model that already has these adapters is not changed.

    Raises:
        ValueError: A target does not match, or the model has other adapters.
    """
    from peft import PeftModel

    inner = adapter_host(model)
    saved = head_names(inner) if modules_to_save is None else modules_to_save
    wanted = {
        "rank": rank,
        "alpha": alpha,
        "dropout": dropout,
        "targets": targets if isinstance(targets, str) else sorted(set(targets)),
        "modules_to_save": sorted(set(saved)),
    }
    before = settings_of(model)
    wrapped = any(isinstance(module, PeftModel) for module in model.modules())
    if wrapped or (adapted_layers(model) and before is None):
        raise ValueError("the model already has PEFT adapters; pass its base model, or remove the technique")
    if before is None:
        insert(inner, wanted)
    elif before != wanted:
        had = ", ".join(f"{name}={before[name]!r}" for name in wanted if before[name] != wanted[name])
        raise ValueError(f"the model already has LoRA's adapters with {had}; build a new model")
    names = {p: name for name, p in inner.named_parameters()}
    replace_parameters(list(optimizers), replacements(inner), names, for_untrained="first group")


def head_names(model: nn.Module) -> list[str]:
    """Return the names of the modules on top of a Hugging Face encoder, which are new and must be fully trained.

    Empty for a language model, whose head is pretrained, and for a model that is not a Hugging Face model.
    """
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is not None:
        return []
    if model.base_model is model:
        return []
    return [
        name
        for name, child in model.named_children()
        if name != model.base_model_prefix and any(True for _ in child.parameters())
    ]


def insert(model: nn.Module, settings: dict[str, Any]) -> None:
    """Freeze ``model`` and insert adapters with the given settings.

    Args:
        model: The module that :func:`adapter_host` returned; changed in place.
        settings: Rank, alpha, dropout, targets and modules to save.

    Raises:
        ValueError: A target that does not match any module, or matches one that is not a Linear.
    """
    from peft import LoraConfig, inject_adapter_in_model

    names, saved = settings["targets"], settings["modules_to_save"]
    task = next((t for end, t in _TASKS.items() if type(model).__name__.endswith(f"For{end}")), None)
    config = LoraConfig(
        task_type=task,  # selects PEFT's class when the adapter is loaded
        r=settings["rank"],
        lora_alpha=settings["alpha"],  # may be a float: PEFT only divides it by the rank
        lora_dropout=settings["dropout"],
        target_modules=names,
        modules_to_save=saved or None,
        base_model_name_or_path=getattr(model, "name_or_path", None) or None,
    )
    if names != "all-linear":
        _check_targets(model, config, names)
    for name in saved:
        if not any(key == name or key.endswith(f".{name}") for key, _ in model.named_modules()):
            children = ", ".join(name for name, _ in model.named_children())
            raise ValueError(f"modules_to_save: the model has no module {name!r}; its children are {children}")
    inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    for layer in adapted_layers(model).values():
        layer.train(layer.get_base_layer().training)  # PEFT's modules start in training mode
    vars(model)[_SETTINGS] = settings


def _check_targets(model: nn.Module, config: Any, names: Sequence[str]) -> None:
    """Refuse a name that matches nothing; PEFT ignores it if another name matches."""
    from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists

    for name in names:
        one = copy.copy(config)
        one.target_modules = {name}
        matched = {
            key: module
            for key, module in model.named_modules()
            if (hit := check_target_module_exists(one, key)) and not isinstance(hit, _ExcludedModule)
        }
        if not matched:
            raise ValueError(f"targets: no module is called {name!r}; the model's Linears are {_linear_names(model)}")
        for key, module in matched.items():
            if not isinstance(module, nn.Linear):
                raise ValueError(f"targets: {key} is a {type(module).__name__}; only Linear modules are supported")


def _linear_names(model: nn.Module) -> str:
    last = {name.split(".")[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return ", ".join(sorted(last)) or "none"


def adapter_weights(model: nn.Module) -> list[Parameter]:
    """The B matrices of the adapters, which start at zero."""
    return [layer.lora_B[ADAPTER].weight for layer in adapted_layers(model).values()]


def trained_and_frozen(model: nn.Module) -> tuple[dict[str, Parameter], dict[str, Parameter]]:
    """The trained and the frozen parameters, according to PEFT's modules, not to requires_grad."""
    added = [m[ADAPTER] for layer in adapted_layers(model).values() for m in (layer.lora_A, layer.lora_B)]
    added += [wrapper.modules_to_save[ADAPTER] for wrapper in trained_copies(model).values()]
    ours = {p for module in added for p in module.parameters()}
    named = dict(model.named_parameters())
    return {n: p for n, p in named.items() if p in ours}, {n: p for n, p in named.items() if p not in ours}


@torch.no_grad()
def sums(parameters: dict[str, Parameter]) -> dict[str, Tensor]:
    """Float64 sums, which any update changes; the tensors' version would not show changes through ``.data``."""
    return {name: p.sum(dtype=torch.float64) for name, p in parameters.items()}
