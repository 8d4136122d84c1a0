"""Classification: labels as names or integers in the order of the head, class weights, and label smoothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.utils.class_weight import compute_class_weight
from torch.nn import functional as F

from composer_speedups.core.errors import ConfigError, DataError
from composer_speedups.core.settings import refuse
from composer_speedups.data.loader import build_data
from composer_speedups.data.sources import load_samples
from composer_speedups.data.tokens import load_tokenizer
from composer_speedups.tasks.classification import Classification
from composer_speedups.tasks.models import build_model
from composer_speedups.tasks.multilabel import Multilabel
from composer_speedups.tasks.regression import Regression
from composer_speedups.train.config.schema import DataConfig, ModelConfig
from tests.data.samples import files, save
from tests.helpers.jobs import run
from tests.helpers.ranks import on_ranks
from tests.reference.tolerance import assert_near


def learned(values: list[Any], declared: list[str] | None = None) -> list[str]:
    task = Classification()
    task.learn({"label": values}, {} if declared is None else {"label": declared}, "f.csv")
    return task.classes


def test_classes_are_learned_from_the_samples_in_order() -> None:
    assert learned(["no", "yes", "maybe", "no"]) == ["maybe", "no", "yes"]
    assert learned([10, 2, 1, 2]) == ["1", "2", "10"], "numeric labels are sorted as numbers"
    assert learned([0.0, 1.0, None]) == ["0", "1"], "integers with gaps are floats"
    assert learned([True, False, None]) == ["False", "True"], "as a CSV file has them"
    assert learned([1, 0, -1]) == ["0", "1"], "-1 marks a row without a label"
    assert learned([0, 0], ["neg", "pos"]) == ["neg", "pos"]
    with pytest.raises(DataError, match=r"f\.csv: the column label has only the class a; .*data\.labels"):
        learned(["a", "a", None])


def test_booleans_are_the_classes_that_they_name_in_any_order_and_case() -> None:
    for names in (["True", "False"], ["true", "false"]):
        task = Classification(labels=names)
        assert [task.label(value, "f") for value in (True, False, "True", "false", "TRUE")] == [0, 1, 0, 1, 0]
    assert [Classification(labels=["no", "yes"]).label(value, "f") for value in (True, False)] == [1, 0]
    assert [Classification(labels=["0", "1"]).label(value, "f") for value in (True, False)] == [1, 0]
    for value in (True, "True"):
        with pytest.raises(DataError, match=r"f: label is '?True'?, not a number; for classes set model\.task"):
            Regression().label(value, "f")


def test_a_label_is_a_name_or_position_and_others_are_refused_with_row_and_value() -> None:
    task, numbered = Classification(labels=["bad", "good"]), Classification(labels=["1", "2"])
    good = ("good", " bad ", 1, 0.0, "1", "0.0")
    assert [task.label(value, "f, row 1") for value in good] == [1, 0, 1, 0, 1, 0]
    assert [numbered.label(value, "f, row 1") for value in (1, "2", "1.0")] == [0, 1, 0]
    with pytest.raises(
        DataError, match="label is 0; every label must be one of 1, 2"
    ):  # integer class names are not positions
        numbered.label(0, "f, row 1")
    for value, shown in (("great", "'great'"), (2, "2"), (-1, "-1"), (None, "empty"), (float("nan"), "nan")):
        with pytest.raises(DataError, match=rf"f, row 3: label is {shown}; every label must be one of bad, good"):
            task.label(value, "f, row 3")


@pytest.mark.parametrize(("weights", "smoothing"), [([1.0, 3.0, 0.5], 0.0), (None, 0.2), ([1.0, 3.0, 0.5], 0.2)])
def test_class_weights_and_label_smoothing_match_torch(weights: list[float] | None, smoothing: float) -> None:
    config = ModelConfig(size="tiny", init="random", dropout=0.0)
    data = DataConfig(tokenizer="wordpiece", vocab_size=128)
    tokenizer = load_tokenizer(data, "unused", ["some text"])
    task = Classification(labels=["a", "b", "c"], class_weights=weights, label_smoothing=smoothing)
    model = build_model(config, task, tokenizer, 16)
    batch = {**tokenizer(["some", "text", "more"], return_tensors="pt"), "labels": torch.tensor([0, 1, 1])}
    batch.pop("token_type_ids", None)
    loss = model.loss(model(batch), batch)
    logits = model.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    expected = F.cross_entropy(
        logits, batch["labels"], None if weights is None else torch.tensor(weights), label_smoothing=smoothing
    )
    torch.testing.assert_close(loss, expected)


WEIGHTED = ["model.class_weights=[1.0,9.0]", "model.label_smoothing=0.1", "optimizer.eps=1e-3", "trainer.device=cpu"]
WEIGHTED += ["model.dropout=0", "trainer.max_duration=3ba", "trainer.eval_batches=1", "scheduler.name=constant"]


def test_class_weights_train_alike_in_micro_batches_and_on_two_ranks() -> None:
    """Each part's mean divides by its own weights, so parts count by the sum of their weights, not by their samples."""
    whole = run(*WEIGHTED, "run_name=whole")
    parts = run(*WEIGHTED, "trainer.microbatch_size=2", "run_name=parts")
    ranks, _ = on_ranks(lambda: run(*WEIGHTED, "trainer.microbatch_size=2", "run_name=ranks"))
    stock = load_file("runs/whole/model/model.safetensors")
    for name, report in (("parts", parts), ("ranks", ranks)):
        assert report["metrics"]["train_loss"] == pytest.approx(whole["metrics"]["train_loss"], rel=1e-5), name
        assert_near(load_file(f"runs/{name}/model/model.safetensors"), stock, what=name)
        assert report["training"]["tokens"] == whole["training"]["tokens"], name


