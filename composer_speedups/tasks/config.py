"""The config keys under ``model``, and which keys belong to which task."""

from dataclasses import dataclass
from typing import Literal

from composer_speedups.core.settings import key

__all__ = ["TASK_KEYS", "ModelConfig"]

# Keys that only some tasks read. Setting one for another task would have no effect, so it is an error.
TASK_KEYS: dict[str, tuple[str, ...]] = {
    "model.label_smoothing": ("classification",),
    "model.class_weights": ("classification",),
    "model.loss": ("reranking", "embedding"),
    "model.temperature": ("embedding",),
    "model.pooling": ("embedding",),
    "model.gradient_cache": ("embedding",),
    "data.labels": ("classification", "multilabel", "token_classification"),
    "data.label_columns": ("multilabel",),
    "data.label_all_pieces": ("token_classification",),
    "data.truncation": ("classification", "multilabel", "regression", "reranking"),
    "data.mlm_probability": ("mlm",),
    "data.whole_word_masking": ("mlm",),
    "data.packing": ("mlm",),
}


@dataclass
class ModelConfig:
    name: str = "google-bert/bert-base-uncased"
    """Hub id or local folder of an encoder, or `minilm` (the weights of the minilm extra)."""
    task: Literal[
        "classification", "multilabel", "regression", "token_classification", "reranking", "embedding", "mlm"
    ] = "classification"
    """The task: its head, loss and metrics, and the columns that it reads."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Load the weights, or start from random ones (without the hub if model.size is set)."""
    size: Literal["tiny", "mini", "base", "large"] | None = None
    """With init: random, a BERT of this size (layers/hidden: 2/128, 4/256, 12/768, 24/1024)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which weights are loaded or drawn, and trained; bfloat16 needs algorithms.kahan_optimizer."""
    dropout: float | None = key(None, ge=0, lt=1)
    """Hidden and attention dropout; null keeps the model's own (0.1 in BERT)."""
    train_metrics: bool = True
    """Compute metrics for each training batch; costs a synchronization per step."""
    label_smoothing: float = key(0.0, ge=0, lt=1)
    """Task classification: probability mass that the loss spreads uniformly over all classes."""
    class_weights: list[float] | None = key(None, gt=0)
    """Task classification: weight of each class in the loss, in the order of the labels; null for equal weights."""
    loss: Literal["bce", "pairwise", "ranking", "cosine"] | None = None
    """Task reranking: bce (default) or pairwise. Task embedding: ranking (default; in-batch negatives), or cosine
    (regression on scores)."""
    temperature: float = key(0.05, gt=0, le=10)
    """Task embedding, loss ranking: temperature that cosine similarities are divided by."""
    pooling: Literal["mean", "cls"] = "mean"
    """Task embedding: mean of the token vectors, or the first token's."""
    gradient_cache: int | None = key(None, ge=1)
    """Task embedding: encode this many texts at a time and recompute their activations in the backward pass, so
    that a batch with in-batch negatives may exceed memory; null encodes the whole batch at once."""
