"""Insert PEFT's LoRA layers into a model in place, keeping the model object, its class and its blocks; and export it,
merged into a stock model's state dict or in PEFT's format."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from transformers import PreTrainedModel

from composer_speedups.core.files import replace_folder
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
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def trained_copies(model: nn.Module) -> dict[str, Any]:
    from peft.utils.other import ModulesToSaveWrapper

    return {name: module for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)}


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
    """Freeze a model, and train low-rank adapters of its Linears and copies of the modules to save; ValueError if a
    target does not match, or the model has other adapters. A model that already has these is not changed.

    Each new parameter joins the optimizers' group of the weight that it replaces.
    """
    from peft import LoraConfig, PeftModel, inject_adapter_in_model

    inner = adapter_host(model)
    settings: dict[str, Any] = {
        "r": rank,
        "lora_alpha": alpha,  # may be a float: PEFT only divides it by the rank
        "lora_dropout": dropout,
        "target_modules": targets if isinstance(targets, str) else sorted(set(targets)),
        "modules_to_save": sorted(set(_head_names(inner) if modules_to_save is None else modules_to_save)) or None,
    }
    if adapted_layers(model) or any(isinstance(module, PeftModel) for module in model.modules()):
        if (before := vars(inner).get(_SETTINGS)) != settings:
            had = "PEFT adapters" if before is None else f"LoRA's adapters with {before}"
            raise ValueError(f"the model already has {had}; build a new model, or pass its base model")
    else:
        linears = [name for name, module in inner.named_modules() if isinstance(module, nn.Linear)]
        _refuse_unmatched([] if isinstance(targets, str) else targets, linears, "targets: no Linear")
        every = [name for name, _ in inner.named_modules()]
        _refuse_unmatched(settings["modules_to_save"] or (), every, "modules_to_save: no module")
        task = next((t for end, t in _TASKS.items() if type(inner).__name__.endswith(f"For{end}")), None)
        base = getattr(inner, "name_or_path", None) or None
        config = LoraConfig(task_type=task, base_model_name_or_path=base, **settings)
        inject_adapter_in_model(config, inner, adapter_name=ADAPTER)
        for layer in adapted_layers(inner).values():
            layer.train(layer.get_base_layer().training)  # PEFT's modules start in training mode
        vars(inner)[_SETTINGS] = settings
    names = {p: name for name, p in inner.named_parameters()}
    replace_parameters(optimizers, _replacements(inner), names, for_untrained="first group")


def _refuse_unmatched(wanted: Iterable[str], names: Sequence[str], what: str) -> None:
    """Refuse a name that matches nothing; PEFT ignores it if another name matches."""
    for one in wanted:
        if not any(name == one or name.endswith(f".{one}") for name in names):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in names if name}))
            raise ValueError(f"{what} of the model is called {one!r}; it has {known}")


def _head_names(model: nn.Module) -> list[str]:
    """The names of the modules on top of a transformers encoder, which are new and must be fully trained; none for a
    language model, whose head is pretrained."""
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is not None:
        return []
    if model.base_model is model:
        return []
    return [
        name
        for name, child in model.named_children()
        if name != model.base_model_prefix and any(True for _ in child.parameters())
    ]


def _replacements(model: nn.Module) -> dict[Parameter, list[Parameter]]:
    """Map each frozen parameter to the trained parameters that replace it in the optimizer; most have none."""
    replaced: dict[Parameter, list[Parameter]] = {}
    for layer in adapted_layers(model).values():
        replaced[layer.get_base_layer().weight] = [layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight]
    for wrapper in trained_copies(model).values():
        copied = dict(wrapper.modules_to_save[ADAPTER].named_parameters())
        replaced |= {original: [copied[name]] for name, original in wrapper.original_module.named_parameters()}
    return {p: replaced.get(p, []) for p in model.parameters() if not p.requires_grad}


@torch.no_grad()
def merged_state_dict(model: nn.Module, weights: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The state dict of the equivalent model without adapters, with weights W + alpha / rank · B A and stock names.

    ``weights`` is the full state dict of a sharded model. Adapters that PEFT already merged into W are not added again.
    """
    weights = dict(model.state_dict() if weights is None else weights)
    for name, layer in adapted_layers(model).items():
        a, b = (weights.pop(f"{name}.lora_{m}.{ADAPTER}.weight").float() for m in "AB")
        base = weights[f"{name}.base_layer.weight"]
        if ADAPTER not in layer.merged_adapters:
            weights[f"{name}.base_layer.weight"] = (base.float() + layer.scaling[ADAPTER] * (b @ a)).to(base.dtype)
    stock = {f"{name}.base_layer.": f"{name}." for name in adapted_layers(model)}
    for name in trained_copies(model):
        stock[f"{name}.modules_to_save.{ADAPTER}."] = f"{name}."
        weights = {key: value for key, value in weights.items() if not key.startswith(f"{name}.original_module.")}
    prefixes = {key: next(filter(key.startswith, stock), "") for key in weights}
    return {stock.get(prefix, "") + key.removeprefix(prefix): weights[key] for key, prefix in prefixes.items()}


def save_adapter(model: nn.Module, folder: Path | str, weights: dict[str, Tensor] | None = None) -> Path:
    """Save the adapters and the fully trained modules for ``PeftModel.from_pretrained(base, folder)``; an existing
    ``folder`` is replaced. ``weights`` is the full state dict of a sharded model."""
    from peft.utils import SAFETENSORS_WEIGHTS_NAME, get_peft_model_state_dict

    model = adapter_host(model)
    # With save_embedding_layers="auto", PEFT would look up the base model on the hub to check its vocabulary size.
    adapter_weights = get_peft_model_state_dict(model, weights, ADAPTER, save_embedding_layers=False)
    config: Any = copy.copy(model.peft_config[ADAPTER])  # type: ignore[union-attr, index]
    config.inference_mode = True
    with replace_folder(Path(folder)) as new_folder:
        tensors = {f"base_model.model.{name}": t.detach().cpu().contiguous() for name, t in adapter_weights.items()}
        save_file(tensors, new_folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
        config.save_pretrained(str(new_folder))
    return Path(folder)
