"""Family files: their paths and settings match transformers' models, and no other file names transformers' classes."""

from __future__ import annotations

import importlib
import inspect
import io
import tokenize
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

import composer_speedups
from composer_speedups.families.blocks import blocks_of, repeated_blocks
from composer_speedups.families.family import Block, Reads, config_value, families, family_named, family_of
from tests.helpers.exhaustive import family_params
from tests.helpers.models import COPIES, ENCODERS, EVERY, FUSED, HEADS, ROTARY, Family, tiny_model

PACKAGE = Path(composer_speedups.__file__).parent
every_family = pytest.mark.parametrize("name", family_params(EVERY))


def test_every_family_is_in_the_lists_of_test_models() -> None:
    assert {family.name for family in families()} == {*EVERY, *ENCODERS}
    assert {family.name for family in families() if family.block is not None} == {*FUSED, *COPIES}


def get_family(name: str) -> Any:
    return family_named(name)


def modules_with_role(model: nn.Module, role: str) -> list[nn.Module]:
    return [m for m in model.modules() if (family := family_of(type(m))) is not None and family.has(role, type(m))]


@every_family
def test_a_family_file_matches_the_model(name: Family) -> None:
    model, family = tiny_model(name, layers=3), get_family(name)
    assert family_of(type(model)) is family
    (encoder,), layers, embeddings = (modules_with_role(model, role) for role in ("encoder", "layer", "embeddings"))
    assert [*blocks_of(encoder)] == layers == [*repeated_blocks(model).values()]
    assert [any(isinstance(m, nn.Embedding) for m in module.modules()) for module in embeddings] == (
        [] if name == "eurobert" else [True]
    )
    keys = {"inner"} if family.activation is None else {"inner", "activation"}
    assert all(config_value(model.config, key) is not None for key in keys)
    assert all(getattr(family, key) in model.config.to_dict() for key in keys), "config.json has these keys"


@pytest.mark.parametrize("name", family_params([*FUSED, *COPIES]))
def test_modules_and_dropouts_cover_the_whole_block(name: Family) -> None:
    model, family = tiny_model(name, dropout=0.2, attention_dropout=0.3), get_family(name)
    block = modules_with_role(model, "inner_layer" if family.inner_layer else "layer")[0]
    modules = family.layer_modules(block)
    assert {id(p) for p in modules.parameters()} == {id(p) for p in block.parameters()}
    assert (modules.up.out_features, modules.heads) == (64, 2)
    if family.block is Block.GATED or name in ROTARY:  # attention dropout is not a module
        rates = [0.3, 0.3, 0.2] if family.block is Block.GATED else [0.3, 0.2, 0.2]
        assert [dropout[1].p for dropout in family.dropouts(block)] == rates
    held = {
        dropout[1] for dropout in family.dropouts(block) if dropout is not None and isinstance(dropout[1], nn.Module)
    }
    if family.position_table is not None:  # applied to the relative embeddings, an argument of the block
        held.add(block.attention.self.pos_dropout)
    if name == "albert":  # its forward pass does not use this module
        held.add(block.dropout)
    assert held == {m for m in block.modules() if isinstance(m, nn.Dropout)}
    if family.feed_forward is not None:
        up, activation, down = family.feed_forward
        holder = next(m for m in block.modules() if _has(m, up))
        assert (holder.get_submodule(up), holder.get_submodule(down)) == (modules.up, modules.down)
        assert holder.get_submodule(activation)


def _has(module: nn.Module, path: str) -> bool:
    return path in dict(module.named_modules())


@every_family
@pytest.mark.parametrize("head", HEADS)
def test_tokens_that_the_usual_heads_read(name: Family, head: Any) -> None:
    model, family = tiny_model(name, head), get_family(name)
    expected = {"classification": Reads.FIRST_TOKEN, "mlm": Reads.LABELLED_TOKENS}[head]
    assert family.reads(type(model).__name__, model.config) is expected
    assert family.reads("MyOwnModel", model.config) is family.reads("BertForBoth", model.config) is Reads.UNKNOWN
    assert family.reads("BertForQuestionAnswering", model.config) is Reads.PADDING


