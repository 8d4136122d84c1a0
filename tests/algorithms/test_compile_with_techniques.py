"""Compiling Triton kernels while Python imports: for the model's shapes, and without disturbing the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertForSequenceClassification

from composer_speedups import apply_fused_layers, apply_unpadding
from composer_speedups.algorithms.fused_layers import before_imports
from composer_speedups.algorithms.fused_layers.before_imports import shape_of
from composer_speedups.algorithms.fused_layers.modules import FusedEmbeddings, FusedLayer, modules_shape
from composer_speedups.core.before_imports import PlannedRun, early_work
from composer_speedups.families.family import kernel_shape
from composer_speedups.kernels import Shape
from composer_speedups.tasks.model_names import SIZES
from composer_speedups.train.config.schema import Config
from composer_speedups.train.startup import planned_run
from tests.helpers.jobs import run
from tests.helpers.models import FAMILIES, Family, tiny_model


def fused_shape(model: Any) -> Shape:
    apply_unpadding(model)
    apply_fused_layers(model)
    layer = next(m for m in model.modules() if isinstance(m, FusedLayer))
    return modules_shape(layer, next(m for m in model.modules() if isinstance(m, FusedEmbeddings)))


@pytest.mark.pins
@pytest.mark.parametrize("family", FAMILIES)
def test_the_shape_from_a_models_folder_matches_its_modules(family: Family) -> None:
    model = tiny_model(family, dropout=0.2, attention_dropout=0.3)
    model.config.save_pretrained("saved")
    assert shape_of({"name": "saved", "size": None, "dropout": None}) == fused_shape(model)


@pytest.mark.parametrize("dropout", [None, 0.0])
def test_the_shape_from_a_size_matches_a_bert_of_that_size(dropout: float | None) -> None:
    layers, hidden, heads = SIZES["mini"]
    config = BertConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * hidden
    )
    if dropout is not None:
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = dropout
    found = shape_of({"name": "unused", "size": "mini", "dropout": dropout})
    assert found == fused_shape(BertForSequenceClassification(config))


def test_unknown_families_and_missing_models_have_no_shape() -> None:
    with pytest.raises(KeyError, match="gpt2"):
        kernel_shape({"model_type": "gpt2"})
    with pytest.raises(FileNotFoundError, match="nobody/nothing"):
        shape_of({"name": "nobody/nothing", "size": None, "dropout": None})


def test_nothing_starts_without_a_gpu_or_the_technique(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(before_imports, "_start", lambda run: pytest.fail("started"))
    config = Config()
    with early_work(planned_run(config)) as early:  # fused_layers is not among bert_imdb.yaml's techniques
        early.wait()
    config.algorithms["fused_layers"] = None
    config.trainer.device = "cpu"
    with early_work(planned_run(config)) as early:
        early.wait()


def test_a_run_continues_if_compiling_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine the process finds no GPU; the run waits for it and ignores its failure."""
    started: list[subprocess.Popen[bytes]] = []
    start = before_imports._start

    def noted(planned: PlannedRun) -> subprocess.Popen[bytes]:
        started.append(start(planned))
        return started[0]

    monkeypatch.setattr(before_imports, "before_torch", noted)
    techniques = "algorithms={unpadding: {}, fused_layers: {}}"
    run("trainer.max_duration=1ba", "data.eval_samples=8", "algorithms.sdpa_attention=null", techniques)
    assert started[0].returncode == 0


def test_it_imports_the_same_modules_as_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports from PYTHONPATH and from a checkout that is not installed, but not from the working directory."""
    for name in ("huggingface_hub", "torch"):
        Path(f"{name}.py").write_text(f"open('{name}-ran', 'w').close()")
    Path("own").mkdir()
    # Imported to find the model's config.json.
    Path("own/huggingface_hub.py").write_text("open('own-ran', 'w').close()")
    monkeypatch.setenv("PYTHONPATH", str(Path("own").absolute()))
    monkeypatch.setattr("sys.path", ["", str(Path("own").absolute()), *sys.path])
    before_imports._start(planned_run(Config())).wait(60)
    assert sorted(path.name for path in Path().glob("*-ran")) == ["own-ran"]


@pytest.mark.parametrize(("modes", "shared"), [("Default\nDefault", True), ("Default\nExclusive_Process", False)])
def test_a_gpu_in_exclusive_mode_is_not_used(
    modes: str, shared: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{modes}\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert before_imports._shared_gpus() is shared
    monkeypatch.setenv("PATH", "/nowhere")
    assert not before_imports._shared_gpus()


def test_a_failing_run_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(before_imports, "before_torch", before_imports._start)
    planned = planned_run(Config())._replace(algorithms={"fused_layers": {}})
    with pytest.raises(ValueError, match="a mistake"), early_work(planned) as early:
        raise ValueError("a mistake")
    assert [process.returncode for process in early.processes] == [-9]
