"""apply_recommended: results match the untouched model, unsupported techniques are reported, the examples run."""

from __future__ import annotations

import copy
import importlib.util
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2ForSequenceClassification

from composer_speedups import apply_recommended, recommended
from composer_speedups.core.errors import ConfigError, Refusal
from composer_speedups.recommendation import RECOMMENDED
from tests.conftest import ROOT
from tests.helpers.common import awkward_batches
from tests.helpers.exhaustive import family_params, others_exhaustive
from tests.helpers.models import HEADS, UNPADDED, Family, Head, fit_batches, tiny_model
from tests.reference.loop import eval_logits


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", family_params(UNPADDED))
@pytest.mark.pins
def test_logits_losses_and_gradients_match_the_untouched_model(family: Family, head: Head) -> None:
    model = tiny_model(family, head)
    untouched = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        changes = apply_recommended(model).evidence
    assert changes["unpadding"]["encoders"] == 1
    assert ("fused_layers" in changes) == (not any("fused_layers is left out" in str(w.message) for w in caught))
    batches = fit_batches(untouched, awkward_batches())
    for ours, theirs in zip(eval_logits(model, batches), eval_logits(untouched, batches), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for batch in batches:
        losses = [candidate(**batch).loss for candidate in (model, untouched)]
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
        torch.stack(losses).sum().backward()
    gradients = [
        {n: p.grad for n, p in candidate.named_parameters() if p.grad is not None} for candidate in (model, untouched)
    ]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-5)
    assert model.state_dict().keys() == untouched.state_dict().keys()


def test_a_model_that_unpadding_does_not_support_gets_sdpa_and_a_warning() -> None:
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=64, pad_token_id=0)
    model: Any = GPT2ForSequenceClassification._from_config(config, attn_implementation="eager")
    with pytest.warns(
        UserWarning, match=r"left out, and sdpa_attention is used instead: unpadding: supports .* this is gpt2$"
    ):
        applied = apply_recommended(model)
    assert set(applied.evidence) == {"sdpa_attention"}
    assert model.config._attn_implementation == "sdpa"


def test_fp8_changes_nothing_but_the_precision_of_the_fused_layers() -> None:
    plain, eight = map(repr, recommended("warn")), map(repr, recommended("warn", "fp8"))
    [(before, after)] = [pair for pair in zip(plain, eight, strict=True) if pair[0] != pair[1]]
    assert before.startswith("FusedLayers(")
    assert after == before.replace("precision='bf16'", "precision='fp8'")
    wrong: Any = "fp16"
    for on_unavailable in ("warn", "stop"):
        with pytest.raises(ConfigError, match=r"^FusedLayers: precision must be 'bf16' or 'fp8', not 'fp16'$"):
            recommended(on_unavailable, wrong)


def test_without_a_gpu_the_set_is_refused_before_a_trainer_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Refusal, match=r"^recommended: this machine has no CUDA GPU, .* apply_recommended\(model\)"):
        recommended()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [t.on_unavailable for t in recommended()] == ["stop"] * len(RECOMMENDED)


def test_a_module_without_a_transformers_model_is_an_error() -> None:
    for model in ("bert", nn.Linear(2, 2)):
        with pytest.raises(ValueError, match=r"^apply_recommended: found no transformers model in (str|Linear);"):
            apply_recommended(model)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    others_exhaustive(
        ["plain_loop", "hf_trainer", "sentence_transformers_trainer"], lambda name: "sentence" not in name
    ),
)
def test_an_example_matches_the_stock_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("sentence"):
        pytest.importorskip("sentence_transformers", reason="needs sentence-transformers (dev group)")
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, example)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of other libraries' Trainers
        spec.loader.exec_module(example)
        few = ["--samples", "24", "--batch-size", "8", *(["--dropout", "0"] if name.startswith("sentence") else [])]
        ours, stock = example.main(few), example.main([*few, "--stock"])
    assert len(ours) == 3
    assert ours == pytest.approx(stock, rel=2e-3)
