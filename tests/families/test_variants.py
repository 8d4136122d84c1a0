"""Models with other settings, heads and adapters than those of test_family_techniques.py: one table of variants.

Each is compared with the untouched model, unpadded and, where its family has fused layers, fused. A second table lists
the models that are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    T5ForConditionalGeneration,
    T5ForQuestionAnswering,
    T5ForSequenceClassification,
)
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from composer_speedups import GradientCheckpointing, Unpadding
from composer_speedups.algorithms.unpadding.encoder_swap import restore_encoders, unpad
from composer_speedups.core.engaging import engage
from composer_speedups.core.run import Run
from composer_speedups.families.deberta_v2 import _entries
from composer_speedups.kernels.common import counting
from tests.families.test_family_techniques import TECHNIQUE, Watch, draw, outcome, structure
from tests.helpers.common import Batch, tiny_bert
from tests.helpers.exhaustive import DEFAULT_FAMILIES, others_exhaustive
from tests.helpers.models import FUSED, HEADS, ROTARY, UNPADDED, Family, tiny_model
from tests.helpers.refusals import INPUTS, left_padded
from tests.helpers.unpadded import way
from tests.reference.loop import counted
from tests.reference.tolerance import assert_near

pytestmark = pytest.mark.pins
MASK, PAD = 3, 1  # tokens of the tiny ESM
RECORDS = "hidden states and attentions"


def masked_tokens(inputs: Batch) -> Batch:
    """The batch with a different number of masked tokens in each row, by which ESM-2 scales the row."""
    if "input_ids" not in inputs:
        return inputs
    ids = inputs["input_ids"].clone()
    for row, count in enumerate((2, 4, 0, 1)):
        places = (ids[row] != PAD).nonzero().flatten()[1 : count + 1]
        ids[row, places] = MASK
    return {**inputs, "input_ids": ids}


def wider(inputs: Batch) -> Batch:
    """The batch with as many slots of padding as it had slots."""
    inputs = {name: torch.cat([values, torch.zeros_like(values)], 1) for name, values in inputs.items()}
    inputs["labels"][:, 12:] = -100
    return inputs


def adapted(bias: str) -> Callable[[Any], Any]:
    """Wrap the model by PEFT with adapters of some size, as after training."""

    def adapt(model: Any) -> Any:
        torch.manual_seed(3)
        sizes: dict[str, Any] = {"r": 4, "lora_alpha": 12, "rank_pattern": {"query": 2, "query_proj": 2}}
        config = LoraConfig(target_modules="all-linear", init_lora_weights=False, bias=bias, **sizes)  # type: ignore[arg-type]
        return get_peft_model(model, config)

    return adapt


def with_one_layer_twice(model: Any) -> Any:
    model.model.layers[1] = model.model.layers[0]
    return model


def recorded(model: Any) -> Any:
    """transformers installs its recording hooks at the first call that requests records."""
    model(torch.tensor([[2, 3]]), output_hidden_states=True)
    return model


class Variant(NamedTuple):
    family: Family
    settings: Mapping[str, Any] = MappingProxyType({})
    heads: tuple[str, ...] = HEADS
    kinds: tuple[str, ...] = ("right padding",)
    padded: tuple[str, ...] | None = None  # kinds of input that run padded, where they are not those of the family
    prepare: Callable[[Any], Any] = lambda model: model  # of the untouched model, too
    inputs: Callable[[Batch], Batch] = lambda inputs: inputs
    techniques: Callable[[], list[Any]] | None = None
    recomputed: int = 0  # blocks


DEBERTA: dict[str, dict[str, Any]] = {
    "separate position projections": {"share_att_key": False},
    "relative embeddings without a norm": {"norm_rel_ebd": "none"},
    "with absolute positions": {"position_biased_input": True},
    "new masked-LM head": {"legacy": False},
    "no buckets": {"position_buckets": -1},
    "distances beyond the maximum": {"position_buckets": -1, "max_relative_positions": 5},
    "projected embeddings": {"embedding_size": 16},
}
SHARED_KEYS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
ESM_INPUTS = tuple(kind for kind in INPUTS if kind not in ("token types", "4-D mask", "a row of padding"))
POOLED = ("right padding", "left padding", "holes", "no mask", "position ids")
CLASSIFIER, TOKENS = ("classification",), ("tokens",)
VARIANTS = {name: Variant("deberta_v2", settings) for name, settings in DEBERTA.items()}
VARIANTS |= {
    f"esm, {positions} positions": Variant(
        "esm",
        # as ESM-2 and ESM-1b have them
        {"position_embedding_type": positions, "token_dropout": True, "emb_layer_norm_before": positions == "absolute"},
        kinds=ESM_INPUTS,
        inputs=masked_tokens,
    )
    for positions in ("rotary", "absolute")
}
VARIANTS |= {
    f"eurobert, {pooling} pooling": Variant(
        "eurobert", {"classifier_pooling": pooling, **SHARED_KEYS}, CLASSIFIER, POOLED, padded=()
    )
    for pooling in ("mean", "late")
}
VARIANTS |= {
    "modernbert, mean pooling": Variant(
        "modernbert",
        {"classifier_pooling": "mean"},
        CLASSIFIER,
        ("right padding", "left padding"),
        padded=(),
        techniques=TECHNIQUE["unpadding"],
    ),
    "modernbert, one layer twice": Variant(
        "modernbert", prepare=with_one_layer_twice, techniques=TECHNIQUE["unpadding"]
    ),
    # The untouched model derives dynamic angles from the padded width, which no row reaches here.
    "eurobert, dynamic angles": Variant(
        "eurobert", {"rope_parameters": DYNAMIC, "max_position_embeddings": 8}, TOKENS, inputs=wider
    ),
    "t5": Variant("t5", {}, TOKENS),
    "t5, gated": Variant("t5", {"is_gated_act": True, "dense_act_fn": "gelu_new"}, TOKENS),
    "albert, two groups of two layers": Variant(
        "albert",
        {"num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2},
        techniques=lambda: [Unpadding(8, check="never"), GradientCheckpointing(every=2)],
        recomputed=2,
    ),
}
for _family in UNPADDED:
    VARIANTS |= {
        f"{_family}, recomputed": Variant(
            _family,
            heads=CLASSIFIER,
            techniques=lambda: [Unpadding(8, check="never"), GradientCheckpointing()],
            recomputed=2,
        ),
        f"{_family}, hidden states in the config": Variant(
            _family, {"output_hidden_states": True}, CLASSIFIER, padded=("right padding",)
        ),
        f"{_family}, hidden states requested before": Variant(
            _family, heads=CLASSIFIER, kinds=(RECORDS,), prepare=recorded
        ),
    }
    if Version(transformers.__version__) >= Version("5.17"):
        VARIANTS[f"{_family}, hidden states by index"] = Variant(
            _family,
            heads=CLASSIFIER,
            padded=("right padding",),
            inputs=lambda inputs: {**inputs, "output_hidden_states": [1]},  # type: ignore[dict-item]
        )
ADAPTED = [family for family in FUSED if family not in ("modernbert", "esm")]
VARIANTS |= {
    f"{family}, adapters with bias {bias}": Variant(
        family,
        kinds=("right padding", "left padding", "holes", "no padding", "a row of padding"),
        prepare=adapted(bias),
    )
    for family in ADAPTED
    for bias in ("none", "lora_only")
}


@pytest.mark.parametrize(
    "name",
    others_exhaustive(
        VARIANTS, lambda name: VARIANTS[name].family in DEFAULT_FAMILIES and not name.endswith("bias none")
    ),
)
def test_a_variant_matches_the_untouched_model(name: str) -> None:
    variant = VARIANTS[name]
    family = variant.family
    for head in variant.heads:
        reference = variant.prepare(tiny_model(family, head, **variant.settings).train())  # type: ignore[arg-type]
        model = copy.deepcopy(reference)
        technique = "fused_layers" if family in FUSED and variant.techniques is None else "unpadding"
        engage(Run(torch.device("cpu"), model=model), (variant.techniques or TECHNIQUE[technique])())
        for kind in variant.kinds:
            what = f"{name} with {head} and {kind}"
            inputs = variant.inputs(draw(family, head, kind))
            watch = Watch(technique, model)
            with counting() as watch.ran:
                values, gradients = outcome(model, inputs, kind)
            expected = outcome(copy.deepcopy(reference), inputs, kind)  # transformers leaves hooks
            assert_near(values, expected[0], what=what)
            if kind != "eval mode":
                assert_near(gradients, expected[1], what=f"gradients of {what}")
            padded = kind in (left_padded(family, head) if variant.padded is None else variant.padded)
            watch.check(family, head, kind, padded)
            assert watch.ran["recomputed_block"] == variant.recomputed
            if kind == "right padding":
                assert_near(outcome(model, counted(model, inputs), kind)[1], expected[1], what=f"{what}, counted")


def with_another_attention(model: Any) -> Any:
    attention = model.mpnet.encoder.layer[1].attention
    attention.attn.__class__ = type("Mine", (type(attention.attn),), {})
    return model


def t5_config() -> Any:
    return tiny_model("t5", "tokens").config


SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
POSITIONS = "DeBERTa-v2/v3 with other positions than"
UNSUPPORTED: list[tuple[Callable[[], Any], str]] = [
    (lambda: tiny_model("deberta_v2", conv_kernel_size=3), r"DeBERTa-v2/v3 with a convolution .*conv_kernel_size"),
    (lambda: tiny_model("deberta_v2", pos_att_type=["c2p"]), POSITIONS),
    (lambda: tiny_model("deberta_v2", relative_attention=False), POSITIONS),
    (lambda: with_another_attention(tiny_model("mpnet")), "MPNet with another attention than MPNetSelfAtt"),
    (lambda: T5ForConditionalGeneration(t5_config()), "T5ForConditionalGeneration, which is a decoder$"),
    (lambda: T5ForSequenceClassification(t5_config()), "T5ForSequenceClassification, which is a decoder$"),
    (lambda: T5ForQuestionAnswering(t5_config()), "T5ForQuestionAnswering, which is a decoder$"),
    (lambda: BertLMHeadModel(BertConfig(vocab_size=64, is_decoder=True, **SIZES)), "decoder"),
    (lambda: tiny_bert().bert.encoder, "BertEncoder is only the encoder"),
    (lambda: nn.Linear(2, 2), "without transformers' modules"),
]


@pytest.mark.parametrize(("build", "error"), UNSUPPORTED)
def test_an_unsupported_model_is_refused_and_not_changed(build: Callable[[], Any], error: str) -> None:
    model = build()
    before = structure(model)
    with pytest.raises(ValueError, match=error):
        unpad(model)
    assert structure(model) == before


# What one family alone has.


@pytest.mark.parametrize(("buckets", "furthest"), [(6, 80), (256, 512), (-1, 20)])
def test_entries_match_the_relative_positions_of_transformers(buckets: int, furthest: int) -> None:
    width, span = 150, buckets if buckets > 0 else furthest
    entries = _entries(256, buckets, furthest, torch.device("cpu"))
    slots = torch.zeros(1, width, 1)
    distances = build_relative_position(slots, slots, buckets, furthest)[0]
    expected = (distances + span).clamp(0, 2 * span - 1)
    positions = torch.arange(width)
    torch.testing.assert_close(entries[positions[:, None] - positions + 256].long(), expected)
    assert (entries.diff() >= 0).all(), "the kernel sums over an entry's distances, which must be contiguous"


@pytest.mark.exhaustive
def test_esm_computes_the_other_rows_of_a_batch_with_an_empty_row() -> None:
    """The untouched model divides that row's masked tokens by its length, 0; its gradients are NaN."""
    reference = tiny_model("esm", "mlm", token_dropout=True).train()
    whole = masked_tokens(draw("esm", "mlm", "a row of padding"))
    others = {name: values[[0, 1, 3]] for name, values in whole.items()}
    model = copy.deepcopy(reference)
    unpad(model, 8)
    actual, expected = outcome(model, whole, ""), outcome(reference, others, "")
    assert_near([actual[0]["loss"]], [expected[0]["loss"]])
    assert_near(actual[1], expected[1])
    assert not all(gradient.isfinite().all() for gradient in outcome(reference, whole, "")[1].values())


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ROTARY)
def test_a_bare_rotary_model_returns_what_the_untouched_one_does(family: Family) -> None:
    """Its output has the same fields, the pooled one included."""
    reference: Any = type(tiny_model(family, "tokens").base_model)(tiny_model(family).config).eval()
    model = copy.deepcopy(reference)
    unpad(model, 8)
    inputs = draw(family, "tokens", "right padding")
    real = inputs["attention_mask"].bool()
    del inputs["labels"]
    with torch.no_grad(), counting() as seen:
        actual, expected = model(**inputs), reference(**inputs)
    assert way(seen) == "packed"
    assert (type(actual), actual.keys()) == (type(expected), expected.keys())
    assert_near(actual.last_hidden_state[real], expected.last_hidden_state[real])
    if family in ("esm", "jina_embeddings_v3"):
        assert_near(actual.pooler_output, expected.pooler_output)
    assert restore_encoders(model) == [""]
