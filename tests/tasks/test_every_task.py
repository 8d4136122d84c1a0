"""Tests that every task passes: train.py, two ranks, FSDP, streams, tune, and a Trainer in code."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, BertForMaskedLM, DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from composer_speedups import FusedLayers, FusedOptimizer, Unpadding
from composer_speedups.data.builtin import builtin_samples
from composer_speedups.sweep import sets, tune
from composer_speedups.tasks.mlm import MaskedLanguageModelling
from composer_speedups.tasks.models import FinetuneModel
from composer_speedups.train import application
from composer_speedups.train.config.load import load_config
from tests.conftest import ROOT
from tests.data.samples import save
from tests.helpers.common import Recorder, trained
from tests.helpers.hangs import HANGS
from tests.helpers.jobs import SHORT, assert_resumes_exactly, run
from tests.helpers.ranks import on_ranks, once_per_run
from tests.helpers.support import TASKS
from tests.helpers.texts import collated, tiny_encoder, tokenizer_of
from tests.helpers.wandb_runs import missing_in, read_wandb
from tests.reference.loop import train_plainly
from tests.reference.tolerance import assert_near

# Composer warns about short batches.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot split .* of length:UserWarning")
EVERY = pytest.mark.parametrize("task", TASKS)
CLASSIFICATION_FIRST = pytest.mark.parametrize(
    "task", [task if task == "classification" else pytest.param(task, marks=pytest.mark.exhaustive) for task in TASKS]
)
FAST = ["algorithms.sdpa_attention=null", "algorithms.unpadding={}", "algorithms.fused_layers={}"]
# Two batches without dropout. With this eps, AdamW does not amplify rounding errors of gradients.
BRIEF = ["data.train_samples=16", "trainer.max_duration=2ba", "trainer.device=cpu", "optimizer.eps=1e-3", *FAST]
WANDB = ["loggers.wandb={mode: offline}", "callbacks.throughput.warmup_batches=0"]
WAYS = {"one": WANDB, "two ranks": [], "FSDP": ["trainer.fsdp.shard=full"]}


def brief(task: str, name: str, *overrides: str) -> dict[str, Any]:
    """Train two batches of the quickstart in the run folder ``name``; return the report."""
    return run(f"model.task={task}", *BRIEF, *overrides, f"run_name={name}")


def weights(name: str, folder: Path = Path()) -> dict[str, Tensor]:
    return load_file(folder / "runs" / name / "model/model.safetensors")


@contextlib.contextmanager
def every_fourth_token_masked() -> Iterator[None]:
    """Mask tokens 1, 5, 9, … of each row within this context, because random masks differ between ranks."""

    def masked(self: Any, inputs: Tensor, special: Tensor, offsets: Any = None) -> tuple[Tensor, Tensor]:
        chosen = ~special & (torch.arange(inputs.shape[1]) % 4 == 1)
        return inputs.masked_fill(chosen, self.tokenizer.mask_token_id), inputs.masked_fill(~chosen, -100)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataCollatorForLanguageModeling, "torch_mask_tokens", masked)
        yield


def all_tasks(way: str) -> dict[str, dict[str, Any]]:
    with every_fourth_token_masked():
        return {task: brief(task, f"{way.replace(' ', '')}_{task}", *WAYS[way]) for task in TASKS}


Reports = dict[str, dict[str, dict[str, Any]]]  # by way and task


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once_per_run(lambda: tmp_path_factory.mktemp("every_task"), "every_task", tmp_path_factory)


@pytest.fixture(scope="module")
def one(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the reports of one process by task."""
    with contextlib.chdir(folder):
        return once_per_run(lambda: all_tasks("one"), "every_task one", tmp_path_factory)


