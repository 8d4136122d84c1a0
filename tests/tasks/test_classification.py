"""Classification and multilabel: labels as names or integers in the order of the head, class weights, and smoothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch.nn import functional as F

from composer_speedups.core.errors import ConfigError, DataError
from composer_speedups.data.loader import build_data
from composer_speedups.tasks.classification import Classification
from composer_speedups.tasks.models import build_model
from composer_speedups.tasks.multilabel import Multilabel
from composer_speedups.tasks.settings import ModelConfig
from tests.data.samples import files, save
from tests.helpers.texts import tokenizer_of


@pytest.mark.parametrize(
    ("values", "declared", "classes"),
    [
        (["no", "yes", "maybe", "no"], None, ["maybe", "no", "yes"]),
        ([10, 2, 1, 2], None, ["1", "2", "10"]),
        ([0.0, 1.0, None], None, ["0", "1"]),  # integers with gaps are floats
        ([True, False, None], None, ["False", "True"]),  # as a CSV file has them
        ([1, 0, -1], None, ["0", "1"]),  # -1 marks a row without a label
        ([0, 0], ["neg", "pos"], ["neg", "pos"]),
    ],
)
def test_classes_are_learned_from_the_samples_in_order(
    values: list[Any], declared: list[str] | None, classes: list[str]
) -> None:
    task = Classification()
    task.learn({"label": values}, {} if declared is None else {"label": declared}, "f.csv")
    assert task.classes == classes


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["True", "False"], {True: 0, False: 1, "True": 0, "false": 1, "TRUE": 0}),
        (["true", "false"], {True: 0, False: 1, "True": 0, "false": 1, "TRUE": 0}),
        (["no", "yes"], {True: 1, False: 0}),
        (["0", "1"], {True: 1, False: 0}),
        (["bad", "good"], {"good": 1, " bad ": 0, 1: 1, 0.0: 0, "1": 1, "0.0": 0}),
        (["bad", "good"], {"great": None, 2: None, -1: None, None: None, float("nan"): None}),
        (["1", "2"], {1: 0, "2": 1, "1.0": 0, 0: None}),  # integer class names are not positions
    ],
)
def test_a_label_is_a_name_or_a_position(names: list[str], labels: dict[Any, int | None]) -> None:
    task = Classification(labels=names)
    for value, number in labels.items():
        if number is not None:
            assert task.label(value, "f") == number
            continue
        with pytest.raises(DataError, match=rf"^f, row 3: label is .*; every label must be one of {', '.join(names)} "):
            task.label(value, "f, row 3")


@pytest.mark.parametrize(("weights", "smoothing"), [([1.0, 3.0, 0.5], 0.0), (None, 0.2), ([1.0, 3.0, 0.5], 0.2)])
def test_class_weights_and_label_smoothing_match_torch(weights: list[float] | None, smoothing: float) -> None:
    tokenizer = tokenizer_of(["some text"])
    task = Classification(labels=["a", "b", "c"], class_weights=weights, label_smoothing=smoothing)
    model = build_model(ModelConfig(size="tiny", init="random", dropout=0.0), task, tokenizer, 16)
    batch = {**tokenizer(["some", "text", "more"], return_tensors="pt"), "labels": torch.tensor([0, 1, 1])}
    batch.pop("token_type_ids", None)
    loss = model.loss(model(batch), batch)
    logits = model.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    weights_K = None if weights is None else torch.tensor(weights)
    expected = F.cross_entropy(logits, batch["labels"], weights_K, label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected)


def test_class_weights_by_name_or_in_order() -> None:
    task = Classification(labels=["a", "b", "c"], class_weights={"c": 3, "a": 0.5})
    assert task.weights() == [0.5, 1.0, 3]
    assert Classification(labels="1", class_weights={"1": 2}).weights() == [2]
    with pytest.raises(ConfigError, match=r"model\.class_weights has no class 'span'; did you mean 'spam'\?"):
        Classification(labels=["ham", "spam"], class_weights={"span": 2}).head_settings()
    with pytest.raises(ConfigError, match=r"model\.class_weights has 2 values for 3 classes \(a, b, c\)"):
        Classification(labels=["a", "b", "c"], class_weights=[1, 2]).head_settings()


def test_balanced_class_weights_are_those_of_scikit_learn() -> None:
    labels = [0] * 6 + [2] * 2 + [1]
    task = Classification(labels=["a", "b", "c", "absent"], class_weights="balanced")
    with pytest.raises(ConfigError, match=r"balanced needs the labels of the training samples; call task\.learn_"):
        task.head_settings()
    task.learn_frequencies(labels)
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    assert task.weights() == pytest.approx([*expected, 1.0])
    name = save({"text": ["so good"] * 12 + ["so bad"] * 4, "label": ["good"] * 12 + ["bad"] * 4}, "a.csv")
    task = Classification(class_weights="balanced")
    data = build_data(files(name, batch_size=4, train_samples=8), task, model_name="", on_gpu=False)
    drawn = Counter(int(label) for batch in data.train.dataloader for label in batch["labels"])
    assert task.weights() == pytest.approx([8 / (2 * drawn[0]), 8 / (2 * drawn[1])]), "of the samples trained on"


def test_predictions_name_the_class_and_its_probability() -> None:
    (prediction,) = Classification(labels=["a", "b"]).predictions(torch.tensor([[0.0, 1.0]]), {})
    assert (prediction["label"], prediction["probability"]) == ("b", pytest.approx(0.7310586))
    assert prediction["probabilities"] == {"a": pytest.approx(0.2689414), "b": prediction["probability"]}
    (prediction,) = Multilabel(labels=["a", "b"]).predictions(torch.tensor([[-1.0, 1.0]]), {})
    assert prediction["labels"] == ["b"]


def test_a_stored_classifiers_labels_determine_the_order() -> None:
    tokenizer = tokenizer_of(["some text"])
    random = ModelConfig(size="tiny", init="random")
    stored = build_model(random, Classification(labels=["bad", "good"]), tokenizer, 16)
    stored.model.save_pretrained("stored")
    config = ModelConfig(name="stored")
    again = build_model(config, Classification(labels=["bad", "good"]), tokenizer, 16)
    torch.testing.assert_close(again.model.classifier.weight, stored.model.classifier.weight)
    assert again.config.label2id == {"bad": 0, "good": 1}
    with pytest.raises(ConfigError, match=r"in a different order than the data; set data\.labels=\[bad,good\]"):
        build_model(config, Classification(labels=["good", "bad"]), tokenizer, 16)


@pytest.mark.parametrize("mark", [";", "|", ", "])
def test_a_columns_separator_of_labels_is_the_first_mark_that_it_has(mark: str) -> None:
    task = Multilabel()
    task.learn({"labels": [f"x{mark}y", "y", ""]}, {}, "f.csv")
    for known in (task, Multilabel(labels=["x", "y"])):  # a stream's labels are not learned from the column
        assert [known.label(cell, "f") for cell in (f"x{mark}y", "y", "")] == [[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]]
    with pytest.raises(DataError, match=r"f: labels holds 'new'; every label must be one of"):
        task.label(f"x{mark}new", "f")
