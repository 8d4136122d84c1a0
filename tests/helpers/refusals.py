"""What cannot go together of model families, techniques, heads and inputs: the one table of it.

``tests/families/test_family_techniques.py`` holds each line to its error, and everything that no line names to the
untouched model's values. ``benchmarks/tables.py`` writes docs/FAMILIES.md from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["FAILING", "HEADS", "INPUTS", "REFUSALS", "TECHNIQUES", "UNDEFINED", "Refusal", "left_padded", "refusal_of"]

TECHNIQUES = (
    "unpadding",
    "fused_layers",
    "sdpa_attention",
    "fast_layernorm",
    "gradient_checkpointing",
    "torch_compile",
    "lora",
    "sparse_upcycling",
)
HEADS = {
    "classification": "sequence classification",
    "tokens": "token classification",
    "choice": "multiple choice",
    "answering": "question answering",
    "mlm": "masked LM",
    "pooling": "one's own module with mean pooling",
}
INPUTS = (
    "right padding",
    "left padding",
    "holes",
    "no padding",
    "no mask",
    "a row of padding",
    "token types",
    "position ids",
    "embeddings",
    "4-D mask",
    "eval mode",
    "hidden states and attentions",
)


class Refusal(NamedTuple):
    """A line of the table.

    Attributes:
        techniques: Each is refused.
        error: What the ValueError says, a regular expression.
        why: The same for the documentation.
        families, head, input: With which; empty for all.
    """

    techniques: tuple[str, ...]
    error: str
    why: str
    families: tuple[str, ...] = ()
    head: str = ""
    input: str = ""


REFUSALS = (
    Refusal(
        ("unpadding", "fused_layers"),
        r"^unpadding does not support \w+ForQuestionAnswering, whose loss includes padding positions$",
        "its loss is over padding positions too",
        head="answering",
    ),
    Refusal(
        ("fused_layers",),
        r"^fused_layers can fuse none .* knows the layers of .* and this model's are AlbertLayerGroup$",
        "a layer that is run several times is not known to its kernels",
        families=("albert",),
    ),
    Refusal(
        ("fused_layers",),
        r"^fused_layers can fuse none .* knows the layers of .* and this model's are MPNetLayer$",
        "its attention kernel adds no bias for relative positions",
        families=("mpnet",),
    ),
    Refusal(
        ("fused_layers",),
        r"^fused_layers can fuse none .* knows the layers of .* and this model's are T5Block$",
        "its kernels are of layers with norms behind, biases and absolute positions",
        families=("t5",),
    ),
    Refusal(
        ("fast_layernorm",),
        r"^no torch\.nn\.LayerNorm was found in the model$",
        "its norms are no LayerNorm",
        families=("t5",),
    ),
    Refusal(
        ("sdpa_attention",),
        r"^(MPNet|DebertaV2)\w+ does not support scaled_dot_product_attention in transformers$",
        "transformers has no SDPA for it; `unpadding` brings its own attention",
        families=("mpnet", "deberta_v2"),
    ),
    Refusal(
        ("sparse_upcycling",),
        r"^sparse_upcycling supports the feed-forward layers of .*, and this is (ALBERT|ModernBERT|T5's encoder)$",
        "its feed-forward layers are shared, or of another kind",
        families=("albert", "modernbert", "t5"),
    ),
    Refusal(
        ("sparse_upcycling",),
        r"^load balancing needs an attention mask of shape \(rows, tokens\), not \(4, 1, 12, 12\)$",
        "the load is balanced over real tokens, which a mask of pairs does not name",
        input="4-D mask",
    ),
)


UNDEFINED = {
    ("sdpa_attention", "modernbert", "classification", "left padding"): "reads each row's first slot",
    ("sdpa_attention", "modernbert", "answering", "right padding"): "has a loss over every slot",
}
"""Technique, family, head and input for which the untouched model's values mean nothing, and what the head does: a
padding slot in whose local window there is no token attends to nothing, where eager attention and SDPA differ."""


FAILING = {("deberta_v2", "4-D mask"): "its embeddings are multiplied by the mask"}
"""Family and input on which the untouched model itself fails, and why."""


def refusal_of(technique: str, family: str, head: str, given: str = "") -> Refusal | None:
    """The line that refuses a combination; None where it works."""
    for line in REFUSALS:
        if (
            technique in line.techniques
            and family in (line.families or (family,))
            and head in (line.head or head,)
            and line.input in ("", given)
        ):
            return line
    return None


def left_padded(family: str, head: str) -> Iterator[str]:
    """The inputs that unpadding leaves as they are: its encoder runs the stock layers, with the stock results."""
    yield from ("4-D mask", "hidden states and attentions")
    if head not in ("tokens", "mlm"):  # each row's first slot is read
        yield "left padding"
    if head == "pooling":  # the labels are its own module's, so that the row may have one
        yield "a row of padding"
    if family in ("modernbert", "deberta_v2"):  # a hole moves tokens into others' windows, and changes distances
        yield "holes"
