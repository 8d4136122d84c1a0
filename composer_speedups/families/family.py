"""The declaration of a model family, and the table of all families, each of which a file of this folder declares.

No module outside of this folder names a class of transformers' models.

Shapes: B rows, S slots per row, H hidden units, A heads, D units per head, P entries of the relative-position table.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn


class Reads(Enum):
    """Which positions of an encoder's last hidden state a head reads."""

    LABELLED_TOKENS = "each slot with a label, regardless of the attention mask"
    REAL_TOKENS = "no outputs at padding positions"
    FIRST_TOKEN = "each row's first slot, and nothing else"
    UNKNOWN = "each row's first slot, as far as is known"
    PADDING = "every slot, including padding"
    DECODER = "it is a decoder's"


_USUAL_HEADS = {
    "ForMaskedLM": Reads.LABELLED_TOKENS,
    "ForTokenClassification": Reads.LABELLED_TOKENS,
    "ForSequenceClassification": Reads.FIRST_TOKEN,
    "ForQuestionAnswering": Reads.PADDING,
    "ForCausalLM": Reads.DECODER,
    "LMHeadModel": Reads.DECODER,
}


class Block(Enum):
    """The kinds of blocks that ``fused_layers`` computes."""

    POST_NORM = "BERT's"
    BIASED = "BERT's, with a bias by distance that is added to the scores, as a PositionBias"
    DISENTANGLED = "BERT's, with DeBERTa's disentangled attention"
    ROTARY = "BERT's, with queries and keys that are rotated by their positions"
    PRE_NORM = "pre-norms, BERT's feed-forward layer, and rotary or absolute positions"
    GATED = "pre-norms, rotary positions, and a gated feed-forward layer without biases"


def default_head_reads(model_class: str, config: Any) -> Reads:
    """What a model's head reads, by the suffix of its class's name."""
    return next((reads for end, reads in _USUAL_HEADS.items() if model_class.endswith(end)), Reads.UNKNOWN)


def pooling_head_reads(model_class: str, config: Any) -> Reads:
    """As :func:`default_head_reads`, for families whose heads for whole texts may pool all real tokens."""
    pools_real_tokens = getattr(config, "classifier_pooling", None) in ("mean", "late")
    if pools_real_tokens and model_class.endswith(("ForSequenceClassification", "ForMultipleChoice")):
        return Reads.REAL_TOKENS
    return default_head_reads(model_class, config)


