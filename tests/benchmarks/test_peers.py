"""The peers train the job that train.py trains, step for step, and are measured by the same code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.devices import DeviceCPU
from transformers import DataCollatorWithFlattening, RobertaConfig

from benchmarks.peers import bare_loop, flattened_loop, transformer_engine
from benchmarks.peers.job import build_job, plan_of
from benchmarks.peers.meter import Meter
from benchmarks.proteins import write_proteins
from composer_speedups.callbacks.throughput import PhaseClock, ThroughputMonitor
from composer_speedups.core.errors import ConfigError
from composer_speedups.data.builtin import builtin_reviews
from composer_speedups.train.config.load import load_config
from tests.conftest import ROOT
from tests.helpers.jobs import SHORT, run
from tests.helpers.models import tiny_model

pytest.importorskip("accelerate", reason="HF Trainer needs accelerate; pip install '.[bench]' in a clone")

pytest.importorskip("sentence_transformers", reason="needs pip install '.[bench]' in a clone")

from benchmarks.peers import hf_trainer, sentence_trainer  # behind importorskip

QUICKSTART = ["-f", str(ROOT / "yamls" / "quickstart.yaml"), *SHORT]
SHAPE = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
JOB = ["data.train_samples=24", "data.eval_samples=16", "trainer.max_duration=2ep", "loggers.file={}"]


def peer(module: Any, *overrides: str, name: str = "peer") -> dict[str, Any]:
    module.main([*QUICKSTART, *JOB, f"run_name={name}", *overrides])
    return json.loads((Path("runs") / name / "report.json").read_text())


def losses_of_ours() -> list[float]:
    log = Path("runs/quickstart/log-rank0.txt").read_text()
    return [float(value) for value in re.findall(r"loss/train/total: ([\d.]+)", log)]


UNCLIPPED = ["optimizer.max_grad_norm=null", "optimizer.decay_bias_and_norm=true"]


@pytest.mark.parametrize("overrides", [[], pytest.param(UNCLIPPED, marks=pytest.mark.exhaustive)])
def test_peers_train_the_same_steps_and_report_the_same_keys(overrides: list[str]) -> None:
    ours = run(*JOB, *overrides)
    for module in (bare_loop, flattened_loop, hf_trainer):
        report = peer(module, *overrides)
        assert len(report["losses"]) == ours["training"]["batches"] == 6
        torch.testing.assert_close(report["losses"], losses_of_ours(), atol=6e-5, rtol=0)  # the log has four digits
        for name in ("loss", "accuracy", "train_loss"):
            assert report["metrics"][name] == pytest.approx(ours["metrics"][name], abs=2e-5)
        assert set(report) - {"losses"} == set(ours)
        for section in ("throughput", "memory", "training", "environment", "numerics"):
            assert set(report[section]) == set(ours[section])
        for name in ("tokens_per_sec", "samples_per_sec", "step_seconds"):
            assert report["throughput"][name] > 0
        assert report["throughput"]["eval_seconds"] > 0
        assert [e["batch"] for e in report["evaluations"]] == [e["batch"] for e in ours["evaluations"]]
        assert report["evaluations"][-1]["accuracy"] == report["metrics"]["accuracy"]
        assert 0 < report["evaluations"][-1]["seconds"] <= report["wall_seconds"]
        assert report["throughput"]["padding_fraction"] == pytest.approx(ours["throughput"]["padding_fraction"])
        assert report["training"] | {"microbatch_size": 8} == ours["training"]
        assert report["memory"]["peak_gib"] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["esm", "modernbert"])
def test_peers_train_the_same_steps_of_other_families(family: str, tmp_path: Path) -> None:
    """ESM on generated proteins, some of which are cut off and some padded; ModernBERT with mean pooling and local
    layers, whose windows are narrower than the texts."""
    job = [f"model.name={tmp_path}", "model.size=null", "model.init=random", "trainer.max_duration=3ba"]
    if family == "esm":
        write_proteins(tmp_path, 48, **SHAPE, num_hidden_layers=2)
        job += ["data.source=files", "data.tokenizer=null", f"data.train_file={tmp_path}/train.parquet"]
        job += ["data.eval_samples=null", "data.max_length=256"]
    else:
        config = tiny_model("modernbert", classifier_pooling="mean", vocab_size=400, max_position_embeddings=256).config
        config.save_pretrained(tmp_path)
        job += ["model.dropout=null"]
    ours, expected = run(*JOB, *job), losses_of_ours()
    assert ours["throughput"]["padding_fraction"] > 0
    for module, attention in ((flattened_loop, "torch"), (hf_trainer, "sdpa"))[: 2 if family == "esm" else 1]:
        report = peer(module, *job)
        torch.testing.assert_close(report["losses"], expected, atol=6e-5, rtol=0)
        assert report["training"] | {"microbatch_size": 8} == ours["training"]
        ((_, entry),) = report["algorithms"].items()
        assert entry["evidence"]["attention"] == attention


@pytest.mark.exhaustive
def test_the_bare_loop_trains_with_the_files_techniques() -> None:
    techniques = "{unpadding: {}, foreach_optimizer: {}, torch_compile: {scope: blocks, backend: eager}}"
    job = [f"algorithms={techniques}", "algorithms.sdpa_attention=null", "algorithms.fused_optimizer=null"]
    job += ["trainer.max_duration=1ep", "data.train_samples=16"]
    ours = run(*JOB, *job)
    torch._dynamo.reset()  # else the second would find the code compiled
    bare = peer(bare_loop, *job)
    torch.testing.assert_close(bare["losses"], losses_of_ours(), atol=6e-5, rtol=0)
    evidence = bare["algorithms"]["bare_loop"]["evidence"]
    applied = [name.partition("(")[0] for name in evidence["techniques"]]
    assert applied == ["Unpadding", "ForEachOptimizer", "TorchCompile"]
    assert evidence["graphs"] == ours["algorithms"]["torch_compile"]["evidence"]["graphs"] > 0


def test_work_that_is_queued_at_the_end_counts_as_the_last_step() -> None:
    now = [0.0]

    class Queued(torch.Tensor):
        """A loss that the GPU has only after five seconds."""

        def __float__(self) -> float:
            now[0] += 5.0
            return 1.0

    config = load_config(ROOT / "yamls" / "quickstart.yaml")
    job = build_job(config, on_gpu=False)
    meter = Meter(config, job.model, DeviceCPU())
    (monitor,) = (c for c in meter.state.callbacks if isinstance(c, ThroughputMonitor))
    monitor.clock = PhaseClock(lambda: now[0])
    meter.begin(torch.optim.SGD(job.model.parameters()), batches=2)
    for batch, _ in zip(job.train, range(2), strict=False):
        meter.waiting()
        meter.loaded(batch)
        meter.end_batch(torch.tensor(1.0).as_subclass(Queued))
    now[0] += 7.0  # HF Trainer returns only when the GPU has finished
    meter.end()
    assert [batch.seconds for batch in monitor.batches] == [0.0, 5.0]


@pytest.mark.exhaustive
def test_hf_trainer_gets_its_flags() -> None:
    flags = ["peer.torch_compile=true", "peer.torch_compile_backend=eager", "peer.regional_compile=true"]
    report = peer(hf_trainer, *flags, "peer.attention=eager", "peer.grad_norm=false", "optimizer.max_grad_norm=null")
    evidence = report["algorithms"]["hf_trainer"]["evidence"]
    assert evidence["graphs"] > 0
    wanted = {"fused": True, "torch_compile": True, "attention": "eager", "regional_compile": True, "grad_norm": False}
    assert evidence.items() >= wanted.items()
    plain = peer(hf_trainer, "peer.optim=adamw_torch")["algorithms"]["hf_trainer"]["evidence"]
    changed = {"attention": "sdpa", "regional_compile": False, "grad_norm": True, "fused": False}
    assert plain == {**evidence, **changed, "torch_compile": False, "graphs": 0, "max_grad_norm": 1.0}


@pytest.mark.exhaustive
def test_hf_trainer_groups_samples_by_length() -> None:
    grouped, samples = "peer.train_sampling_strategy=group_by_length", "data.train_samples=64"
    drawn = peer(hf_trainer, samples, "data.padding=longest")["throughput"]["padding_fraction"]
    report = peer(hf_trainer, samples, "data.padding=longest", grouped)
    assert report["algorithms"]["hf_trainer"]["evidence"]["train_sampling_strategy"] == "group_by_length"
    assert report["training"]["batches"] == 16
    assert report["throughput"]["padding_fraction"] < 0.8 * drawn
    with pytest.raises(ConfigError, match=r"saves nothing here; set data\.padding=longest"):
        peer(hf_trainer, samples, "data.padding=max_length", grouped)


FILES = ["data.source=files", "data.train_file=pairs.jsonl", "data.eval_samples=null", "data.tokenizer=wordpiece"]
EMBEDDING = ["model.task=embedding", "data.text_columns=[anchor, positive]", "data.eval_file=null", *FILES]
ROBERTA = ["model.name=roberta", "model.size=null", "model.init=random"]


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (hf_trainer, ["peer.torch_compil=true"], "TrainingArguments refused its flags"),
        (hf_trainer, ["peer.attention=none"], "peer.attention: 'none' cannot be used"),
        (bare_loop, ["peer.attention=sdpa"], "unknown key 'peer.attention'"),
        (bare_loop, ["trainer.max_duration=64sp", "scheduler.warmup=8sp"], "peers support epochs and batches"),
        (bare_loop, ["trainer.microbatch_tokens=99"], "trainer.microbatch_tokens: the peers do not"),
        (flattened_loop, ["peer.attention=sdpa"], "peer.attention must be 'torch' or 'FA4', not 'sdpa'"),
        (flattened_loop, ["peer.attention=FA4"], "peer.attention: "),  # the package or the GPU is missing
        (transformer_engine, ["trainer.device=cpu"], "trainer.device: Transformer Engine needs a GPU"),
        (transformer_engine, ["peer.multiple=8"], "peer.multiple must be a multiple of 16, not 8"),
        (flattened_loop, ["model.task=mlm"], "ModernBertForSequenceClassification only, not BertForMaskedLM"),
        (sentence_trainer, [], "model.task: this peer trains embeddings with model.loss=ranking only"),
        (sentence_trainer, [*EMBEDDING, "data.eval_file=pairs.jsonl"], "data.eval_file: this peer does not evaluate"),
        (sentence_trainer, [*EMBEDDING, *ROBERTA, "peer.flatten=true"], "supports BertModel only, not RobertaModel"),
        (
            sentence_trainer,
            [*EMBEDDING, "peer.unsloth=true", "peer.torch_compile=true"],
            "peer.unsloth: Unsloth does not unpad a compiled model; set peer.torch_compile=false",
        ),
    ],
)
def test_a_wrong_argument_is_one_line(module: Any, arguments: list[str], message: str) -> None:
    RobertaConfig(vocab_size=400, num_hidden_layers=1, **SHAPE).save_pretrained("roberta")
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        peer(module, *arguments)
    assert "\n" not in str(raised.value)


def test_the_plan_evaluates_at_each_interval_and_at_the_end() -> None:
    def plan(*overrides: str) -> Any:
        return plan_of(load_config(None, ["scheduler.warmup=1ba", *overrides]), batches_an_epoch=5)

    assert plan("trainer.max_duration=2ep").evaluate_after == {5, 10}
    assert plan("trainer.max_duration=7ba", "trainer.eval_interval=3ba").evaluate_after == {3, 6, 7}
    assert plan("trainer.max_duration=7ba").epochs == 2
    constant = plan("trainer.max_duration=4ba", "scheduler.name=constant", "scheduler.warmup=2ba")
    assert [constant.rate(batch) for batch in range(5)] == [0.0, 0.0, 0.5, 1.0, 1.0]


@pytest.fixture
def pairs() -> None:
    """Parts of reviews; the positives are longer than the anchors."""
    reviews = [text.split() for text in builtin_reviews(24, seed=17, split="train", length_scale=0.2)["text"]]
    parts = [(words[: 3 + i % 4], words[6 : 16 + i % 5]) for i, words in enumerate(reviews)]
    lines = [json.dumps({"anchor": " ".join(anchor), "positive": " ".join(positive)}) for anchor, positive in parts]
    Path("pairs.jsonl").write_text("\n".join(lines))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize("padding", ["longest", "max_length"])
def test_sentence_transformers_trains_the_same_steps(padding: str) -> None:
    job = [*EMBEDDING, f"data.padding={padding}", "model.pooling=cls"]
    ours = run(*JOB, *job)
    report = peer(sentence_trainer, *job)
    assert len(report["losses"]) == ours["training"]["batches"] == 6
    torch.testing.assert_close(report["losses"], losses_of_ours(), atol=6e-5, rtol=0)  # the log has four digits
    assert report["throughput"]["padding_fraction"] == pytest.approx(ours["throughput"]["padding_fraction"])
    assert set(report) - {"losses"} == set(ours)
    flags = ["peer.torch_compile=true", "peer.torch_compile_backend=eager"]
    compiled = peer(sentence_trainer, *job, *flags, name="compiled")
    torch.testing.assert_close(compiled["losses"], report["losses"], atol=1e-4, rtol=0)
    graphs = [run["algorithms"]["sentence_trainer"]["evidence"]["graphs"] for run in (report, compiled)]
    assert graphs[0] == 0 < graphs[1]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_sentence_transformers_trains_the_same_steps_on_flattened_texts(pooling: str) -> None:
    job = [*EMBEDDING, f"model.pooling={pooling}"]
    padded = peer(sentence_trainer, *job)
    compiled = ["peer.torch_compile=true", "peer.torch_compile_backend=eager"]
    for flags in ([], ["peer.multiple=16"], ["peer.multiple=16", *compiled]):
        flat = peer(sentence_trainer, *job, "peer.flatten=true", *flags, name="flattened")
        torch.testing.assert_close(flat["losses"], padded["losses"], atol=1e-4, rtol=0)
        assert flat["throughput"]["padding_fraction"] == pytest.approx(padded["throughput"]["padding_fraction"])
        evidence = flat["algorithms"]["sentence_trainer"]["evidence"]
        assert (evidence["attention"], evidence["flatten"]) == ("torch_varlen", True)
        assert (evidence["graphs"] > 0) == ("peer.torch_compile=true" in flags)


@pytest.mark.gpu
@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_flattened_texts_have_the_loss_of_padded_ones_on_a_gpu(compiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # HF Trainer would use all GPUs
    job = [*EMBEDDING, "trainer.max_duration=1ba", "trainer.device=gpu"]
    padded = peer(sentence_trainer, *job, "peer.torch_compile=false")
    flat = peer(sentence_trainer, *job, f"peer.torch_compile={compiled}", "peer.flatten=true", "peer.multiple=16")
    torch.testing.assert_close(flat["losses"], padded["losses"], atol=0.05, rtol=0.02)


@pytest.mark.parametrize("multiple", [1, 3, 8])  # of 9 tokens
def test_a_flat_row_is_what_sentence_transformers_makes_of_the_texts(multiple: int) -> None:
    """Rounded up with tokens of another text."""
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    ids = torch.tensor([[2, 5, 3, 0], [2, 3, 0, 0], [2, 7, 8, 3]])
    expected = collator([{"input_ids": row[row > 0]} for row in ids])
    row = sentence_trainer.flat_row(ids, ids > 0, multiple)
    for name in ("input_ids", "position_ids"):
        torch.testing.assert_close(row[name][:, :9], expected[name])
        assert row[name].shape == (1, {1: 9, 3: 9, 8: 16}[multiple])
    for name in ("seq_idx", "cu_seq_lens_q"):
        torch.testing.assert_close(row[name], expected[name])
    unused = [row["input_ids"].shape[1]] if multiple > 1 else []
    assert row["starts"].tolist() == [*expected["cu_seq_lens_q"].tolist(), *unused]
    assert row["longest"] >= row["starts"].diff().max()


@pytest.mark.usefixtures("pairs")
def test_sentence_transformers_reads_each_column_at_its_own_length(monkeypatch: pytest.MonkeyPatch) -> None:
    job = [*EMBEDDING, "data.padding=longest", "trainer.max_duration=1ba"]
    seen: list[list[int]] = []

    class Watching(sentence_trainer.MultipleNegativesRankingLoss):
        def forward(self, sentence_features: Any, labels: Any) -> Any:
            seen.append([features["input_ids"].shape[1] for features in sentence_features])
            assert all(features["attention_mask"][:, -1].any() for features in sentence_features)
            return super().forward(sentence_features, labels)

    monkeypatch.setattr(sentence_trainer, "MultipleNegativesRankingLoss", Watching)
    peer(sentence_trainer, *job)
    ((anchors, positives),) = seen
    assert anchors < positives


@pytest.mark.exhaustive
def test_hf_trainer_trains_pefts_adapters() -> None:
    report = peer(hf_trainer, "peer.lora={rank: 4, alpha: 8, targets: [query, value]}")
    evidence = report["algorithms"]["hf_trainer"]["evidence"]
    assert evidence["lora"] == {"rank": 4, "alpha": 8, "targets": ["query", "value"]}
    full = peer(hf_trainer)
    assert report["losses"][0] == pytest.approx(full["losses"][0], abs=1e-5), "adapters begin at zero"
    assert report["losses"][1:] != full["losses"][1:]
