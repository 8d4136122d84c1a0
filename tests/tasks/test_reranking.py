"""Reranking: both losses, metrics against plain Python, queries with scattered rows, several ranks, and export."""

from __future__ import annotations

import functools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss, RankNetLoss
from sklearn.metrics import ndcg_score
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BertForSequenceClassification

from composer_speedups import FusedLayers, FusedOptimizer, ThroughputMonitor, Unpadding
from composer_speedups.core.errors import DataError
from composer_speedups.data.loader import build_data
from composer_speedups.tasks.models import FinetuneModel
from composer_speedups.tasks.reranking import Reranking
from composer_speedups.tasks.settings import DataConfig
from tests.helpers.common import Batch, Recorder, trained
from tests.helpers.jobs import assert_resumes_exactly, run_on_files
from tests.helpers.texts import WORDS, collated, sentence, tiny_encoder, tokenizer_of, write_rows
from tests.reference.loop import gradients, train_on
from tests.reference.tolerance import assert_near

# Composer warns about batches shorter than the usual size.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot split .* of length:UserWarning")


def judged(queries: int, seed: int = 0, *, grades: int = 2) -> list[dict[str, Any]]:
    """Return rows of 2 to 13 documents per query in random order, which scatters the rows of a query."""
    rng = random.Random(seed)
    rows = []
    for number in range(queries):
        query = f"{WORDS[number % 24]} {sentence(rng, 2, 3)}"
        for _ in range(rng.randint(2, 13)):
            rows.append({"query": query, "document": sentence(rng), "label": rng.randrange(grades)})
    rng.shuffle(rows)
    return rows


ROWS = judged(6, grades=3)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_of([row[column] for row in ROWS for column in ("query", "document")])


def built(task: Reranking, tokenizer: Any, length: int = 16) -> Any:
    encoder = tiny_encoder(tokenizer, kind=BertForSequenceClassification)
    encoder.classifier, encoder.num_labels, encoder.config.num_labels = torch.nn.Linear(32, 1), 1, 1
    return FinetuneModel(encoder, task, tokenizer, length).train()


def cross_encoder(model: Any, folder: Path) -> CrossEncoder:
    model.model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    model.task.export(folder, 32, model.max_length)
    return CrossEncoder(str(folder), device="cpu")


@pytest.mark.parametrize("loss", ["bce", "pairwise"])
def test_the_losses_equal_those_of_sentence_transformers(loss: str, tokenizer: Any, tmp_path: Path) -> None:
    """Its RankNetLoss takes a query's documents at once; two documents are one pair."""
    model = built(Reranking(loss_name=loss), tokenizer)
    documents = [(sentence(random.Random(i)), sentence(random.Random(i + 50))) for i in range(5)]
    queries, labels = [f"query {WORDS[i]}" for i in range(5)], (-1, -3) if loss == "pairwise" else (0.5, 0)
    rows = [
        {"query": query, "document": document, "label": label}
        for query, pair in zip(queries, documents, strict=True)
        for document, label in zip(pair, labels, strict=True)
    ]
    batch = collated(model.task, rows, tokenizer, 16)
    assert "query_id" not in batch, "only evaluation reads it"
    ours = model.loss(model(batch), batch)
    ours.backward()
    reference = cross_encoder(model, tmp_path)
    if loss == "bce":
        pairs = [[row["query"] for row in rows], [row["document"] for row in rows]]
        expected = BinaryCrossEntropyLoss(reference)(pairs, batch["labels"])
    else:
        assert batch["input_ids"].shape[:2] == batch["token_type_ids"].shape[:2] == (5, 2)
        lists, better = [list(pair) for pair in documents], [torch.tensor([1.0, 0.0])] * 5
        expected = RankNetLoss(reference, reduction_log="natural")([queries, lists], better)
    expected.backward()
    assert_near({"loss": ours, **gradients(model.model)}, {"loss": expected, **gradients(reference.model)})


def test_pairs_share_a_query_and_use_each_worse_document_once() -> None:
    task = Reranking(loss_name="pairwise")
    examples = [task.example(row, "", training=True) for row in ROWS]
    label = {(row["text_1"], row["text_2"]): row["labels"] for row in examples}
    pairs = task.prepared(examples, training=True)
    assert pairs == task.prepared(examples, training=True), "the same pairs each time"
    for pair in pairs:
        assert label[pair["text_1"], pair["text_2"]] > label[pair["text_1"], pair["text_3"]]
    best = {query: max(grade for (q, _), grade in label.items() if q == query) for query, _ in label}
    worse = sorted(key for key, grade in label.items() if grade < best[key[0]])
    assert sorted((pair["text_1"], pair["text_3"]) for pair in pairs) == worse


@pytest.mark.supports("in code", task="reranking")
def test_the_fast_set_trains_pairs_like_plain_pytorch_with_micro_batches(tokenizer: Any) -> None:
    task = Reranking(loss_name="pairwise")
    whole = collated(task, ROWS, tokenizer, 16)
    batches = [{name: rows[start : start + 6] for name, rows in whole.items()} for start in (0, 6)]

    def ranknet(model: Any, batch: Batch) -> Tensor:
        better, worse = (model(**{k: x[:, side] for k, x in batch.items()}).logits for side in (0, 1))
        return -torch.nn.functional.logsigmoid(better - worse).mean()

    expected = train_on(built(task, tokenizer).model, batches, ranknet)
    for size in (6, 4):  # 4 splits a batch into micro-batches of 4 and 2
        recorder, speed = Recorder(), ThroughputMonitor()
        techniques = [Unpadding(8), FusedLayers(), FusedOptimizer()]
        trained(
            techniques, model=built(task, tokenizer), batches=batches, callbacks=[recorder, speed],
            device_train_microbatch_size=size, train_dataloader=DataLoader(batches, batch_size=None),
        )  # fmt: skip
        assert_near(recorder.losses, expected.losses, what="losses")
        assert_near(recorder.first_gradients, expected.first_gradients, what="gradients")
        assert [(b.samples, b.tokens) for b in speed.batches] == [
            (6, int(batch["attention_mask"].sum())) for batch in batches
        ]


