"""The config keys under ``model``."""

from typing import Annotated, Literal

from pydantic import Field

from composer_speedups.core.settings import Settings, refuse_if

__all__ = ["TASK_FILE", "ModelConfig"]

TASK_FILE = "task.json"
"""Name of the file in an exported model from which ``predict`` rebuilds the task."""


_Weight = Annotated[float, Field(gt=0)]


class ModelConfig(Settings):
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
    dropout: float | None = Field(None, ge=0, lt=1)
    """Hidden and attention dropout; null keeps the model's own (0.1 in BERT)."""
    train_metrics: bool = True
    """Compute metrics for each training batch; costs a synchronization per step."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Task classification: probability mass that the loss spreads uniformly over all classes."""
    class_weights: Literal["balanced"] | list[_Weight] | dict[str, _Weight] | None = Field(
        None, examples=["balanced", "[1.0, 3.0]", "{spam: 3.0}"]
    )
    """Task classification: weight of each class in the loss: by name (1 for the others), as a list in the order of the
    labels, or balanced, the inverse of how often the class occurs in the training samples; null for equal weights."""
    loss: Literal["bce", "pairwise", "ranking", "cosine"] | None = None
    """Task reranking: bce (default) or pairwise. Task embedding: ranking (default; in-batch negatives), or cosine
    (regression on scores)."""
    temperature: float = Field(0.05, gt=0, le=10)
    """Task embedding, loss ranking: temperature that cosine similarities are divided by."""
    pooling: Literal["mean", "cls"] = "mean"
    """Task embedding: mean of the token vectors, or the first token's."""
    gradient_cache: int | None = Field(None, ge=1)
    """Task embedding: encode this many texts at a time and recompute their activations in the backward pass, so
    that a batch with in-batch negatives may exceed memory; null encodes the whole batch at once."""

    def check_settings(self) -> None:
        own_size = "needs model.init: random; a pretrained model has its own size"
        refuse_if(self.size is not None and self.init != "random", "size", own_size)
