"""Export a model with adapters: the stock model with merged weights, and the adapters in PEFT's format."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from composer_speedups.algorithms.lora.adapters import ADAPTER, adapted_layers, host, trained_copies
from composer_speedups.core.files import replace_folder


@torch.no_grad()
def merged_state_dict(model: nn.Module, weights: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the state dict of an equivalent model without adapters: W + alpha / rank · B A.

    ``model.save_pretrained(folder, state_dict=merged_state_dict(model))`` saves the stock model. ``model`` is not
    changed.

    Args:
        model: The Hugging Face model (or plain module) that :func:`apply_lora` adapted.
        weights: Its state dict, if that must be gathered from several ranks; None for ``model.state_dict()``.

    Returns:
        The state dict with the stock model's names. Merged weights are new tensors in the weight's dtype; the others
        are the tensors of ``weights``.
    """
    weights = dict(model.state_dict() if weights is None else weights)
    for name, layer in adapted_layers(model).items():
        a, b = (weights.pop(f"{name}.lora_{m}.{ADAPTER}.weight").float() for m in "AB")
        base = weights[f"{name}.base_layer.weight"]
        merged = base.float() + layer.scaling[ADAPTER] * (b @ a)
        weights[f"{name}.base_layer.weight"] = merged.to(base.dtype)
    for name in trained_copies(model):
        original = f"{name}.original_module."
        for key in [key for key in weights if key.startswith(original)]:
            copied = f"{name}.modules_to_save.{ADAPTER}.{key.removeprefix(original)}"
            weights[key] = weights.pop(copied)
    renamed = {f"{name}.base_layer.": f"{name}." for name in adapted_layers(model)}
    renamed |= {f"{name}.original_module.": f"{name}." for name in trained_copies(model)}
    return {_rename(key, renamed): tensor for key, tensor in weights.items()}


def _rename(key: str, renamed: dict[str, str]) -> str:
    prefix = next((old for old in renamed if key.startswith(old)), None)
    return key if prefix is None else renamed[prefix] + key.removeprefix(prefix)


def save_adapter(model: nn.Module, folder: Path | str, weights: dict[str, Tensor] | None = None) -> Path:
    """Save the adapters and the fully trained modules in PEFT's format; an existing ``folder`` is replaced.

    ``PeftModel.from_pretrained(base, folder)`` loads them into a copy of the base model. The folder's
    ``adapter_config.json`` has the base model's name or path, if there is one.

    Args:
        model: The model that :func:`apply_lora` adapted, or a ComposerModel around it.
        folder: The folder to write; its parent must exist.
        weights: The adapted model's state dict, if that must be gathered from several ranks.

    Raises:
        ValueError: The model has no adapters.
    """
    from peft.utils import SAFETENSORS_WEIGHTS_NAME, get_peft_model_state_dict

    model = host(model)
    if not adapted_layers(model):
        raise ValueError("the model has no adapters; call apply_lora first")
    # Otherwise PEFT would look up the base model on the hub, to check whether its vocabulary was resized.
    trained = get_peft_model_state_dict(model, weights, ADAPTER, save_embedding_layers=False)
    config: Any = copy.copy(model.peft_config[ADAPTER])  # type: ignore[union-attr, index]
    config.inference_mode = True
    mapping = None
    if config.task_type is None:  # then PEFT finds the base model's class in this mapping
        mapping = {"base_model_class": type(model).__name__, "parent_library": type(model).__module__}
    with replace_folder(Path(folder)) as partial:
        tensors = {f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in trained.items()}
        save_file(tensors, partial / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
        config.save_pretrained(str(partial), auto_mapping_dict=mapping)
    return Path(folder)
