"""What a model's kernels are compiled for, read from its modules or from its config.json; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["Shape"]


class Shape(NamedTuple):
    """Widths, and probabilities of dropping.

    Attributes:
        hidden, inner, heads: Of a layer.
        weights, attention, output: Dropped of a layer's attention weights, of its attention's output, of its output.
        embedding: Width of the embeddings.
        embedded: Dropped of their output.
    """

    hidden: int
    inner: int
    heads: int
    weights: float
    attention: float
    output: float
    embedding: int
    embedded: float

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Shape:
        """From what transformers writes to config.json.

        Raises:
            KeyError: Another family, or a key that is left out.
        """
        family = config["model_type"]
        if family == "distilbert":
            hidden, dropped = config["dim"], config["dropout"]
            inner, heads, weights = config["hidden_dim"], config["n_heads"], config["attention_dropout"]
            return cls(hidden, inner, heads, weights, 0.0, dropped, hidden, dropped)
        if family not in ("bert", "electra", "roberta"):
            raise KeyError(family)
        hidden, dropped = config["hidden_size"], config["hidden_dropout_prob"]
        embedding = config["embedding_size"] if family == "electra" else hidden
        inner, heads, weights = (
            config[key] for key in ("intermediate_size", "num_attention_heads", "attention_probs_dropout_prob")
        )
        return cls(hidden, inner, heads, weights, dropped, dropped, embedding, dropped)

    @classmethod
    def of_modules(cls, layer: Any, embeddings: Any) -> Shape:
        """From a :class:`FusedLayer` and a :class:`FusedEmbeddings`; None where the model has its own embeddings."""
        parts, rates = layer.parts(), layer.rates(in_training=True)
        hidden, embedded = parts.query.in_features, rates.output
        width = hidden if embeddings is None else embeddings.LayerNorm.weight.shape[0]
        return cls(
            hidden, parts.up.out_features, parts.heads, rates.weights, rates.attention, rates.output,
            width, embedded if embeddings is None else embeddings.dropout.p,
        )  # fmt: skip