@pytest.fixture
def files() -> list[dict[str, Any]]:
    """Write the data files of a run; return the evaluation rows, an odd number."""
    write_rows("train.jsonl", judged(6))
    rows = judged(7, seed=1)
    rows = rows[: len(rows) - 1 + len(rows) % 2]
    write_rows("eval.jsonl", rows)
    return rows


train_in_process = functools.partial(run_on_files, "reranking", 14)


def ranked_by_hand(rows: list[dict[str, Any]], scores: list[float]) -> dict[str, float]:
    """Return MRR@10 and NDCG@10, averaged over the queries with a relevant document."""
    by_query: dict[str, list[tuple[float, int]]] = {}
    for row, score in zip(rows, scores, strict=True):
        by_query.setdefault(row["query"], []).append((score, row["label"]))
    ranked = [sorted(documents, reverse=True) for documents in by_query.values() if any(y for _, y in documents)]
    first = [next(i for i, (_, label) in enumerate(documents, start=1) if label) for documents in ranked]
    gains = [ndcg_score([[y for _, y in documents]], [[x for x, _ in documents]], k=10) for documents in ranked]
    return {"mrr@10": sum(1 / i for i in first if i <= 10) / len(ranked), "ndcg@10": sum(gains) / len(ranked)}


@pytest.mark.supports("export", task="reranking")
@pytest.mark.parametrize("loss", ["bce", pytest.param("pairwise", marks=pytest.mark.exhaustive)])
def test_a_run_reports_what_its_export_scores_in_sentence_transformers(loss: str, files: list[dict[str, Any]]) -> None:
    report = train_in_process(f"model.loss={loss}")
    model = CrossEncoder("runs/quickstart/model", device="cpu")
    assert model.max_seq_length == 14
    pairs = [(row["query"], row["document"]) for row in files]
    scores = model.predict(pairs, activation_fn=torch.nn.Identity())
    expected = ranked_by_hand(files, scores.tolist())
    assert {name: report["metrics"][name] for name in expected} == pytest.approx(expected, abs=1e-5)
    if loss == "bce":
        labels = torch.tensor([row["label"] for row in files])
        loss = torch.nn.functional.binary_cross_entropy(torch.tensor(model.predict(pairs)), labels.float())
        assert report["metrics"]["loss"] == pytest.approx(float(loss), abs=1e-5)


@pytest.mark.exhaustive
@pytest.mark.supports("resume", task="reranking")
def test_a_resumed_run_ends_where_the_uninterrupted_one_does(files: list[dict[str, Any]]) -> None:
    settings = ["model.loss=pairwise", "model.dropout=0.1", "checkpoint.interval=1ba", "trainer.microbatch_size=4"]
    assert_resumes_exactly(*settings, checkpoints=["ep0-ba1"], train=train_in_process)


def validated(**settings: Any) -> DataConfig:
    return DataConfig(
        source="files", train_file="train.jsonl", tokenizer="wordpiece", vocab_size=300, max_length=14, batch_size=8,
        **settings,
    )  # fmt: skip


def test_validation_samples_contain_whole_queries(files: list[dict[str, Any]]) -> None:
    def queries(**settings: Any) -> tuple[list[int], int]:
        """Return the sorted numbers of evaluation rows per query, and the number of training rows."""
        data = build_data(validated(**settings), Reranking(), model_name="", on_gpu=False)
        ids = torch.cat([batch["query_id"] for batch in data.eval.dataloader])
        return sorted(ids.bincount()[ids.unique()].tolist()), len(data.train.dataloader.dataset)

    def sizes(rows: list[dict[str, Any]]) -> list[int]:
        names = [row["query"] for row in rows]
        return sorted(names.count(name) for name in set(names))

    drawn, _ = queries(eval_file="eval.jsonl", eval_samples=25)
    assert 0 < len(drawn) < len(sizes(files))
    assert sum(drawn) <= 25
    assert not [size for size in drawn if size not in sizes(files)]
    train = judged(6)
    held, kept = queries(eval_fraction=0.4)
    assert sum(held) + kept == len(train)
    assert not [size for size in held if size not in sizes(train)]
    assert 0 < sum(held) <= 0.4 * len(train)


@pytest.mark.parametrize(
    ("loss", "labels", "problem"),
    [
        ("bce", [1, 2], r"row 2: label is 2; with model.loss=bce every label must be between 0 and 1"),
        ("bce", [1, math.nan], "row 2: label is nan; every label must be a finite number"),
        ("bce", [1, None], "row 2: label is empty; every label must be a finite number"),
        ("pairwise", [1, 1], "no query has two documents with different labels, .*; use bce"),
    ],
)
def test_bad_labels_are_refused(loss: str, labels: list[Any], problem: str) -> None:
    write_rows("train.jsonl", [{**ROWS[0], "label": label} for label in labels])
    with pytest.raises(DataError, match=problem):
        build_data(validated(), Reranking(loss_name=loss), model_name="", on_gpu=False)
