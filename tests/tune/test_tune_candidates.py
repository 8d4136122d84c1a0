"""The table of candidates: complete, as exact as the classes say, and screened without a trial."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composer_speedups.core.catalogue import technique_names
from composer_speedups.core.registry import technique_class
from composer_speedups.core.requirements import Context
from composer_speedups.recommendation import RECOMMENDED
from composer_speedups.train.config.load import load_config
from composer_speedups.train.config.schema import Config
from composer_speedups.tune.candidates import (
    Candidate,
    Refused,
    apply_candidate,
    candidates_for,
    forbidden,
    key_of,
    kind_of,
)
from composer_speedups.tune.trials import OriginalRun
from tests.conftest import ROOT

CPU = Context(torch.device("cpu"))


@pytest.mark.parametrize("name", technique_names())
def test_every_technique_has_valid_trials_or_a_reason_for_none(name: str) -> None:
    technique = technique_class(name)
    assert technique.trials or technique.purpose != "saves time"
    for variant in technique.trials:
        technique(**variant.settings)
        for other, settings in variant.with_techniques.items():
            technique_class(other)(**settings)


@pytest.mark.parametrize(
    ("name", "settings", "device", "expected"),
    [
        ("fused_layers", {}, "cpu", "rounding"),
        ("fused_layers", {}, "cuda", "lower_precision"),
        ("fused_layers", {}, None, "lower_precision"),
        ("bnb_optimizer", {"bits": 32}, "cuda", "rounding"),
        ("bnb_optimizer", {"bits": 32, "stable_embedding": True}, "cuda", "recipe"),
        ("bnb_optimizer", None, "cuda", "recipe"),
        ("early_loss", {}, "cuda", "exact"),
    ],
)
def test_exactness_depends_on_settings_and_device(name: str, settings: Any, device: str | None, expected: str) -> None:
    assert kind_of(name, settings, device) == expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_candidates_are_ordered_by_expected_gain(device: str) -> None:
    candidates = candidates_for({"lora": {}, "torch_compile": {}}, device)
    assert candidates[0].label == "the recommended set"
    added = [c for c in candidates[1:] if not c.removes]
    assert candidates[1:] == [*added, *(c for c in candidates if c.removes)]
    assert [c.gain for c in added] == sorted((c.gain for c in added), reverse=True)
    order = [c.label for c in added]
    assert order.index("sdpa_attention") < order.index("fused_optimizer") < order.index("foreach_optimizer")
    assert "adafactor (saves memory)" in order
    for candidate in added:  # a fallback waits for the refusal of another
        assert candidate.fallback_of is None or order.index(candidate.fallback_of) < order.index(candidate.label)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_labels_are_unique_and_a_set_is_as_inexact_as_its_worst_technique(device: str) -> None:
    candidates = candidates_for({"lora": {}, "torch_compile": {}}, device)
    labels = [c.label for c in candidates]
    assert len(set(labels)) == len(labels)
    by_label = {c.label: c for c in candidates}
    assert by_label["the recommended set"].kind == "lower_precision"
    kernels = by_label["fused_layers with unpadding"].kind  # its kernels on a GPU compute in 16 bits
    assert kernels == ("rounding" if device == "cpu" else "lower_precision")
    assert by_label["without torch_compile"].removes == ("torch_compile",)
    assert "without lora" not in by_label, "the recipe is the user's"


def test_a_candidate_replaces_conflicting_techniques_but_never_the_recipe() -> None:
    unpadding = Candidate("unpadding", {"unpadding": {}})
    assert apply_candidate(unpadding, {"sdpa_attention": {}, "fused_optimizer": {}}) == {
        "fused_optimizer": {},
        "unpadding": {},
    }
    few = {"unpadding": {"pad_to_multiple_of": 512}}
    added = apply_candidate(Candidate("fused", {"unpadding": {}, "fused_layers": {}}), few)
    assert added == {**few, "fused_layers": {}}, "settings that are there stay"
    fused = Candidate("fused", {"unpadding": {}, "fused_layers": {}})
    with pytest.raises(Refused, match="sparse_upcycling is part of the recipe and stays"):
        apply_candidate(fused, {"sparse_upcycling": {}})
    with pytest.raises(Refused, match="already in the set"):
        apply_candidate(Candidate("x", {"torch_compile": {"scope": "model"}}), {"torch_compile": {}})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_recipes_that_freeze_weights_join_the_recommended_set_only_if_recipes_are_allowed(device: str) -> None:
    by_label = {candidate.label: candidate for candidate in candidates_for({}, device)}
    lora, freezing = by_label["lora"], by_label["layer_freezing"]
    assert lora.kind == freezing.kind == "recipe"
    assert forbidden(lora.kind, ["lower_precision"])
    with_lora = apply_candidate(lora, RECOMMENDED)
    assert with_lora == {**RECOMMENDED, "lora": {}}, "the fused layers compute the adapters"
    assert apply_candidate(freezing, RECOMMENDED) == {**RECOMMENDED, "layer_freezing": {}}
    with pytest.raises(Refused, match=r"LoRA already freezes the layers.*lora is part of the recipe and stays"):
        apply_candidate(freezing, with_lora)
    assert not any("sharded_optimizer" in candidate.adds for candidate in by_label.values()), "tune has one process"


def test_the_recommended_set_replaces_a_compiled_one() -> None:
    original = load_config(ROOT / "yamls" / "bert_imdb.yaml").algorithms
    (recommended,) = [c for c in candidates_for(original, "cuda") if c.label == "the recommended set"]
    assert "torch_compile" in original
    assert key_of(apply_candidate(recommended, original)) == key_of(RECOMMENDED)


def test_sets_are_equal_whatever_their_order_and_defaults() -> None:
    one = {"torch_compile": {"scope": "model"}, "sdpa_attention": {}}
    assert key_of(one) == key_of({"sdpa_attention": {"on_unavailable": "warn"}, "torch_compile": {}})
    assert key_of(one) != key_of({"torch_compile": {"scope": "blocks"}, "sdpa_attention": {}})


def test_a_set_that_train_py_would_refuse_has_its_reason() -> None:
    config = Config()
    run = OriginalRun(config, CPU)
    assert "needs a CUDA GPU" in (run.refusal({"tf32_matmul": {}}) or "")
    assert "nothing packs them" in (run.refusal({"fused_layers": {}}) or "")
    assert run.refusal({"fused_layers": {}, "unpadding": {}}) is None
    config.trainer.precision = "amp_bf16"
    assert "both set the precision" in (run.refusal({"mixed_precision": {}}) or "")
    assert "mixed_precision" not in {n for c in candidates_for({}, "cuda", autocast_by_config=True) for n in c.adds}


def test_original_techniques_that_only_warn_are_removed_with_their_reason() -> None:
    run = OriginalRun(Config(on_unavailable="warn", algorithms={"tf32_matmul": {}, "sdpa_attention": {}}), CPU)
    assert run.techniques == {"sdpa_attention": {}}
    assert "CUDA GPU" in run.unengaged["tf32_matmul"]


def test_only_permitted_kinds_of_change_are_tried() -> None:
    assert forbidden("exact", ()) is None
    assert forbidden("rounding", ()) is None
    assert "tune.allow=[lower_precision]" in (forbidden("lower_precision", ()) or "")
    assert forbidden("lower_precision", ("lower_precision",)) is None
    assert "tune.allow=[lower_precision, recipe]" in (forbidden("recipe", ("lower_precision",)) or "")
