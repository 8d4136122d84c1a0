"""Compiling Triton kernels while Python imports: for the model's shapes, and without disturbing the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from composer_speedups.algorithms.fused_layers import before_imports
from composer_speedups.algorithms.fused_layers.before_imports import shape_of
from composer_speedups.algorithms.fused_layers.fusing import fuse
from composer_speedups.algorithms.fused_layers.modules import FusedEmbeddings, FusedLayer, modules_shape
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.families.family import kernel_shape
from composer_speedups.kernels import Shape
from composer_speedups.tasks.settings import SIZES
from composer_speedups.train import application
from composer_speedups.train.config.schema import Config
from composer_speedups.train.startup import early_processes, wait_for
from tests.conftest import ROOT
from tests.helpers.jobs import run
from tests.helpers.models import FAMILIES, Family, tiny_model


def fused_shape(model: Any) -> Shape:
    unpad(model)
    fuse(model)
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
    shape = shape_of({"name": "unused", "size": "mini", "dropout": dropout})
    assert shape == fused_shape(BertForSequenceClassification(config))


def test_unknown_families_and_missing_models_have_no_shape() -> None:
    with pytest.raises(KeyError, match="gpt2"):
        kernel_shape({"model_type": "gpt2"})
    with pytest.raises(FileNotFoundError, match="nobody/nothing"):
        shape_of({"name": "nobody/nothing", "size": None, "dropout": None})


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> Config:
    """Return a config with fused_layers, on a machine that seems to have a GPU."""
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidiactl" or exists(path))
    config = Config()
    config.algorithms["fused_layers"] = None
    return config


def test_nothing_starts_without_a_gpu_or_the_technique_or_on_another_rank(
    with_gpu: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    with early_processes(with_gpu) as processes:
        assert len(processes) == 1
    monkeypatch.setenv("LOCAL_RANK", "1")
    with early_processes(with_gpu) as processes:
        assert processes == []
    monkeypatch.delenv("LOCAL_RANK")
    for config in (Config(), with_gpu):  # fused_layers is not among the defaults
        config.trainer.device = "cpu" if config.algorithms else "auto"
        with early_processes(config) as processes:
            assert processes == []


@pytest.mark.usefixtures("with_gpu")
def test_a_run_continues_if_compiling_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine the process finds no GPU; the run waits for it and ignores its failure."""
    wait = Mock(wraps=wait_for)
    monkeypatch.setattr(application, "wait_for", wait)
    techniques = "algorithms={unpadding: {}, fused_layers: {}}"
    run("trainer.max_duration=1ba", "data.eval_samples=8", "algorithms.sdpa_attention=null", techniques)
    [process] = wait.call_args.args[0]
    assert process.returncode == 0


def test_it_compiles_for_the_runs_precision_and_only_with_a_gpu_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Mock()
    monkeypatch.setattr("composer_speedups.kernels.compile_ahead.compile_ahead", asked)
    model = {"name": "unused", "size": "mini", "dropout": None}
    run = {"algorithms": {"fused_layers": None}, "model": model, "precision": "amp_bf16"}
    monkeypatch.setattr(before_imports, "_shared_gpus", lambda: False)
    before_imports._main(run)
    asked.assert_not_called()
    monkeypatch.setattr(before_imports, "_shared_gpus", lambda: True)
    before_imports._main(run)
    techniques = {"fused_layers": {"precision": "fp8"}, "mixed_precision": {"dtype": "fp16"}}
    before_imports._main({**run, "algorithms": techniques})
    before_imports._main({**run, "precision": "amp_fp16"})
    for lora in ({"rank": 4}, {"targets": ["query"]}):  # the ranks are known if all Linear modules have adapters
        before_imports._main({**run, "algorithms": {"fused_layers": None, "lora": lora}})
    shape, gpu = shape_of(model), torch.device("cuda", 0)
    assert asked.call_args_list == [
        call(shape, torch.bfloat16, gpu, float8=False, ranks=()),
        call(shape, torch.float16, gpu, float8=True, ranks=()),
        call(shape, torch.float16, gpu, float8=False, ranks=()),
        call(shape, torch.bfloat16, gpu, float8=False, ranks=(12, 4, 4, 4)),
        call(shape, torch.bfloat16, gpu, float8=False, ranks=()),
    ]


def test_it_imports_the_same_modules_as_the_run(with_gpu: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports from PYTHONPATH and from a checkout that is not installed, but not from the working directory."""
    for name in ("huggingface_hub", "torch"):
        Path(f"{name}.py").write_text(f"open('{name}-ran', 'w').close()")
    Path("own").mkdir()
    # Imported to find the model's config.json.
    Path("own/huggingface_hub.py").write_text("open('own-ran', 'w').close()")
    monkeypatch.setenv("PYTHONPATH", str(Path("own").absolute()))
    monkeypatch.setattr("sys.path", ["", str(Path("own").absolute()), *sys.path])
    with early_processes(with_gpu) as processes:
        wait_for(processes)
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


def test_a_failing_run_ends_the_process(with_gpu: Config) -> None:
    with pytest.raises(ValueError, match="a mistake"), early_processes(with_gpu) as processes:
        raise ValueError("a mistake")
    assert [process.returncode for process in processes] == [-9]


def test_the_process_and_the_start_of_a_run_need_no_torch() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import composer_speedups.train.startup;"
        "import composer_speedups.algorithms.fused_layers.before_imports; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(ROOT)], check=True)