@pytest.fixture(scope="module")
def two(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Return the reports of two ranks by way and task."""

    def compute() -> Reports:
        return on_ranks(lambda: {way: all_tasks(way) for way in ("two ranks", "FSDP")})[0]

    with contextlib.chdir(folder):
        return once_per_run(compute, "every_task two", tmp_path_factory)


@EVERY
@pytest.mark.supports("train.py")
def test_a_run_reports_the_metrics_that_its_dashboard_shows(
    task: str, one: dict[str, dict[str, Any]], folder: Path
) -> None:
    report = one[task]
    assert {name for name in report["metrics"] if not name.startswith("train_")} == set(TASKS[task].metrics)
    assert report["training"]["batches"] == 2
    assert all(entry["engaged"] for entry in report["algorithms"].values())
    assert set(report["algorithms"]) == {"unpadding", "fused_layers", "fused_optimizer"}
    seen = read_wandb(folder / "runs" / f"one_{task}")
    assert seen.name == f"one_{task}"
    # built-in pairs have no scores; yamls/stsb_embedding.yaml is a run with the third metric
    assert missing_in(seen, task) == ({"metrics/eval/SpearmanCorrCoef"} if task == "embedding" else set())


@EVERY
def test_transformers_4_reads_the_exported_tokenizer_and_cuts_texts_to_the_model(
    task: str, one: dict[str, dict[str, Any]], folder: Path
) -> None:
    """It looks up ``tokenizer_class`` among its own, and passes the other settings to that class."""
    exported = folder / "runs" / f"one_{task}" / "model"
    settings = json.loads((exported / "tokenizer_config.json").read_text())
    assert settings.pop("tokenizer_class") == "PreTrainedTokenizerFast"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(exported / "tokenizer.json"), **settings)
    positions = json.loads((exported / "config.json").read_text())["max_position_embeddings"]
    length = one[task]["config"]["data"]["max_length"] if task == "reranking" else positions
    short, long = ("a good film", "a good film " * positions)
    assert len(tokenizer(long, truncation=True)["input_ids"]) == length <= positions
    assert tokenizer(short)["input_ids"] == AutoTokenizer.from_pretrained(exported)(short)["input_ids"]


@EVERY
@pytest.mark.exhaustive
@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.supports(way)) for way in ("two ranks", "FSDP")])
def test_ranks_train_as_one_process(task: str, way: str, one: dict[str, Any], two: Reports, folder: Path) -> None:
    assert (one[task]["training"]["ranks"], two[way][task]["training"]["ranks"]) == (1, 2)
    stock = weights(f"one_{task}", folder)
    assert_near(weights(f"{way.replace(' ', '')}_{task}", folder), stock, what="weights")
    for name in TASKS[task].metrics:  # rounding may reorder the 16 samples
        assert two[way][task]["metrics"][name] == pytest.approx(one[task]["metrics"][name], rel=1e-3, abs=1e-2), name


@CLASSIFICATION_FIRST
@pytest.mark.supports("stream")
def test_a_stream_trains_as_from_memory_and_resumes_exactly(task: str) -> None:
    """One batch holds all rows, so that their order does not matter. The learning rate is 0 in the first batch."""
    samples = builtin_samples(task, 8, 1, "train", 0.1)
    save(samples, "rows.jsonl")
    texts = [value for values in samples.values() for value in values if isinstance(value, (str, list))]
    tokenizer_of([text if isinstance(text, str) else " ".join(text) for text in texts]).save_pretrained("words")
    files = ["data.source=files", "data.train_file=rows.jsonl", "data.eval_file=rows.jsonl", "data.tokenizer=words"]
    files += ["data.train_samples=null", "trainer.eval_interval=1ba", "scheduler.name=constant"]
    streaming = [*files, "data.streaming=true"]
    with every_fourth_token_masked():
        memory = brief(task, "memory", *files)
        stream = brief(task, "stream", *streaming)
    assert stream["training"]["samples"] == memory["training"]["samples"] == 16
    assert stream["metrics"]["train_loss"] == pytest.approx(memory["metrics"]["train_loss"], rel=1e-5)
    assert_near(weights("stream"), weights("memory"), what="weights")

    several = [*streaming, "data.batch_size=4", "model.dropout=0.1", "trainer.max_duration=4ba"]
    quickstart = (f"model.task={task}", *BRIEF, *several, "checkpoint.interval=2ba")
    assert_resumes_exactly(*quickstart, checkpoints=["ep0-ba2"])


@CLASSIFICATION_FIRST
@pytest.mark.supports("tune")
def test_tune_writes_a_yaml_that_trains(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sets.SETS, "cpu", {"rounding": {"foreach": {"foreach_optimizer": {}}}})
    job = ["-f", str(ROOT / "yamls" / "quickstart.yaml"), *SHORT, f"model.task={task}", "trainer.max_duration=400ba"]
    job += ["trainer.device=cpu", "algorithms.fused_optimizer=null", "algorithms.sdpa_attention=null"]
    tune.main([*job, f"tune.budget_seconds={HANGS:.0f}", "tune.steps=8"])
    log = json.loads(Path("quickstart.tuned.json").read_text())
    assert [trial["status"] for trial in log["trials"]] == ["ok"]
    assert log["trials"][0]["step_seconds"] > 0
    tuned = load_config("quickstart.tuned.yaml")
    assert (tuned.task.name, tuned.algorithms) == (task, log["algorithms"])
    application.main(["-f", "quickstart.tuned.yaml", "trainer.max_duration=2ba", "trainer.eval_batches=1"])
    assert json.loads(Path("runs/quickstart/report.json").read_text())["training"]["batches"] == 2


@pytest.mark.supports("in code", task="mlm")
def test_mlm_trains_in_a_composer_trainer_like_plain_pytorch() -> None:
    task = MaskedLanguageModelling(mlm_probability=0.3)
    texts = builtin_samples("mlm", 18, 1, "train", 0.1)["text"]
    tokenizer = tokenizer_of(texts)
    torch.manual_seed(1)
    batches = [collated(task, [{"text": text} for text in texts[i : i + 6]], tokenizer, 32) for i in (0, 6, 12)]
    stock = tiny_encoder(tokenizer, kind=BertForMaskedLM)
    model = FinetuneModel(stock, task, tokenizer, 32).train()
    expected = train_plainly(stock, batches)
    recorder = Recorder()
    techniques = [Unpadding(8), FusedLayers(), FusedOptimizer()]
    trained(techniques, model=model, batches=batches, callbacks=[recorder])
    assert all(technique.engaged for technique in techniques)
    assert_near(recorder.losses, expected.losses, what="losses")
    assert_near(recorder.first_gradients, expected.first_gradients, what="gradients")
