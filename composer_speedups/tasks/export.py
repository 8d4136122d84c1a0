"""The trained model in transformers' own format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from composer.core import State
from composer.models import HuggingFaceModel
from composer.utils import dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from composer_speedups.core.files import replace_folder
from composer_speedups.core.technique import techniques_of
from composer_speedups.core.trainer_state import model_of
from composer_speedups.tasks.models import FinetuneModel

__all__ = ["export_model"]


def export_model(state: State, folder: Path) -> Path:
    """``save_pretrained`` of the model and its tokenizer, as safetensors, complete or not at all.

    ``transformers.AutoModelForSequenceClassification.from_pretrained(folder)`` loads it without this package:
    names and shapes are the stock model's. A model of the embedding task loads in sentence-transformers too. Call it on
    every rank: FSDP gathers its shards. An earlier export in ``folder`` is replaced. A technique may turn its weights
    back into the stock model's, and write more beside ``folder``: LoRA merges its adapters, and leaves them in
    ``adapter/``.

    Raises:
        ValueError: The trained model is not a HuggingFaceModel.
    """
    wrapped: Any = model_of(state)
    if not isinstance(wrapped, HuggingFaceModel):
        raise ValueError(f"only a HuggingFaceModel can be exported, not {type(wrapped).__name__}")
    weights = None
    if state.fsdp_enabled:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = _tied_again(wrapped.model, get_model_state_dict(wrapped.model, options=options))
    if dist.get_global_rank() == 0:
        weights = wrapped.model.state_dict() if weights is None else weights
        for technique in techniques_of(state.algorithms):
            if technique.applied:
                weights = technique.export(state, weights, folder)
        with replace_folder(folder) as partial:
            wrapped.model.save_pretrained(str(partial), state_dict=weights)
            if wrapped.tokenizer is not None:
                wrapped.tokenizer.save_pretrained(partial)
            if isinstance(wrapped, FinetuneModel):
                wrapped.task.export(partial, wrapped.config.hidden_size, wrapped.max_length)
    dist.barrier()
    return folder


def _tied_again(model: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """Gathered weights in which names of one parameter have one tensor again: ``save_pretrained`` writes that once."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        same = first.setdefault(id(parameter), name)
        if name in weights:
            weights[name] = weights[same]
    return weights