def test_tokens_that_family_specific_heads_read() -> None:
    electra, modernbert = get_family("electra"), get_family("modernbert")
    assert electra.reads("ElectraForPreTraining", None) is Reads.REAL_TOKENS
    pooled = tiny_model("modernbert", classifier_pooling="mean")
    assert modernbert.reads(type(pooled).__name__, pooled.config) is Reads.REAL_TOKENS
    for pooling in ("mean", "late"):
        pooled = tiny_model("eurobert", classifier_pooling=pooling)
        assert get_family("eurobert").reads(type(pooled).__name__, pooled.config) is Reads.REAL_TOKENS


def test_repeated_blocks_prefers_a_known_encoder_to_the_longest_module_list() -> None:
    class Mine(nn.Module):
        def __init__(self, encoder: nn.Module) -> None:
            super().__init__()
            self.encoder = encoder
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(7))

    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 3}
    assert len(repeated_blocks(Mine(BertModel(BertConfig(vocab_size=8, **sizes))))) == 3
    assert len(repeated_blocks(Mine(nn.Linear(2, 2)))) == 7


def test_unknown_families_and_subclasses() -> None:
    assert family_named("gpt2") is None
    assert family_of(nn.Linear) is None
    bert = get_family("bert")
    assert family_of(type("Mine", (BertModel,), {})) is bert
    layer = type(BertModel(BertConfig(num_hidden_layers=1)).encoder.layer[0])
    assert bert.has("layer", layer)
    assert not bert.has("layer", type("BertLayer", (layer,), {"__module__": __name__}))


def names_in(path: Path) -> set[str]:
    """Return all names and whole string constants of a file."""
    found = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return {token.string.strip("\"'") for token in found if token.type in (tokenize.NAME, tokenize.STRING)}


_ALLOWED = {"tasks": {"Transformer"}}  # a class of sentence-transformers, and also one of DistilBERT


def test_only_the_family_file_names_the_classes_of_a_family() -> None:
    classes: set[str] = set()
    for name in (*EVERY, *ENCODERS):
        modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        own = {
            n for n, member in inspect.getmembers(modeling, inspect.isclass) if member.__module__ == modeling.__name__
        }
        classes |= {modeling.__name__, f"transformers.models.{name}", *own}
    assert {"BertEncoder", "TransformerBlock", "ModernBertModel"} <= classes
    wrong = {
        str(path.relative_to(PACKAGE)): named
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "families"
        if (named := (names_in(path) & classes) - _ALLOWED.get(path.parent.name, set()))
    }
    assert not wrong


@every_family
@pytest.mark.parametrize("side", ["right", "left"])
def test_positions_match_the_embeddings_default(name: Family, side: str) -> None:
    """RoBERTa-like embeddings count only ids that are not padding."""
    if name in ("modernbert", "deberta_v2", *ROTARY):
        pytest.skip("positions are applied inside attention")
    (embeddings,) = modules_with_role(tiny_model(name), "embeddings")
    padding = 0 if embeddings.word_embeddings.padding_idx is None else embeddings.word_embeddings.padding_idx
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, padding, padding]]).flip(-1 if side == "left" else ())
    counted = get_family(name).positions(embeddings, ids)
    torch.testing.assert_close(embeddings(ids), embeddings(ids, position_ids=counted), rtol=0, atol=0)
    assert not torch.equal(embeddings(ids), embeddings(ids, position_ids=counted.flip(-1)))
    padded = name in ("roberta", "xlm_roberta", "camembert", "mpnet")
    assert counted.expand(2, 4)[0].tolist() == ([2, 3, 4, 5] if padded else [0, 1, 2, 3])
