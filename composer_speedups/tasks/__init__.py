"""Training tasks: heads, labels, losses, metrics, predictions and export.

    from composer_speedups.tasks import Classification, FinetuneModel

Names are imported on first use, because the config reads ``tasks.settings`` and should not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Classification": "classification",
    "Embedding": "embedding",
    "FinetuneModel": "models",
    "MaskedLanguageModelling": "mlm",
    "Multilabel": "multilabel",
    "Regression": "regression",
    "Reranking": "reranking",
    "Task": "task",
    "TokenClassification": "token_classification",
    "export_model": "export",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