def test_weights_for_another_number_of_classes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.class_weights has 2 values for 3 classes \(a, b, c\)"):
        Classification(labels=["a", "b", "c"], class_weights=[1, 2]).head_settings()


def test_class_weights_by_name_are_1_for_the_others() -> None:
    task = Classification(labels=["a", "b", "c"], class_weights={"c": 3, "a": 0.5})
    assert task.weights() == [0.5, 1.0, 3]
    assert Classification(labels="1", class_weights={"1": 2}).weights() == [2]
    with pytest.raises(ConfigError, match=r"model\.class_weights has no class 'span'; did you mean 'spam'\?"):
        Classification(labels=["ham", "spam"], class_weights={"span": 2}).head_settings()


def test_balanced_class_weights_are_those_of_scikit_learn() -> None:
    labels = [0] * 6 + [2] * 2 + [1]
    task = Classification(labels=["a", "b", "c", "absent"], class_weights="balanced")
    with pytest.raises(ConfigError, match=r"balanced needs the labels of the training samples; call task\.learn_"):
        task.head_settings()
    task.learn_frequencies(labels)
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    assert task.weights() == pytest.approx([*expected, 1.0])
    outputs, batch = {"logits": torch.randn(9, 4)}, {"labels": torch.tensor(labels)}
    weights = torch.tensor([*expected, 1.0], dtype=torch.float32)
    torch.testing.assert_close(task.loss(outputs, batch), F.cross_entropy(outputs["logits"], batch["labels"], weights))


def test_balanced_weights_count_the_samples_that_are_trained_on() -> None:
    name = save({"text": ["so good"] * 12 + ["so bad"] * 4, "label": ["good"] * 12 + ["bad"] * 4}, "a.csv")
    task = Classification(class_weights="balanced")
    data = build_data(files(name, batch_size=4, train_samples=8), task, model_name="", on_gpu=False)
    drawn = Counter(int(label) for batch in data.train.dataloader for label in batch["labels"])
    assert task.weights() == pytest.approx([8 / (2 * drawn[0]), 8 / (2 * drawn[1])])
    streamed = files(name, streaming=True, tokenizer="unused")
    with pytest.raises(ConfigError, match=r"model\.class_weights balanced counts all labels up front"):
        build_data(streamed, Classification(class_weights="balanced"), model_name="", on_gpu=False)


def test_predictions_name_the_class_and_its_probability() -> None:
    (prediction,) = Classification(labels=["a", "b"]).predictions(torch.tensor([[0.0, 1.0]]), {})
    assert (prediction["label"], prediction["probability"]) == ("b", pytest.approx(0.7310586))
    assert prediction["probabilities"] == {"a": pytest.approx(0.2689414), "b": prediction["probability"]}
    (prediction,) = Multilabel(labels=["a", "b"]).predictions(torch.tensor([[-1.0, 1.0]]), {})
    assert prediction["labels"] == ["b"]


def test_a_stored_classifiers_labels_determine_the_order() -> None:
    data = DataConfig(tokenizer="wordpiece", vocab_size=128)
    tokenizer = load_tokenizer(data, "unused", ["some text"])
    random = ModelConfig(size="tiny", init="random")
    stored = build_model(random, Classification(labels=["bad", "good"]), tokenizer, 16)
    stored.model.save_pretrained("stored")
    config = ModelConfig(name="stored")
    again = build_model(config, Classification(labels=["bad", "good"]), tokenizer, 16)
    torch.testing.assert_close(again.model.classifier.weight, stored.model.classifier.weight)
    assert again.config.label2id == {"bad": 0, "good": 1}
    with pytest.raises(ConfigError, match=r"in a different order than the data; set data\.labels=\[bad,good\]"):
        build_model(config, Classification(labels=["good", "bad"]), tokenizer, 16)
    with pytest.raises(ConfigError, match=r"is a classifier of 2 labels, .* needs 3"):
        build_model(config, Classification(labels=["a", "b", "c"]), tokenizer, 16)


