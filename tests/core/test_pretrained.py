"""Weights are those of the configuration's commit, and have the dtype that was asked for, whatever the dtype of the
stored ones, and reports state it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertForSequenceClassification

from composer_speedups.core import pretrained
from composer_speedups.data.builtin import builtin_reviews
from composer_speedups.data.tokens import load_tokenizer
from composer_speedups.predict.model import FinishedModel
from composer_speedups.tasks.classification import Classification
from composer_speedups.tasks.models import build_model
from composer_speedups.train.config.schema import DataConfig, ModelConfig
from tests.helpers.common import tiny_config
from tests.helpers.jobs import run

OWN = ["model.name=./stored", "model.init=pretrained", "model.size=null", "data.tokenizer=null"]


def stored(dtype: torch.dtype) -> Any:
    """Save a model in ``dtype``, and its tokenizer, in the folder ``stored``; the tokenizer."""
    texts = builtin_reviews(60, 5, "train", 0.15)["text"]
    tokenizer = load_tokenizer(DataConfig(tokenizer="wordpiece", vocab_size=400), "", texts)
    BertForSequenceClassification(tiny_config(vocab_size=len(tokenizer))).to(dtype).save_pretrained("stored")
    tokenizer.save_pretrained("stored")
    return tokenizer


def dtypes(model: torch.nn.Module) -> set[torch.dtype]:
    return {p.dtype for p in model.parameters()}


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("init", ["pretrained", "random"])
@pytest.mark.pins
def test_weights_stored_in_16_bits_are_loaded_or_drawn_in_float32_unless_asked_otherwise(
    kind: torch.dtype, init: Any
) -> None:
    tokenizer = stored(kind)
    for asked, expected in (({}, torch.float32), ({"dtype": "bfloat16"}, torch.bfloat16)):
        settings = ModelConfig(name="./stored", init=init, **asked)  # type: ignore[arg-type]
        model: Any = build_model(settings, Classification(), tokenizer, 16).model
        assert dtypes(model) == {expected}
        assert model.dtype == model.config.dtype == expected


@pytest.mark.parametrize(("commit", "revision"), [(None, "main"), ("c0ffee", "c0ffee")])
def test_weights_and_adapters_are_read_at_the_commit_of_the_configuration(
    commit: str | None, revision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, load = Mock(return_value=None), Mock(return_value=(None, {}))
    monkeypatch.setattr(pretrained, "find_adapter_config_file", find)
    config = SimpleNamespace(_commit_hash=commit)
    pretrained.pretrained_model(SimpleNamespace(from_pretrained=load), "a/model", config, "model.name")
    assert [called.call_args.kwargs["revision"] for called in (find, load)] == [revision] * 2


KAHAN = ["algorithms.kahan_optimizer={}", "algorithms.fused_optimizer=null"]


@pytest.mark.parametrize(
    ("overrides", "weights", "matmul"),
    [([], "float32", "fp32"), *(([*KAHAN, f"model.dtype={t}"], "bfloat16", "bf16") for t in ("float32", "bfloat16"))],
    ids=["float32", "kahan", "kahan from bfloat16"],
)
@pytest.mark.pins
def test_a_run_reports_the_dtype_that_it_trains_and_exports(overrides: list[str], weights: str, matmul: str) -> None:
    """Predictions use float32."""
    stored(torch.float16)
    report, folder = run(*OWN, *overrides, "trainer.max_duration=2ba"), Path("runs/quickstart")
    assert (report["numerics"]["weights"], report["numerics"]["matmul"]) == (weights, matmul)
    exported = load_file(folder / "model/model.safetensors")
    assert {str(w.dtype) for w in exported.values()} == {f"torch.{weights}"}
    assert dtypes(FinishedModel.load(folder).model) == {torch.float32}
