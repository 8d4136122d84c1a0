"""Export of the trained model in transformers' format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from composer.core import State
from composer.models import HuggingFaceModel
from composer.utils import dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from composer_speedups.core.files import TEXTS, WEIGHTS, hashes_of, model_files, replace_folder, write_json
from composer_speedups.core.host import host_of
from composer_speedups.core.trainer_state import model_of
from composer_speedups.tasks.models import FinetuneModel, positions_of
from composer_speedups.tasks.settings import TASK_FILE


def export_model(state: State, folder: Path) -> Path:
    """``save_pretrained`` of the model and its tokenizer as safetensors, written atomically.

    ``transformers.AutoModelForSequenceClassification.from_pretrained(folder)`` loads it without this package, because
    names and shapes are the stock model's. Models of the embedding task also load in sentence-transformers. Collective:
    every rank must call it, because FSDP gathers its shards. ``predict`` reads the task of a
    :class:`.FinetuneModel` from ``task.json``. An existing export in ``folder`` is replaced. Techniques
    may convert their weights to the stock model's, and write more files: LoRA merges its adapters, and also writes them
    to ``adapter/``.

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
        if (host := host_of(state)) is not None:
            for technique in host.run.techniques.values():
                weights = technique.export(host.run, weights, folder)
        with replace_folder(folder) as partial:
            wrapped.model.save_pretrained(str(partial), state_dict=weights)
            if wrapped.tokenizer is not None:
                wrapped.tokenizer.save_pretrained(partial)
                _describe_tokenizer(partial / "tokenizer_config.json", positions_of(wrapped.model))
            if isinstance(wrapped, FinetuneModel):
                wrapped.task.export(partial, wrapped.config.hidden_size, wrapped.max_length)
                files = hashes_of(model_files(str(partial), (*WEIGHTS, *TEXTS)), "export")  # predict compares them
                write_json(partial / TASK_FILE, wrapped.task.settings(wrapped.max_length) | {"files": files})
    dist.barrier()
    return folder


def _describe_tokenizer(path: Path, positions: int | None) -> None:
    """Let transformers 4 load the tokenizer, and ``truncation=True`` cut texts to the ``positions`` of the model."""
    settings = json.loads(path.read_text())
    if settings["tokenizer_class"] == "TokenizersBackend":  # transformers 5's name for the class
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if positions is not None:
        settings["model_max_length"] = min(settings.get("model_max_length", positions), positions)
    write_json(path, settings)


def _tied_again(model: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """Share gathered tensors between the names of a tied parameter again, which are written once."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        same = first.setdefault(id(parameter), name)
        if name in weights:
            weights[name] = weights[same]
    return weights