@pytest.mark.parametrize(
    ("cells", "lists"),
    [
        (
            ["billing;tech", "tech", "", "Doe, Jane ; billing"],
            [["billing", "tech"], ["tech"], [], ["Doe, Jane", "billing"]],
        ),
        (["a|b", "b"], [["a", "b"], ["b"]]),
        (["a, b", "b"], [["a", "b"], ["b"]]),
        (['["a", "b;c"]', "[]", '["a"]'], [["a", "b;c"], [], ["a"]]),
        (["['a', 'b']", "['b']"], [["a", "b"], ["b"]]),
        ([["a;b"], ["c", "d"]], [["a;b"], ["c", "d"]]),
    ],
)
def test_multilabel_reads_lists_that_are_written_as_text(cells: list[Any], lists: list[list[str]]) -> None:
    task = Multilabel()
    task.learn({"text": ["x"], "labels": cells}, {}, "f.csv")
    assert task.labels == sorted({name for names in lists for name in names})
    for known in (task, Multilabel(labels=task.labels)):  # a stream's labels are not learned from the column
        for cell, names in zip(cells, lists, strict=True):
            assert known.label(cell, "f") == [float(name in names) for name in task.labels]
    with pytest.raises(DataError, match=r"f: labels holds '(new|a)'; every label must be one of"):
        task.label(f"{lists[0][0]};new", "f")


def test_lists_of_labels_are_told_the_tasks_that_read_them() -> None:
    Path("a.jsonl").write_text('{"text": "a", "label": ["x"]}\n{"text": "b", "label": ["x", "y"]}\n')
    said = r"row 2: label is a list, \['x', 'y'\]\); set model\.task=multilabel, or model\.task=token_classification"
    with pytest.raises(DataError, match=said):
        load_samples(files("a.jsonl"), Classification(labels=["x", "y"]))


def test_a_multilabel_file_of_0_and_1_columns_is_told_to_name_them() -> None:
    name = save({"text": ["a", "b"], "billing": [0, 1], "tech": [1, 0]}, "a.csv")
    said = (
        r"a\.csv has no column 'labels' \(it has: text, billing, tech\); set data\.label_column=NAME, or "
        r"data\.label_columns for columns of 0 and 1$"
    )
    with pytest.raises(DataError, match=said):
        load_samples(files(name), Multilabel())


def test_multilabel_reads_lists_and_columns() -> None:
    task = Multilabel()
    task.learn({"text": ["x"], "labels": [["b", "a"], [], None, ["c"]]}, {}, "f.jsonl")
    assert task.labels == ["a", "b", "c"]
    assert task.label(["c", "a"], "f, row 1") == [1.0, 0.0, 1.0]
    assert task.label([], "f, row 1") == [0.0, 0.0, 0.0]
    with pytest.raises(DataError, match=r"f, row 2: labels is 1; every label must be a list .*data\.label_columns"):
        task.label(1, "f, row 2")
    with pytest.raises(DataError, match="f, row 2: labels holds 'd'; every label must be one of a, b, c"):
        task.label(["d"], "f, row 2")
    columns = Multilabel(label_columns=["toxic", "spam"])
    assert columns.example({"text": "x", "toxic": 1, "spam": False}, "f", training=True)["labels"] == [1.0, 0.0]
    with pytest.raises(DataError, match="f, row 4: spam is 2; every label must be 0 or 1"):
        columns.example({"text": "x", "toxic": 1, "spam": 2}, "f, row 4", training=True)
    with pytest.raises(ConfigError, match=r"data\.labels names 1 labels for 2 data\.label_columns"):
        Multilabel(label_columns=["toxic", "spam"], labels=["a"])


def test_fewer_than_two_classes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs at least two classes, such as \[negative, positive\], not"):
        refuse(Classification(labels=["complaint"]).data_checks(DataConfig()))


def test_a_label_that_is_listed_twice_is_refused() -> None:
    """Predictions are mappings from label to probability, which would have lost one of the two."""
    for kind in (Classification, Multilabel):
        with pytest.raises(ConfigError, match=r"^data\.labels lists 'a' twice; list it once"):
            kind(labels=["a", "b", "a"])
    with pytest.raises(ConfigError, match=r"^data\.label_columns lists 'a' twice"):
        Multilabel(label_columns=["a", "a"])
    with pytest.raises(ConfigError, match=r"^data\.labels lists 'x' twice"):
        Multilabel(label_columns=["a", "b"], labels=["x", "x"])


def test_a_label_column_that_is_also_a_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^data\.label_column 'label' is also among data\.text_columns, so"):
        refuse(Classification(text_columns=["text", "label"]).data_checks(DataConfig(source="builtin")))
    refuse(Multilabel(text_columns=["labels"], label_columns=["a", "b"]).data_checks(DataConfig(source="builtin")))
