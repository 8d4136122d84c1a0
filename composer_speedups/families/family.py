"""The declaration of a model family. Each family of transformers has a file in this folder that declares it.

The file has the name of the family's folder in transformers, and defines one :class:`Family` named ``FAMILY``. No other
module of the package names a class of transformers' models. Importing this module does not import torch, because a
separate process compiles kernels from a model's config.json before torch is imported.

Shapes: B rows, S slots per row, H hidden units, A heads, D units per head, P entries of the relative-position table.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from composer_speedups.kernels import Shape

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
    """The modules of a pre-norm block with a gated feed-forward layer, all without biases; its number of attention
    heads; and the number of tokens on either side that a token attends to, or None for all.

    ``qkv`` computes queries, keys and values, ``up`` the feed-forward layer's activated half and its gate. The first
    block has no ``attention_norm``.
    """

    qkv: nn.Linear
    out: nn.Linear
    up: nn.Linear
    down: nn.Linear
    attention_norm: nn.LayerNorm | None
    output_norm: nn.LayerNorm
    heads: int
    window: int | None

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


def _buffered_positions(embeddings: Any, ids_BS: Tensor) -> Tensor:
    return embeddings.position_ids[:, : ids_BS.shape[1]].contiguous()  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family. Classes are named as in its ``modeling_`` module.

    Attributes:
        name: The family's folder in transformers, which is its ``model_type`` except for hyphens.
        title: The name for documentation and messages.
        encoder: The class that runs the blocks and receives the attention mask.
        blocks: Path of the encoder's list of the blocks, each once, even if it runs several times.
        layer: The class of a block.
        inner_layer: The class of the layers in a block that runs several times per forward pass; ``fused_layers`` fuses
            them instead of the block. Empty if blocks run once.
        attention: The class of a block's attention module, if ``packed_attention`` replaces it.
        embeddings: The class that turns token ids into the first hidden state.
        repeats_blocks: Whether blocks run several times each.
        around_blocks: Further modules that compute the input of the first block, or that each block reads, as
            ``Class.attribute``; models may lack them.
        feed_forward: Path of the module with the feed-forward layer, and names of its first Linear, its activation and
            its second Linear; None for other kinds of feed-forward layers.
        block: The kind of the blocks, or of their inner layers; None if ``fused_layers`` does not support them.
        layer_modules: With ``block``: block, or its inner layer, → its modules (:class:`GatedLayerModules` if gated).
        position_table: For disentangled attention: block and relative embeddings (P, H) → keys and queries of relative
            positions (P, 2·A·D).
        refuses: Encoder → the reason why it cannot run on packed tokens; None if it can.
        dropouts: Block → for each of :class:`DropoutRates`, the module whose mode decides and the module with the
            probability, or None if there is no dropout.
        positions: Embeddings and ids (B, S) → position ids (B, S) or (1, S).
        reads: Name of a model's class and its config → what its head reads.
        max_width_with_holes: Config → the largest width of a batch in whose rows padding between real tokens does not
            matter; None if it never does. Wider batches with such rows stay padded.
        packed_encoder: The class that runs the encoder on packed tokens; None for
            :class:`~.encoder.UnpaddedEncoder`.
        packed_attention: The class that runs an attention module on packed tokens; None if the module uses
            transformers' attention interface.
        block_flops: Config and real tokens of each row, int64 (rows,) → FLOPs of one forward pass through all blocks;
            None for those of :func:`.flops.block_flops`.
        hidden, inner, heads, embedding: Keys of config.json: widths, and the number of attention heads.
        activation: Key of the feed-forward layer's activation; None if it always is the exact GELU.
        attention_dropout, attention_output_dropout, hidden_dropout: Keys of the dropout probabilities of attention
            weights, of the attention output, and of the outputs of blocks and embeddings; None: no dropout.
    """

    name: str
    title: str
    encoder: str
    blocks: str = "layer"
    layer: str
    inner_layer: str = ""
    attention: str = ""
    embeddings: str
    repeats_blocks: bool = False
    around_blocks: tuple[str, ...] = ()
    feed_forward: tuple[str, str, str] | None = None
    block: Block | None = None
    layer_modules: Callable[[Any], Any] | None = None
    position_table: Callable[[Any, Tensor], Tensor] | None = None
    refuses: Callable[[Any], str | None] = lambda _: None
    dropouts: Callable[[Any], list[tuple[nn.Module, nn.Dropout] | None]] | None = None
    positions: Callable[[Any, Tensor], Tensor] = _buffered_positions
    reads: Callable[[str, Any], Reads] = default_head_reads
    max_width_with_holes: Callable[[Any], int | None] = lambda _: None
    packed_encoder: type[Any] | None = None
    packed_attention: type[Any] | None = None
    block_flops: Callable[[Any, Tensor], int] | None = None
    hidden: str = "hidden_size"
    inner: str = "intermediate_size"
    heads: str = "num_attention_heads"
    embedding: str = "hidden_size"
    activation: str | None = "hidden_act"
    attention_dropout: str = "attention_probs_dropout_prob"
    attention_output_dropout: str | None = "hidden_dropout_prob"
    hidden_dropout: str | None = "hidden_dropout_prob"

    @property
    def has_berts_layers(self) -> bool:
        """Whether the kernels that are compiled ahead fit, and those for BERT's embeddings and for 8 bits."""
        return self.block in (Block.POST_NORM, Block.BIASED)

    def has(self, role: str, kind: type) -> bool:
        """Whether a class is exactly the family's ``"encoder"``, ``"layer"``, ``"inner_layer"``, ``"attention"`` or
        ``"embeddings"`` class."""
        module = f"transformers.models.{self.name}.modeling_{self.name}"
        changed = "_derived_from" in vars(kind)  # by this package, which keeps the names of models
        return not changed and (kind.__module__, kind.__qualname__) == (module, getattr(self, role))


