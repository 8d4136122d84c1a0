"""Masked language modelling end to end: batches, evaluation, techniques with a tied head, and export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM

from benchmarks.table_file import configurations_of, read_table
from composer_speedups import FastLayerNorm, FusedOptimizer, MixedPrecision, SDPAAttention, TorchCompile
from composer_speedups.core.errors import Refusal
from composer_speedups.data.loader import build_data
from composer_speedups.tasks.mlm import MaskedLanguageModelling
from composer_speedups.tasks.settings import MLMSettings
from composer_speedups.train.config.load import load_config
from composer_speedups.train.config.schema import DataConfig
from tests.conftest import ROOT
from tests.helpers.common import make_trainer, plain_batches
from tests.helpers.jobs import run
from tests.helpers.models import FAMILIES, Family, fit_batches, tiny_model
from tests.helpers.settings import Case, cases

MLM = ["model.task=mlm", "algorithms=null", "optimizer.lr=3e-3", "trainer.eval_interval=4ep"]


def is_tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_evaluation_always_masks_the_same_tokens_and_training_does_not() -> None:
    config = DataConfig(
        source="builtin",
        train_samples=40,
        eval_samples=24,
        length_scale=0.1,
        tokenizer="wordpiece",
        vocab_size=300,
        max_length=32,
        batch_size=8,
    )
    data = build_data(config, MaskedLanguageModelling(), model_name="unused", on_gpu=False)
    assert data.eval is not None
    drew, passes = [], []
    for loader in (data.eval, data.train):
        batches = iter(loader.dataloader)  # draws one random number, the workers' base seed
        state = torch.get_rng_state()
        first = list(batches)
        drew.append(not torch.equal(torch.get_rng_state(), state))
        passes.append((first, list(loader.dataloader)))
    evaluation, training = passes
    assert drew == [False, True]
    torch.testing.assert_close(evaluation[0], evaluation[1], rtol=0, atol=0)
    masks = [batch["labels"] != -100 for batch in evaluation[0]]
    assert not torch.equal(masks[0], masks[1]), "batches have different masks"
    shares = torch.tensor(
        [float(m.sum() / b["attention_mask"].sum()) for m, b in zip(masks, evaluation[0], strict=True)]
    )
    assert 0.08 < shares.mean() < 0.22
    assert not all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(*training, strict=True))


def test_a_run_learns_reports_and_exports_a_tied_masked_lm() -> None:
    first = run(*MLM, "trainer.max_duration=1ba", "run_name=first")
    report = run(*MLM, "trainer.max_duration=4ep")
    assert report["metrics"]["loss"] < first["metrics"]["loss"] - 0.1
    assert report["metrics"]["accuracy"] > first["metrics"]["accuracy"]
    assert {"train_loss", "train_accuracy"} <= set(report["metrics"])
    exported = AutoModelForMaskedLM.from_pretrained("runs/quickstart/model")
    assert is_tied(exported)
    assert json.loads(Path("runs/quickstart/model/config.json").read_text())["architectures"] == ["BertForMaskedLM"]


def test_the_yaml_is_the_posts_job_on_the_data_of_bert_imdb() -> None:
    mlm, classifier = (load_config(ROOT / "yamls" / f"{name}.yaml") for name in ("bert_mlm", "bert_imdb"))
    assert (mlm.task.name, classifier.task.name) == ("mlm", "classification")
    for key in ("hub_name", "train_samples", "eval_samples", "max_length", "seed"):
        assert getattr(mlm.data, key) == getattr(classifier.data, key)
    assert (mlm.data.batch_size, mlm.optimizer.lr, mlm.task) == (48, 1e-4, MLMSettings())
    assert set(mlm.algorithms) == {*classifier.algorithms, "sdpa_attention"}


def test_the_benchmark_has_the_posts_four_configurations_and_batch_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMDB_DIR", "imdb")
    table = read_table(ROOT / "benchmarks" / "tables" / "mlm.yaml")
    configurations = configurations_of(table)
    assert {configuration.name for configuration in configurations} == {"AMP", "compile", "flash", "flash + compile"}
    assert {configuration.point["data.batch_size"] for configuration in configurations} == {32, 48}
    for configuration in configurations:
        config = load_config(ROOT / table.base, configuration.overrides)
        assert config.task.name == "mlm"
        assert config.algorithms["mixed_precision"] == {"dtype": "fp16"}
        assert ("sdpa_attention" in config.algorithms) == ("flash" in configuration.name)
        assert ("torch_compile" in config.algorithms) == ("compile" in configuration.name)


@pytest.mark.parametrize("case", cases())
def test_every_technique_trains_a_masked_lm_and_keeps_its_head_tied(case: Case) -> None:
    model: Any = tiny_model("bert", "mlm")
    assert is_tied(model)
    *others, technique = case.build_all()
    if technique.name == "layer_freezing":  # the embeddings that it freezes are the head's, too
        with pytest.raises(Refusal, match="is tied to the embeddings and would be frozen"):
            make_trainer([*others, technique], model=model)
        return
    trainer = make_trainer([*others, technique], model=model, batches=fit_batches(model, plain_batches(2)))
    trainer.fit()
    trainer.close()
    assert technique.engaged is True
    assert float(trainer.state.total_loss_dict["loss/train/total"]) < 10
    if case.entry.stock_checkpoint:
        assert is_tied(trainer.state.model.model)


@pytest.mark.parametrize(
    "family", [name if name == "bert" else pytest.param(name, marks=pytest.mark.exhaustive) for name in FAMILIES]
)
def test_techniques_together_keep_the_head_tied(family: Family) -> None:
    """The techniques of bert_mlm.yaml that run on a CPU, and fast_layernorm."""
    model: Any = tiny_model(family, "mlm", dropout=0.1)
    techniques = [
        MixedPrecision("bf16", allow_cpu=True),
        FastLayerNorm(),
        FusedOptimizer(),
        SDPAAttention(),
        TorchCompile(backend="aot_eager"),
    ]
    names = [name for name, _ in model.named_parameters()]
    before = model.get_input_embeddings().weight.detach().clone()
    trainer = make_trainer(techniques, model=model, batches=fit_batches(model, plain_batches(3)))
    trainer.fit()
    trainer.close()
    assert all(t.engaged for t in techniques)
    assert is_tied(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert not torch.equal(model.get_input_embeddings().weight, before), "the tied weight is trained"
