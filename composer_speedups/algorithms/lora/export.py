"""Export a model with LoRA adapters, merged into a stock model's state dict or saved in PEFT's format."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from composer_speedups.algorithms.lora.modules import ADAPTER, adapted_layers, adapter_host, trained_copies
from composer_speedups.core.files import replace_folder


@torch.no_grad()
def merged_state_dict(model: nn.Module, weights: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the state dict of the equivalent model without adapters, whose weights are W + alpha / rank · B A.

    ``model.save_pretrained(folder, state_dict=merged_state_dict(model))`` saves it. ``model`` is not changed. An
    adapter that PEFT already merged into W is not added again, and other adapters, which the user added, are left out.

    Args:
        model: The Hugging Face model (or plain module) with LoRA's adapters.
        weights: The full state dict of ``model``, for a model that is sharded over ranks; None for
            ``model.state_dict()``.

    Returns:
        The state dict, with the stock model's names. Merged weights are new tensors in the dtype of W; all others are
        the tensors of ``weights``.
    """
    weights = dict(model.state_dict() if weights is None else weights)
    for name, layer in adapted_layers(model).items():
        a, b = (weights.pop(f"{name}.lora_{m}.{ADAPTER}.weight").float() for m in "AB")
        base = weights[f"{name}.base_layer.weight"]
        if ADAPTER not in layer.merged_adapters:
            merged = base.float() + layer.scaling[ADAPTER] * (b @ a)
            weights[f"{name}.base_layer.weight"] = merged.to(base.dtype)
    for name in trained_copies(model):
        original = f"{name}.original_module."
        for key in [key for key in weights if key.startswith(original)]:
            copied = f"{name}.modules_to_save.{ADAPTER}.{key.removeprefix(original)}"
            weights[key] = weights.pop(copied)
    stock_prefixes = {f"{name}.base_layer.": f"{name}." for name in adapted_layers(model)}
    stock_prefixes |= {f"{name}.original_module.": f"{name}." for name in trained_copies(model)}
    stock = {_replace_prefix(key, stock_prefixes): tensor for key, tensor in weights.items()}
    others = tuple(f"{name}.{part}" for name in adapted_layers(model) for part in ("lora_A.", "lora_B."))
    others += tuple(f"{name}.modules_to_save." for name in trained_copies(model))
    return {key: tensor for key, tensor in stock.items() if not key.startswith(others)}


def _replace_prefix(key: str, replacements: dict[str, str]) -> str:
    prefix = next((prefix for prefix in replacements if key.startswith(prefix)), None)
    return key if prefix is None else replacements[prefix] + key.removeprefix(prefix)


def save_adapter(model: nn.Module, folder: Path | str, weights: dict[str, Tensor] | None = None) -> Path:
    """Save the adapters and the fully trained modules in PEFT's format; an existing ``folder`` is replaced.

    ``PeftModel.from_pretrained(base, folder)`` loads them into the base model. ``adapter_config.json`` contains the
    base model's name or path, if it is known.

    Args:
        model: The model with LoRA's adapters, or a ComposerModel that contains it.
        folder: The folder to write; its parent must exist.
        weights: The full state dict of the Hugging Face model, for a model that is sharded over ranks; None for
            ``model.state_dict()``.

    Raises:
        ValueError: The model has no adapters.
    """
    from peft.utils import SAFETENSORS_WEIGHTS_NAME, get_peft_model_state_dict

    model = adapter_host(model)
    if not adapted_layers(model):
        raise ValueError("the model has no adapters; add the technique lora")
    # With save_embedding_layers="auto", PEFT would look up the base model on the hub to check its vocabulary size.
    adapter_weights = get_peft_model_state_dict(model, weights, ADAPTER, save_embedding_layers=False)
    config: Any = copy.copy(model.peft_config[ADAPTER])  # type: ignore[union-attr, index]
    config.inference_mode = True
    base_class = None
    if config.task_type is None:  # without a task type, PEFT reads the base model's class from the config
        base_class = {"base_model_class": type(model).__name__, "parent_library": type(model).__module__}
    with replace_folder(Path(folder)) as new_folder:
        tensors = {f"base_model.model.{name}": t.detach().cpu().contiguous() for name, t in adapter_weights.items()}
        save_file(tensors, new_folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
        config.save_pretrained(str(new_folder), auto_mapping_dict=base_class)
    return Path(folder)
