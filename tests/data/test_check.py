"""What a run says of its texts and labels before training, by tasks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset

from composer_speedups.data.summary import DataCheck, check_data
from composer_speedups.tasks.settings import TASKS
from composer_speedups.tasks.task import Task, build_task
from tests.helpers.jobs import run


def task_named(name: str, **settings: Any) -> Task:
    return build_task(TASKS[name](**settings))


def checked(task: Task, train: list[dict[str, Any]], held: list[dict[str, Any]] | None) -> DataCheck:
    """The check of checked rows, which stand for their own tokens."""
    prepared = [task.prepared(rows, training=rows is train) if rows else None for rows in (train, held)]
    samples = [None if rows is None else Dataset.from_list(rows) for rows in prepared]
    tokens = samples[1] and samples[1].rename_columns({"labels": "token_labels"} if task.splits_words else {})
    assert samples[0] is not None
    return check_data(task, samples[0], samples[1], tokens)


def rows_of(*texts_and_labels: tuple[Any, ...], labelled: bool = True) -> list[dict[str, Any]]:
    """Checked rows of tuples: the texts, and the label if ``labelled``."""
    rows = []
    for row in texts_and_labels:
        texts = row[:-1] if labelled else row
        rows.append({f"text_{i}": text for i, text in enumerate(texts, 1)} | ({"labels": row[-1]} if labelled else {}))
    return rows


def test_single_texts_and_pairs_are_compared_as_a_whole() -> None:
    task = task_named("classification", labels=["no", "yes", "rare"])
    train = rows_of(("a", 0), ("a", 1), ("a", 0), ("b", 1), ("c", 1))
    held = rows_of(("b", 0), ("b", 0), *((f"held {i}", 1) for i in range(10)), ("last", 2))
    found = checked(task, train, held)
    assert found == DataCheck(
        duplicates={"train": 2, "validate": 1},
        on_both_sides=2,
        differing_labels=2,  # a in the training samples, b over both sides
        rare_classes={"no": {"train": 2, "validate": 2}, "rare": {"train": 0, "validate": 1}},
        constant={"label": "yes", "accuracy": 10 / 13},
    )
    assert str(found) == (
        "duplicate texts: 2 to train on, 1 to validate on; validation texts that are also trained on: 2; "
        "texts with different labels: 2; classes with fewer than 10 validation rows: no (2 to train on, "
        "2 to validate on), rare (0 to train on, 1 to validate on); "
        "always predicting yes has accuracy 0.7692"
    )
    pairs = checked(task, rows_of(("a", "b", 0), ("a", "c", 1), ("b", "a", 1)), rows_of(("a", "b", 0), ("c", "a", 0)))
    assert (pairs.duplicates, pairs.on_both_sides, pairs.differing_labels) == ({"train": 0, "validate": 0}, 1, 0)
    assert str(pairs).startswith("duplicate texts: none; validation texts that are also trained on: 1; classes")
    alone = checked(task, train, None)
    assert (alone.duplicates, alone.on_both_sides) == ({"train": 2}, None)
    assert alone.rare_classes is alone.constant is None


def test_every_task_states_what_it_has() -> None:
    multilabel = checked(
        task_named("multilabel", labels=["x", "y"]),
        rows_of(("a", [1.0, 0.0]), ("a", [1.0, 1.0])),
        rows_of(*((f"{i}", [1.0, float(i < 3)]) for i in range(11))),
    )
    assert (multilabel.differing_labels, multilabel.constant) == (1, None)
    assert multilabel.rare_classes == {"y": {"train": 1, "validate": 3}}

    words, tags = ["no", "rain"], [0, 1]
    tagged = checked(
        task_named("token_classification", labels=["O", "B"]),
        rows_of((words, tags), (["norain"], [0])),
        rows_of((words, [0, 0]), *(((f"w{i}", "x", "y"), [0, -100, 0]) for i in range(9))),
    )
    assert (tagged.on_both_sides, tagged.differing_labels) == (1, 1)
    assert tagged.rare_classes == {"B": {"train": 1, "validate": 0}}
    assert tagged.constant == {"label": "O", "accuracy": 1.0}

    ranked = (
        task_named("reranking", loss_name="bce"),
        rows_of(("q", "d", 1.0), ("q", "e", 0.0)),
        rows_of(("q", "e", 1.0)),
    )
    assert (found := checked(*ranked)).on_both_sides == found.differing_labels == 1
    assert found.rare_classes is found.constant is None
    against = checked(task_named("reranking", loss_name="pairwise"), *ranked[1:])
    assert (against.on_both_sides, against.differing_labels) == (1, 0)

    triples = rows_of(("a", "p", "n"), ("a", "p", "m"), labelled=False)
    embedded = checked(task_named("embedding"), triples, rows_of(("a", "m"), ("a", "p"), ("p", "a"), labelled=False))
    assert embedded == DataCheck({"train": 0, "validate": 0}, 2, None, None, None)
    masked = checked(task_named("mlm"), rows_of(("a",), ("a",), labelled=False), rows_of(("a",), labelled=False))
    assert masked == DataCheck({"train": 1, "validate": 0}, 1, None, None, None)
    assert str(masked) == "duplicate texts: 1 to train on; validation texts that are also trained on: 1"


def test_names_of_classes_are_listed_as_they_are_with_their_counts() -> None:
    task = task_named("classification", labels=["a; b", "c", "NA"])
    found = checked(task, rows_of(("x", 0), ("y", 1)), rows_of(("z", 0), *((f"{i}", 1) for i in range(10))))
    assert "; classes with fewer than 10 validation rows: a; b (1 to train on, 1 to validate on), NA (0" in str(found)
    assert "1 to validate on), NA (0 to train on, 0 to validate on; a missing value?); always" in str(found)


def test_no_constant_is_better_than_the_mean_and_the_median() -> None:
    task, labels = task_named("regression"), [0.5, 2.0, 2.5, 7.0]
    found = checked(task, rows_of(("a", 1.0), ("a", 1.5)), rows_of(*((f"{i}", x) for i, x in enumerate(labels))))
    assert found.differing_labels == 1
    assert found.constant is not None
    away = torch.linspace(0, 8, 8001)[:, None] - torch.tensor(labels)  # of every constant, in steps of 0.001
    rmse, mae = away.pow(2).mean(1).sqrt().min(), away.abs().mean(1).min()
    assert found.constant == pytest.approx({"mean": 3.0, "rmse": float(rmse), "median": 2.25, "mae": float(mae)})
    assert str(found).endswith(
        "always predicting the mean 3 has rmse 2.424; always predicting the median 2.25 has mae 1.75"
    )


def test_a_run_prints_and_reports_it_unless_it_is_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    brief = "trainer.max_duration=1ba"
    report = run(brief)
    constant = report["data"]["check"]["constant"]
    samples = report["classes"]["classes"]
    assert constant["accuracy"] == max(values["samples"] for values in samples.values()) / 16
    assert capsys.readouterr().out.splitlines()[2].startswith("check       duplicate texts: none; ")
    assert run(brief, "data.report=false")["data"]["check"] is None
    assert "duplicate texts" not in capsys.readouterr().out
    drawn = run(brief, "data.source=random", "data.tokenizer=null", "model.name=minilm", "model.size=null")
    assert drawn["data"]["check"] is None
