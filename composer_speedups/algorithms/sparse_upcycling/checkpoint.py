"""Loading what ``save_pretrained`` wrote of a model with experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from composer_speedups.algorithms.sparse_upcycling.functional import apply_sparse_upcycling

__all__ = ["load_sparse_upcycling"]


def load_sparse_upcycling(folder: str | Path, auto: Any = AutoModelForSequenceClassification) -> PreTrainedModel:
    """A model with experts from the folder that ``save_pretrained`` (or a run of train.py) left.

    transformers' own ``from_pretrained`` would find no weights for the layers that became experts.

    Args:
        folder: Local; its config.json holds the settings, its safetensors files the weights.
        auto: The auto class of the model's task. Default AutoModelForSequenceClassification.

    Returns:
        The model in eval mode, on the CPU, in the dtype of its weights.

    Raises:
        ValueError: The folder holds no model with experts, or not all of its weights.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False) if files else None
    settings = getattr(config, "sparse_upcycling", None)
    if settings is None:
        raise ValueError(f"{folder} holds no exported model with experts; load it with from_pretrained")
    with torch.random.fork_rng(devices=[]):  # what is drawn here is overwritten below
        model: PreTrainedModel = auto.from_config(config)
        apply_sparse_upcycling(model, **settings)
    weights = {name: weight for file in files for name, weight in load_file(file).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    model.tie_weights()
    tied = set(getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ())
    lacking = [name for name in missing if name not in tied] + list(unexpected)
    if lacking:
        raise ValueError(f"the weights in {folder} do not fit its config: {lacking[0]} and {len(lacking) - 1} more")
    return model.eval()
