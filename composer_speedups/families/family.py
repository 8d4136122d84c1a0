"""What a model family of transformers is made of: each family has a file in this folder that declares it.

The file is called as transformers calls the family's folder and holds one :class:`Family` by the name ``FAMILY``.
Nothing else in the package names a class of transformers' models. Nothing here imports torch: the kernels are compiled
from a model's config.json in a process that should not wait for it.
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

__all__ = [
    "DropoutRates",
    "Family",
    "GatedLayerModules",
    "LayerModules",
    "Reads",
    "config_value",
    "default_head_reads",
    "families",
    "family_named",
    "family_of",
    "family_titles",
    "kernel_shape",
]


class Reads(Enum):
    """What a head reads of an encoder's last hidden state."""

    LABELLED_TOKENS = "each slot with a label, whatever the attention mask says"
    REAL_TOKENS = "nothing that is computed for padding"
    FIRST_TOKEN = "each row's first slot, and nothing else"
    UNKNOWN = "each row's first slot, as far as is known"
    PADDING = "every slot, padding too"
    DECODER = "it is a decoder's"


_USUAL_HEADS = {
    "ForMaskedLM": Reads.LABELLED_TOKENS,
    "ForTokenClassification": Reads.LABELLED_TOKENS,
    "ForSequenceClassification": Reads.FIRST_TOKEN,
    "ForQuestionAnswering": Reads.PADDING,
    "ForCausalLM": Reads.DECODER,
    "LMHeadModel": Reads.DECODER,
}


def default_head_reads(model_class: str, config: Any) -> Reads:
    """What the head of a model reads, by the end of its class's name."""
    return next((reads for end, reads in _USUAL_HEADS.items() if model_class.endswith(end)), Reads.UNKNOWN)


class LayerModules(NamedTuple):
    """The modules of a block with post-norms, and its number of attention heads."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    out: nn.Linear
    attention_norm: nn.LayerNorm
    up: nn.Linear
    down: nn.Linear
    output_norm: nn.LayerNorm
    heads: int

    def parameters(self) -> list[Tensor]:
        """Weight and bias of each, in the order that the fused layer takes them."""
        return [p for module in self[:-1] for p in (module.weight, module.bias)]  # type: ignore[union-attr]


class GatedLayerModules(NamedTuple):
    """The modules of a block with pre-norms and a gated feed-forward layer, none with a bias; its number of attention
    heads; and how many tokens before and after it a token attends to, None for all.

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
        """The weights, in the order that the fused layer takes them."""
        modules = (self.qkv, self.out, self.up, self.down, self.attention_norm, self.output_norm)
        return [module.weight for module in modules if module is not None]


class DropoutRates(NamedTuple):
    """Probabilities of dropping: attention weights, the attention's output, and the block's output, or, of a gated
    feed-forward layer, its inner units."""

    weights: float
    attention: float
    output: float


