"""Every YAML of the repository parses, builds, and briefly runs; hub names stand for local folders here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from datasets import Dataset

from composer_speedups.data.builtin import builtin_reviews
from composer_speedups.data.tokens import load_tokenizer
from composer_speedups.train.config.load import load_config
from composer_speedups.train.config.schema import DataConfig
from tests.conftest import ROOT
from tests.helpers.common import tiny_bert
from tests.helpers.jobs import run

YAMLS = sorted(p.stem for p in (ROOT / "yamls").glob("*.yaml"))

# The YAMLs' own jobs, cut down to what a CPU does in seconds. Their techniques stay.
BRIEF = [
    "data.train_samples=12",
    "data.eval_samples=4",
    "data.batch_size=4",
    "data.eval_batch_size=4",
    "data.max_length=16",
    "data.workers=0",
    "data.persistent_workers=false",
    "trainer.max_duration=2ba",
    "scheduler.warmup=1ba",
    "trainer.progress_bar=false",
    "on_unavailable=warn",
]


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local folders under the names that the YAMLs use on the hub, and IMDB_DIR."""
    reviews = builtin_reviews(30, 1, "train", 0.1)
    for folder in ("stanfordnlp/imdb", "imdb"):
        Path(folder).mkdir(parents=True)
        for split in ("train", "test"):
            pyarrow.parquet.write_table(pyarrow.table(reviews), f"{folder}/{split}.parquet")
    monkeypatch.setenv("IMDB_DIR", "imdb")
    tokenizer = load_tokenizer(DataConfig(tokenizer="wordpiece", vocab_size=150), "", Dataset.from_dict(reviews))
    config = tiny_bert().config
    config.vocab_size = len(tokenizer)
    for size in ("base", "large"):
        type(tiny_bert())(config).save_pretrained(f"google-bert/bert-{size}-uncased")
        tokenizer.save_pretrained(f"google-bert/bert-{size}-uncased")


@pytest.mark.parametrize("name", YAMLS)
def test_it_parses_and_names_its_own_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMDB_DIR", "imdb")
    assert load_config(ROOT / "yamls" / f"{name}.yaml").run_name == name


@pytest.mark.parametrize("name", YAMLS)
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.filterwarnings("ignore:going on without:UserWarning")
@pytest.mark.pins
def test_it_runs(name: str) -> None:
    overrides = list(BRIEF)
    techniques = load_config(ROOT / "yamls" / f"{name}.yaml").algorithms
    if "torch_compile" in techniques:
        overrides.append("algorithms.torch_compile.backend=eager")
    report = run(*overrides, yaml=name, short=False)
    assert report["training"]["batches"] == 2
    assert 0 <= report["metrics"]["accuracy"] <= 1
    assert set(report["algorithms"]) == set(techniques)
    for technique, entry in report["algorithms"].items():
        assert entry["engaged"] or "unavailable" in entry["evidence"], technique
    if not torch.cuda.is_available():  # a GPU's YAML goes on in fp32, and says so
        assert report["numerics"]["matmul"] == "fp32"
        assert not any(report["algorithms"].get(t, {}).get("engaged") for t in ("mixed_precision", "tf32_matmul"))


def test_the_posts_job_is_the_default_of_both_bert_yamls() -> None:
    fast, honest = (load_config(ROOT / "yamls" / f"bert_imdb{suffix}.yaml") for suffix in ("", "_fp32"))
    for config in (fast, honest):
        assert config.model.name == "google-bert/bert-base-uncased"
        assert (config.data.train_samples, config.data.eval_samples, config.data.max_length) == (8000, 8000, 256)
        assert (config.data.batch_size, config.optimizer.lr, config.optimizer.weight_decay) == (40, 1e-4, 1e-2)
        assert (config.scheduler.name, config.trainer.max_duration) == ("cosine", "2ep")
    assert honest.algorithms == {}
    assert honest.trainer.precision == "fp32"
    assert {"tf32_matmul", "mixed_precision", "torch_compile"} <= set(fast.algorithms)


@pytest.mark.gpu
def test_fp32_means_fp32_on_a_gpu() -> None:
    overrides: list[Any] = ["model.size=tiny", "model.init=random", "data.source=builtin", "data.tokenizer=wordpiece"]
    report = run(*overrides, *BRIEF, yaml="bert_imdb_fp32", short=False)
    assert report["numerics"] == {"precision": "fp32", "matmul": "fp32", "float32_matmul_precision": "highest"}
    assert json.loads(Path("runs/bert_imdb_fp32/report.json").read_text())["throughput"]["peak"]["precision"] == "fp32"
