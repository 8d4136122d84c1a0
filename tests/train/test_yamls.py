"""Every YAML file parses, builds and trains two batches, with every logger; local folders replace the hub.

The default suite trains three of them: the fastest set, a CSV file, and a task whose data the comment's code writes.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from composer_speedups.train.config.load import load_config
from tests.conftest import ROOT
from tests.helpers.jobs import run
from tests.helpers.stand_ins import make_stand_ins
from tests.helpers.wandb_runs import missing_in, read_wandb

YAMLS = sorted(str(p.relative_to(ROOT / "yamls").with_suffix("")) for p in (ROOT / "yamls").rglob("*.yaml"))
BY_DEFAULT = ("bert_imdb_fast", "custom", "msmarco_reranking")
TRAINED = [pytest.param(name, marks=[] if name in BY_DEFAULT else pytest.mark.exhaustive) for name in YAMLS]

# Shorten a YAML file's job to seconds on a CPU, without changing its techniques.
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
    "callbacks.throughput.warmup_batches=0",
    "loggers.wandb={mode: offline}",
    "loggers.tensorboard={}",
    "loggers.file={}",
]


# YAML or task → the reported metrics that its comment names
METRICS = {
    "glue/cola": ["matthews", "macro_f1", "accuracy"],
    "glue/mrpc": ["accuracy", "binary_f1"],
    "glue/qqp": ["accuracy", "binary_f1"],
    "regression": ["pearson", "spearman"],
    "token_classification": ["entity_f1"],
    "reranking": ["mrr@10", "ndcg@10"],
    "embedding": ["spearman"],
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    make_stand_ins(folder)
    return folder


@pytest.fixture
def stand_ins(hub: Path, datasets_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put local folders under the hub names that the YAML files use, and set IMDB_DIR."""
    for folder in hub.iterdir():
        Path(folder.name).symlink_to(folder)
    monkeypatch.setenv("IMDB_DIR", "imdb")


@pytest.mark.parametrize("name", YAMLS)
def test_a_yaml_parses_and_sets_its_run_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMDB_DIR", "imdb")
    assert load_config(ROOT / "yamls" / f"{name}.yaml").run_name == name.replace("/", "_")


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.filterwarnings("ignore:continuing without:UserWarning")
@pytest.mark.pins
def test_a_yaml_trains(name: str) -> None:
    overrides = list(BRIEF)
    config = load_config(ROOT / "yamls" / f"{name}.yaml")
    techniques = config.algorithms
    if name == "custom":
        Path("data").mkdir()
        rows = [f'"Text {i}, of some kind",{kind}' for i in range(20) for kind in ("complaint", "praise", "question")]
        Path("data/train.csv").write_text("\n".join(["text,label", *rows]))
    elif name == "msmarco_reranking":
        _run_the_comments_code(name)
        overrides.append("data.max_length=64")
    if "torch_compile" in techniques:
        overrides.append("algorithms.torch_compile.backend=eager")
    report = run(*overrides, yaml=name, short=False)
    assert report["training"]["batches"] == 2
    measured = METRICS.get(name, METRICS.get(config.task.name, ["accuracy"]))
    assert all(-1 <= report["metrics"][metric] <= 1 for metric in measured)
    assert set(report["algorithms"]) == set(techniques)
    for technique, entry in report["algorithms"].items():
        assert entry["engaged"] or "unavailable" in entry["evidence"], technique
    if not torch.cuda.is_available():  # GPU techniques do not engage on a CPU
        assert report["numerics"]["matmul"] == "fp32"
        assert not any(report["algorithms"].get(t, {}).get("engaged") for t in ("mixed_precision", "tf32_matmul"))
    _check_loggers(report, Path("runs") / name.replace("/", "_"), config.task.name)


def _check_loggers(report: dict[str, Any], folder: Path, task: str) -> None:
    """Every logger has the end of the run, and a dashboard finds what it shows."""
    seen = read_wandb(folder)
    absent = {
        "metrics/eval/BinaryF1": task == "classification" and "binary_f1" not in report["metrics"],  # of two classes
        **dict.fromkeys(["metrics/eval/Recall@1", "metrics/eval/Recall@10", "summary/recall@10"], task == "embedding"),
    }
    assert missing_in(seen, task) == {key for key, expected in absent.items() if expected}
    for name, entry in report["algorithms"].items():
        for key, value in {"engaged": entry["engaged"], **entry["evidence"]}.items():
            assert seen.config[f"techniques/{name}/{key}"] == value, "as in the report"
    events = EventAccumulator(str(next((folder / "tensorboard").rglob("events*")).parent))
    events.Reload()
    speed = seen.summary["summary/samples_per_sec"]
    assert events.Scalars("summary/samples_per_sec")[-1].value == pytest.approx(speed)
    assert f"summary/samples_per_sec: {speed:.4f}" in (folder / "log-rank0.txt").read_text()


def _run_the_comments_code(name: str) -> None:
    """Run the code in a YAML file's comment, which writes its data files."""
    lines = (ROOT / "yamls" / f"{name}.yaml").read_text().splitlines()
    code = textwrap.dedent("\n".join(line[1:] for line in lines if line.startswith("#     ") or line == "#"))
    exec(code, {})


def test_both_bert_yamls_are_the_posts_job() -> None:
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
    report = run(*overrides, *BRIEF, "loggers.wandb=null", yaml="bert_imdb_fp32", short=False)
    numerics = {"weights": "float32", "precision": "fp32", "matmul": "fp32", "float32_matmul_precision": "highest"}
    assert report["numerics"] == numerics
    assert report["throughput"]["peak"]["precision"] == "fp32"