def _buffered_positions(embeddings: Any, ids_BS: Tensor) -> Tensor:
    return embeddings.position_ids[:, : ids_BS.shape[1]].contiguous()  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family. Classes are named as in its ``modeling_`` module.

    Attributes:
        name: transformers' folder of it, and its ``model_type`` but for hyphens.
        title: As people write it.
        encoder: The class that runs the blocks and is given the attention mask.
        blocks: The encoder's attribute that lists them, each once, however often it is run.
        layer: A block's class.
        attention: The class of a block's attention module, where ``packed_attention`` takes its place.
        embeddings: The class that turns ids into the first hidden state.
        query_and_value: Names of the Linear modules of these two, in a block; those that LoRA adapts by default.
        feed_forward: Where the module that holds a feed-forward layer has its first Linear, its activation and its
            second Linear; None where that layer is of another kind.
        parts: Block → its modules (:class:`GatedLayerModules` if ``gated``); None if ``fused_layers`` does not support
            the block.
        position_table: Block with disentangled attention, and relative embeddings (P, H) → keys and queries of
            positions (P, 2·A·D); None for attention of another kind.
        refuses: Encoder → what it has that cannot run on packed tokens; None where it can.
        gated: Whether a block has pre-norms, rotary positions and a gated feed-forward layer.
        dropouts: Block → for each of :class:`DropoutRates`, the module whose mode decides and the one that holds the
            probability, or None where nothing is dropped.
        positions: Embeddings and ids (B, S) → position ids (B, S) or (1, S).
        reads: Name of a model's class and its config → what its head reads.
        packed_encoder: The class that makes the encoder run on packed tokens; None is
            :class:`~.packed_encoder.UnpaddedEncoder`.
        packed_attention: The class that makes an attention module take packed tokens; None where transformers'
            attention interface reaches it.
        hidden, inner, heads, embedding: Keys of config.json: widths, and the number of attention heads.
        activation: Key of the feed-forward layer's activation.
        attention_dropout, attention_output_dropout, hidden_dropout: Keys of the probabilities of dropping attention
            weights, attention's output (None: never), and the outputs of blocks and embeddings.
    """

    name: str
    title: str
    encoder: str
    blocks: str = "layer"
    layer: str
    attention: str = ""
    embeddings: str
    query_and_value: tuple[str, ...]
    feed_forward: tuple[str, str, str] | None = None
    parts: Callable[[Any], Any] | None = None
    gated: bool = False
    position_table: Callable[[Any, Tensor], Tensor] | None = None
    refuses: Callable[[Any], str | None] = lambda _: None
    dropouts: Callable[[Any], list[tuple[nn.Module, nn.Dropout] | None]] | None = None
    positions: Callable[[Any, Tensor], Tensor] = _buffered_positions
    reads: Callable[[str, Any], Reads] = default_head_reads
    packed_encoder: type[Any] | None = None
    packed_attention: type[Any] | None = None
    hidden: str = "hidden_size"
    inner: str = "intermediate_size"
    heads: str = "num_attention_heads"
    embedding: str = "hidden_size"
    activation: str = "hidden_act"
    attention_dropout: str = "attention_probs_dropout_prob"
    attention_output_dropout: str | None = "hidden_dropout_prob"
    hidden_dropout: str = "hidden_dropout_prob"

    def has(self, role: str, kind: type) -> bool:
        """Whether a class is the family's ``"encoder"``, ``"layer"``, ``"attention"`` or ``"embeddings"``; a subclass
        is not."""
        module = f"transformers.models.{self.name}.modeling_{self.name}"
        return (kind.__module__, kind.__qualname__) == (module, getattr(self, role))


@cache
def family_named(name: str) -> Family | None:
    """The family of a ``model_type``; None for one without a file here."""
    name = name.replace("-", "_")  # "xlm-roberta" lies in xlm_roberta
    if name not in _names():
        return None
    family = importlib.import_module(f"composer_speedups.families.{name}").FAMILY
    assert isinstance(family, Family)
    return family


def family_of(kind: type) -> Family | None:
    """The family of a class of transformers', or of the first such one that a class derives from."""
    for each in kind.__mro__:
        if each.__module__.startswith("transformers.models."):
            return family_named(each.__module__.split(".")[2])
    return None


@cache
def families() -> list[Family]:
    """All of them, by name."""
    return [family for name in _names() if (family := family_named(name)) is not None]


@cache
def _names() -> list[str]:
    """Every module here that has a FAMILY, found without importing it."""
    folder = Path(__file__).parent
    modules = sorted(module.name for module in pkgutil.iter_modules([str(folder)]))
    return [name for name in modules if "\nFAMILY = " in (folder / f"{name}.py").read_text()]


def family_titles(known: Callable[[Family], Any] = lambda _: True) -> str:
    """The families for which ``known`` is true, for a sentence: "BERT, ELECTRA and RoBERTa"."""
    *others, last = [family.title for family in families() if known(family)]
    return f"{', '.join(others)} and {last}"


def config_value(config: Any, key: str, default: Any = None) -> Any:
    """A setting of a model's configuration, under the name that its family gives it.

    Args:
        config: A configuration of transformers.
        key: The attribute of :class:`Family` that holds the name. For an unknown family, any family's name will do.
        default: Where it has none.
    """
    known = family_named(str(getattr(config, "model_type", "")))
    for family in families() if known is None else [known]:
        value = getattr(config, getattr(family, key), None)
        if value is not None:
            return value
    return default


def kernel_shape(config: Mapping[str, Any]) -> Shape:
    """What the fused kernels are compiled for, from what transformers writes to config.json.

    Raises:
        KeyError: A family without fused kernels, or a key that is left out.
    """
    family = family_named(config["model_type"])
    if family is None or family.parts is None or family.gated or family.position_table is not None:
        raise KeyError(config["model_type"])
    dropped = family.attention_output_dropout
    return Shape(
        hidden=config[family.hidden],
        inner=config[family.inner],
        heads=config[family.heads],
        weights=config[family.attention_dropout],
        attention=0.0 if dropped is None else config[dropped],
        output=config[family.hidden_dropout],
        embedding=config[family.embedding],
        embedded=config[family.hidden_dropout],
    )
