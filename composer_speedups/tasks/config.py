"""The config keys under ``model``."""

from dataclasses import dataclass
from typing import Literal

from composer_speedups.core.settings import key

__all__ = ["ModelConfig"]


@dataclass
class ModelConfig:
    name: str = "google-bert/bert-base-uncased"
    """Hub id or local folder of a BERT-family model, or `minilm` (the weights of the minilm extra)."""
    task: Literal["classification", "mlm"] = "classification"
    """Two-class classification head, or masked language modelling."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Load the weights, or start from random ones (needs no hub when model.size is given)."""
    size: Literal["tiny", "mini", "base", "large"] | None = None
    """With init: random, a BERT of this size (layers/hidden: 2/128, 4/256, 12/768, 24/1024)."""
    dropout: float | None = key(None, ge=0, lt=1)
    """Hidden and attention dropout; null keeps the model's own (0.1 in BERT)."""
    train_metrics: bool = True
    """Compute accuracy on each training batch; costs a host synchronisation a step."""