@cache
def family_named(name: str) -> Family | None:
    """The family of a ``model_type``; None if it has no file here."""
    name = name.replace("-", "_")  # "xlm-roberta" is in xlm_roberta.py
    if name not in _names():
        return None
    family = importlib.import_module(f"composer_speedups.families.{name}").FAMILY
    assert isinstance(family, Family)
    return family


def family_of(kind: type) -> Family | None:
    """The family of a transformers class, or of the first base class that has one."""
    for base in kind.__mro__:
        if base.__module__.startswith("transformers.models."):
            return family_named(base.__module__.split(".")[2])
    return None


@cache
def families() -> list[Family]:
    """All families, by name."""
    return [family for name in _names() if (family := family_named(name)) is not None]


@cache
def _names() -> list[str]:
    """The modules of this folder that define a FAMILY, found without importing them."""
    folder = Path(__file__).parent
    modules = sorted(module.name for module in pkgutil.iter_modules([str(folder)]))
    return [name for name in modules if "\nFAMILY = " in (folder / f"{name}.py").read_text()]


def family_titles(known: Callable[[Family], Any] = lambda _: True) -> str:
    """The titles of the families for which ``known`` is true, as in "BERT, ELECTRA and RoBERTa"."""
    *others, last = [family.title for family in families() if known(family)]
    return f"{', '.join(others)} and {last}"


def config_value(config: Any, key: str, default: Any = None) -> Any:
    """A setting of a model's configuration, under the name that its family uses.

    Args:
        config: A transformers configuration.
        key: The attribute of :class:`Family` that holds the name. For unknown families, the names of all families are
            tried.
        default: Returned if the configuration does not have the setting.
    """
    known = family_named(str(getattr(config, "model_type", "")))
    for family in families() if known is None else [known]:
        name = getattr(family, key)
        value = None if name is None else getattr(config, name, None)
        if value is not None:
            return value
    return default


def kernel_shape(config: Mapping[str, Any]) -> Shape:
    """The shapes that the fused kernels are compiled for, from a config.json of transformers.

    Raises:
        KeyError: The family has no fused kernels, or a key is missing.
    """
    family = family_named(config["model_type"])
    if family is None or not family.has_berts_layers:
        raise KeyError(config["model_type"])
    assert family.hidden_dropout is not None
    dropped = family.attention_output_dropout
    return Shape(
        hidden=config[family.hidden],
        inner=config[family.inner],
        heads=config[family.heads],
        attention_weights=config[family.attention_dropout],
        attention=0.0 if dropped is None else config[dropped],
        output=config[family.hidden_dropout],
        embedding=config[family.embedding],
        embedded=config[family.hidden_dropout],
        biased=family.block is Block.BIASED,
    )
