"""The trained model in transformers' own format."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from composer.core import State
from composer.models import HuggingFaceModel
from composer.utils import dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from composer_speedups.algorithms.ordering import techniques_of
from composer_speedups.state import model_of

__all__ = ["export_model"]


def export_model(state: State, folder: Path) -> Path:
    """``save_pretrained`` of the model and its tokenizer, as safetensors, complete or not at all.

    ``transformers.AutoModelForSequenceClassification.from_pretrained(folder)`` loads it without this package:
    names and shapes are the stock model's. Call it on every rank: FSDP gathers its shards. An earlier export
    in ``folder`` is replaced.

    Raises:
        ValueError: The trained model is not a HuggingFaceModel.
    """
    wrapped: Any = model_of(state)
    if not isinstance(wrapped, HuggingFaceModel):
        raise ValueError(f"only a HuggingFaceModel can be exported, not {type(wrapped).__name__}")
    if state.fsdp_enabled:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights: Any = get_model_state_dict(wrapped.model, options=options)
    else:
        weights = wrapped.model.state_dict()
    for technique in techniques_of(state.algorithms):
        if technique.engaged:
            weights = technique.export_weights(wrapped.model, weights)
    if dist.get_global_rank() == 0:
        partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        wrapped.model.save_pretrained(partial, state_dict=weights)
        if wrapped.tokenizer is not None:
            wrapped.tokenizer.save_pretrained(partial)
        partial.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(partial, folder)
    dist.barrier()
    return folder