class LayerModules(NamedTuple):
    """The modules of a block without a gated feed-forward layer, and its number of attention heads."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    out: nn.Linear
    attention_norm: nn.LayerNorm
    up: nn.Linear
    down: nn.Linear
    output_norm: nn.LayerNorm
    heads: int

    def linears(self) -> list[nn.Linear]:
        """The six Linears, without the norms."""
        return [self.query, self.key, self.value, self.out, self.up, self.down]

    def parameters(self) -> list[Tensor]:
        """Weight and bias of each module, contiguous, in the order in which the fused layer takes them."""
        return [p.contiguous() for module in self[:-1] for p in (module.weight, module.bias)]  # type: ignore[union-attr]


class GatedLayerModules(NamedTuple):
    """The modules of a pre-norm block with a gated feed-forward layer, all without biases."""

    qkv: nn.Linear
    out: nn.Linear
    up: nn.Linear  # the feed-forward layer's activated half, and its gate
    down: nn.Linear
    attention_norm: nn.LayerNorm | None  # None in the first block
    output_norm: nn.LayerNorm
    heads: int
    window: int | None  # the number of tokens on either side that a token attends to; None for all

    def parameters(self) -> list[Tensor]:
        """The weights, contiguous, in the order in which the fused layer takes them."""
        modules = (self.qkv, self.out, self.up, self.down, self.attention_norm, self.output_norm)
        return [module.weight.contiguous() for module in modules if module is not None]


class DropoutRates(NamedTuple):
    """Dropout probabilities of the attention weights, the attention output, and the block's output (of a gated
    feed-forward layer: its inner units)."""

    attention_weights: float
    attention: float
    output: float


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family. Classes are named as in its ``modeling_`` module."""

    name: str  # the family's folder in transformers, which is its model_type except for hyphens
    title: str  # for documentation and messages
    encoder: str  # the class that runs the blocks and receives the attention mask
    blocks: str = "layer"  # path of the encoder's list of the blocks, each once
    layer: str  # the class of a block
    # The class of the layers in a block that runs several times per forward pass, which fused_layers fuses instead.
    inner_layer: str = ""
    attention: str = ""  # the class of a block's attention module, if packed_attention replaces it
    embeddings: str  # the class that turns token ids into the first hidden state; empty for torch's
    # Further modules that compute the first block's input, or that each block reads, as "Class.attribute"; models may
    # lack them.
    around_blocks: tuple[str, ...] = ()
    # Paths of the feed-forward layer's first Linear, its activation and its second Linear; None for other kinds.
    feed_forward: tuple[str, str, str] | None = None
    # The kind of the blocks, or of their inner layers (None if fused_layers does not support them), and a function that
    # returns the modules of one.
    block: Block | None = None
    layer_modules: Callable[[Any], Any] | None = None
    # For each of DropoutRates, the module whose mode decides and the one with the probability; None for no dropout.
    dropouts: Callable[[Any], list[tuple[nn.Module, nn.Dropout] | None]] | None = None
    # Of disentangled attention: block and relative embeddings (P, H) → keys and queries of positions (P, 2·A·D).
    position_table: Callable[[Any, Tensor], Tensor] | None = None
    refuses: Callable[[Any], str | None] = lambda _: None  # encoder → why it cannot run on packed tokens
    # Embeddings e, ids (B, S) → (B, S) or (1, S).
    positions: Callable[[Any, Tensor], Tensor] = lambda e, ids_BS: e.position_ids[:, : ids_BS.shape[1]].contiguous()
    reads: Callable[[str, Any], Reads] = default_head_reads  # name of a model's class, config → what its head reads
    # Config → the largest batch width at which padding between real tokens does not change the result, None for any
    # width. Wider batches with such rows stay padded.
    max_width_with_holes: Callable[[Any], int | None] = lambda _: None
    packed_encoder: type[Any] | None = None  # runs the encoder on packed tokens; None for UnpaddedEncoder
    packed_attention: type[Any] | None = None  # and an attention module; None if it uses transformers' interface
    # Config, real tokens of each row (rows,) → FLOPs of a forward pass through all blocks; None for flops.block_flops.
    block_flops: Callable[[Any, Any], int] | None = None
    # Keys of config.json: the feed-forward layer's width, and its activation (None: always the exact GELU).
    inner: str = "intermediate_size"
    activation: str | None = "hidden_act"

    @property
    def has_berts_layers(self) -> bool:
        """Whether the kernels compiled ahead, BERT's embedding kernel and the 8-bit kernels support the family."""
        return self.block in (Block.POST_NORM, Block.BIASED)

    def has(self, role: str, kind: type) -> bool:
        """Whether a class is exactly the family's class for a role: ``"encoder"``, ``"layer"`` or another field."""
        module = f"transformers.models.{self.name}.modeling_{self.name}"
        changed = "_derived_from" in vars(kind)  # by this package, which keeps the names of models
        return not changed and (kind.__module__, kind.__qualname__) == (module, getattr(self, role))


# Family → its file in this folder, which defines it as a constant: the family "bert" is bert.BERT.
_FILES = {name: name for name in ("deberta_v2", "esm", "eurobert", "modernbert", "mpnet", "t5")}
_FILES |= dict.fromkeys(("albert", "bert", "camembert", "distilbert", "electra", "roberta", "xlm_roberta"), "bert")
_FILES |= dict.fromkeys(("jina_embeddings_v3", "nomic_bert"), "rotary")


@cache
def family_named(name: str) -> Family | None:
    """The family of a ``model_type``; None if it is not known."""
    name = name.replace("-", "_")  # "xlm-roberta" is in transformers.models.xlm_roberta
    if name not in _FILES:
        return None
    family: Family = getattr(importlib.import_module(f"composer_speedups.families.{_FILES[name]}"), name.upper())
    return family


def family_of(kind: type) -> Family | None:
    """The family of a transformers class, or of the first base class that has one."""
    for base in kind.__mro__:
        if base.__module__.startswith("transformers.models."):
            return family_named(base.__module__.split(".")[2])
    return None


def families() -> list[Family]:
    """All families, by name."""
    return [family for name in sorted(_FILES) if (family := family_named(name)) is not None]


def family_titles(known: Callable[[Family], Any] = lambda _: True) -> str:
    """The titles of the families for which ``known`` is true, as in "BERT, ELECTRA and RoBERTa"."""
    *others, last = [family.title for family in families() if known(family)]
    return f"{', '.join(others)} and {last}"


def config_value(config: Any, key: str, default: Any = None) -> Any:
    """A setting of a transformers configuration under the name that its family has in the field ``key``; for unknown
    families, under each family's name."""
    known = family_named(str(getattr(config, "model_type", "")))
    for family in families() if known is None else [known]:
        name = getattr(family, key)
        value = None if name is None else getattr(config, name, None)
        if value is not None:
            return value
    return default
