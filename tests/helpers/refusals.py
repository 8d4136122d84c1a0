"""The combinations of model families, techniques, heads and inputs that are refused.

``tests/families/test_family_techniques.py`` checks the error of each entry, and compares every other combination with
the untouched model. ``benchmarks/tables.py`` writes docs/FAMILIES.md from this table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

TECHNIQUES = (
    "unpadding",
    "fused_layers",
    "sdpa_attention",
    "fast_layernorm",
    "gradient_checkpointing",
    "torch_compile",
    "layer_freezing",
    "lora",
    "sparse_upcycling",
)
HEADS = {
    "classification": "sequence classification",
    "tokens": "token classification",
    "choice": "multiple choice",
    "answering": "question answering",
    "mlm": "masked LM",
    "pooling": "custom module with mean pooling",
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
    """A refused combination; ``families``, ``head`` and ``input`` are empty for all."""

    techniques: tuple[str, ...]
    error: str  # regular expression of the message
    why: str  # for the documentation
    families: tuple[str, ...] = ()
    head: str = ""
    input: str = ""


REFUSALS = (
    Refusal(
        ("unpadding", "fused_layers"),
        r"unpadding: does not support \w+ForQuestionAnswering, whose loss includes padding positions; ",
        "its loss includes padding positions",
        head="answering",
    ),
    Refusal(
        ("fused_layers",),
        r"fused_layers: cannot fuse every layer: it supports the layers of .* and this model's are T5Block",
        "its kernels do not support pre-norm layers without biases and with a relative position bias",
        families=("t5",),
    ),
    Refusal(
        ("fused_layers",),
        r"fused_layers: cannot fuse every layer: .*, and this model's are EuroBertDecoderLayer",
        "its kernels do not support RMS norms, SiLU and keys that several heads share",
        families=("eurobert",),
    ),
    Refusal(
        ("fused_layers",),
        r"fused_layers: cannot fuse every layer: it supports the layers of .* and this model's are NomicBertLayer",
        "its kernels do not support SiLU and post-norm layers with a gate",
        families=("nomic_bert",),
    ),
    Refusal(
        ("fast_layernorm",),
        r"the model has no torch\.nn\.LayerNorm",
        "their norms are RMS norms",
        families=("t5", "eurobert"),
    ),
    Refusal(
        ("sdpa_attention",),
        r"(MPNet|DebertaV2)\w+ does not support scaled_dot_product_attention in transformers",
        "transformers does not support SDPA for these models; `unpadding` uses its own attention",
        families=("mpnet", "deberta_v2"),
    ),
    Refusal(
        ("layer_freezing",),
        r"the blocks of ALBERT run several times each, so the first of them are the last, too",
        "its blocks run several times each, so only its embeddings can be frozen",
        families=("albert",),
    ),
    Refusal(
        ("layer_freezing",),
        r"\S+\.weight is tied to the embeddings and would be frozen, too; load the model with tie_word_embeddings=F",
        "the head's weights are the embeddings'; `tie_word_embeddings=False` loads it with its own",
        head="mlm",
    ),
    Refusal(
        ("sparse_upcycling",),
        r"sparse_upcycling: the model has 0 feed-forward layers like those of .*, and every=1",
        "their feed-forward layers are shared between blocks, are gated, or have no module for the activation",
        families=("albert", "modernbert", "t5", "esm", "eurobert", "nomic_bert"),
    ),
    Refusal(
        ("sparse_upcycling",),
        r"^load balancing needs an attention mask of shape \(rows, tokens\), not \(4, 1, 12, 12\)$",
        "the load is balanced over real tokens, which a mask of token pairs does not define",
        input="4-D mask",
    ),
)


# Technique, family, head and input for which the untouched model's values are undefined, and what the head reads.
# Padding without real tokens in its local window attends to nothing, and eager attention and SDPA differ there.
UNDEFINED = {
    ("sdpa_attention", "modernbert", "classification", "left padding"): "reads each row's first slot",
    ("sdpa_attention", "modernbert", "answering", "right padding"): "has a loss over every slot",
}
# Family and input for which the untouched model fails, and why.
FAILING = {
    ("deberta_v2", "4-D mask"): "its embeddings are multiplied by the mask",
    ("esm", "4-D mask"): "its embeddings are multiplied by the mask",
}
# Head and the families for which transformers does not have it.
MISSING = {
    "choice": ("esm", "eurobert", "nomic_bert", "jina_embeddings_v3"),
    "answering": ("esm", "eurobert", "nomic_bert"),
}


def refusal_of(technique: str, family: str, head: str, kind: str = "") -> Refusal | None:
    """The entry that refuses a combination; None if it is supported."""
    for line in REFUSALS:
        if (
            technique in line.techniques
            and family in (line.families or (family,))
            and head in (line.head or head,)
            and line.input in ("", kind)
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
    if family in ("modernbert", "deberta_v2", "mpnet", "t5"):  # a hole changes distances, and who is in a window
        yield "holes"
