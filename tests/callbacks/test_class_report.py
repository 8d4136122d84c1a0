"""Precision, recall, F1 and the confusion matrix of evaluations: those of scikit-learn, and of the exported weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from composer import Evaluator
from composer.models import HuggingFaceModel
from PIL import Image
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from composer_speedups.callbacks.class_report import ClassReport, class_rows, note_on_metric
from composer_speedups.tasks.metrics import ByClass, MacroF1, MultilabelMacroF1
from composer_speedups.train.plot import plot_confusion
from tests.helpers.common import data_spec, make_trainer, plain_batches, tiny_bert
from tests.helpers.jobs import run
from tests.helpers.ranks import on_ranks


class Evaluated:
    """A state after an evaluation with these metrics."""

    def __init__(self, metric: ByClass, batch: int) -> None:
        self.dataloader = object()
        self.evaluators = [SimpleNamespace(label="eval", dataloader=SimpleNamespace(dataloader=self.dataloader))]
        self.eval_metrics = {"eval": {"MacroF1": metric}}
        self.timestamp = SimpleNamespace(batch=SimpleNamespace(value=batch))


@pytest.mark.parametrize("classes", [4, 101])
def test_the_classes_metrics_are_scikit_learns(classes: int) -> None:
    generator = torch.Generator().manual_seed(3)
    logits, labels = torch.randn(400, classes, generator=generator), torch.randint(classes, (400,), generator=generator)
    names, predicted = [f"c{i}" for i in range(classes)], logits.argmax(-1)
    metric, report = MacroF1(classes, names), ClassReport()
    for rows in torch.arange(400).split(150):
        metric.update(logits[rows], labels[rows])
    state: Any = Evaluated(metric, 7)
    report.eval_end(state, None)  # type: ignore[arg-type]
    result = report.summary()
    assert result["batch"] == 7
    expected = precision_recall_fscore_support(labels, predicted, labels=range(classes), zero_division=np.nan)
    for key, column in zip(("precision", "recall", "f1", "samples"), expected, strict=True):
        values = [np.nan if (v := result["classes"][name][key]) is None else v for name in names]
        np.testing.assert_allclose(values, column, err_msg=key)
    matrix = confusion_matrix(labels, predicted, labels=range(classes)).tolist()
    assert result["confusion"] == (matrix if classes <= 100 else None)


@pytest.mark.parametrize("labels", [2, 3], ids="{} labels".format)
def test_the_metrics_of_several_labels_a_sample_are_scikit_learns(labels: int) -> None:
    """With three labels, the counts have the shape of a confusion matrix, and are none."""
    generator = torch.Generator().manual_seed(5)
    chances = torch.rand(60, labels, generator=generator)
    truth = torch.rand(60, labels, generator=generator) < 0.4
    names = [f"l{i}" for i in range(labels)]
    metric, report = MultilabelMacroF1(names), ClassReport()
    for rows in torch.arange(60).split(25):
        metric.update(chances[rows], truth[rows].long())
    state: Any = Evaluated(metric, 3)
    report.eval_end(state, None)  # type: ignore[arg-type]
    result = report.summary()
    expected = precision_recall_fscore_support(truth, chances > 0.5)
    for key, column in zip(("precision", "recall", "f1", "samples"), expected, strict=True):
        np.testing.assert_allclose([result["classes"][name][key] for name in names], column, err_msg=key)
    assert float(metric.compute()) == pytest.approx(expected[2].mean())
    assert result["confusion"] is None


def test_a_multilabel_run_reports_its_labels_without_a_picture() -> None:
    report = run("model.task=multilabel", "plot=true", "baseline=null")
    classes = report["classes"]["classes"]
    assert len(classes) > 1
    scores = [values["f1"] or 0.0 for values in classes.values()]
    assert np.mean(scores) == pytest.approx(report["metrics"]["macro_f1"])
    assert not Path("runs/quickstart/confusion.png").exists()


def test_a_class_that_is_never_predicted_has_no_precision() -> None:
    metric, report = MacroF1(3), ClassReport()
    metric.update(torch.eye(3)[[0, 0, 0]], torch.tensor([0, 0, 1]))
    state: Any = Evaluated(metric, 1)
    report.eval_end(state, None)  # type: ignore[arg-type]
    classes = report.summary()["classes"]
    assert classes["1"] == {"precision": None, "recall": 0.0, "f1": 0.0, "samples": 1, "predicted": 0}
    assert classes["2"] == {"precision": None, "recall": None, "f1": None, "samples": 0, "predicted": 0}
    assert report.summary(2) == {}, "an evaluation of an earlier process"


def test_only_the_evaluator_of_its_label_and_the_last_trainer_count() -> None:
    report = ClassReport()
    for length in (4, 2):
        metrics: Any = [MacroF1(2, ["no", "yes"])]
        model = HuggingFaceModel(tiny_bert(), use_logits=True, metrics=[], eval_metrics=metrics)
        loaders = {"eval": data_spec(plain_batches(1)), "other": data_spec(plain_batches(3))}
        own = [Evaluator(label=label, dataloader=loader) for label, loader in loaders.items()]
        batches, settings = plain_batches(length), {"eval_dataloader": own, "eval_interval": "1ba"}
        trainer = make_trainer(model=model, batches=batches, callbacks=[report], **settings)
        trainer.fit()
        with pytest.warns(UserWarning, match="label 'eval' was already provided"):  # Composer's
            trainer.eval(data_spec(plain_batches(5)))
        trainer.close()
        assert [*report.counts] == [*range(1, length + 1)]
        assert np.sum(report.summary()["confusion"]) == 4, "the samples of one batch"


def test_the_report_has_the_evaluation_of_the_exported_weights_and_a_picture() -> None:
    best = "checkpoint.best={metric: loss, mode: max}"  # the first evaluation, before the loss decreases
    report = run("trainer.max_duration=18ba", "trainer.eval_interval=6ba", best, "plot=true", "optimizer.lr=1e-3")
    evaluation = report["classes"]
    assert evaluation["batch"] == report["best"]["batch"]
    assert [*evaluation["classes"]] == ["negative", "positive"]
    matrix = np.array(evaluation["confusion"])
    assert matrix.sum() == 16
    assert matrix.trace() / 16 == pytest.approx(report["metrics"]["accuracy"])
    assert Path("runs/quickstart/confusion.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.exhaustive
def test_two_ranks_report_the_counts_of_all_samples() -> None:
    brief = ["trainer.max_duration=2ba", "data.eval_samples=18", "model.dropout=0", "trainer.device=cpu"]
    alone = run(*brief, "run_name=alone")["classes"]
    both, _ = on_ranks(lambda: run(*brief, "run_name=both"))
    assert both["classes"]["confusion"] == alone["confusion"]
    assert np.sum(alone["confusion"]) == 18


def test_class_names_are_drawn_as_text() -> None:
    names = ["$x^", "y" * 300, "$z$", "no"]
    plot_confusion([[1, 0, 2, 3]] * 4, names, "a run", Path("confusion.png"))
    with Image.open("confusion.png") as image:
        assert image.format == "PNG"
        assert image.getpixel((0, 0))[3] == 0, "no background"


def test_a_printed_row_has_the_whole_name_of_its_class() -> None:
    names = ["billing question about\nan invoice", "billing question about a refund", "x" * 300]
    classes = {name: {"precision": 0.5, "recall": 0.5, "f1": 0.5, "samples": 2} for name in names}
    rows = [name for name, _, _ in class_rows(classes)]
    assert rows[:2] == ["F1 of billing question about an invoice", "F1 of billing question about a refund"]
    assert rows[2].startswith("F1 of xxx")
    assert rows[2].endswith("x…")


def test_a_note_says_if_every_sample_was_predicted_as_one_class() -> None:
    def classes(*predicted: int, true: tuple[int, ...] = (8, 8)) -> dict[str, Any]:
        counts = zip(("no", "yes"), true, predicted, strict=True)
        return {name: {"samples": samples, "predicted": count} for name, samples, count in counts}

    assert note_on_metric("accuracy", classes(16, 0)) == "every sample was predicted as no"
    assert note_on_metric("accuracy", classes(0, 16)) == "every sample was predicted as yes"
    assert note_on_metric("accuracy", classes(15, 1)) == ""
    assert note_on_metric("accuracy", classes(16, 0, true=(16, 0))) == "", "there is but one class"
    assert note_on_metric("accuracy", classes(9, 0)) == "", "several labels a sample"
    assert note_on_metric("macro_f1", classes(16, 0)) == ""
    assert note_on_metric("binary_f1", classes(15, 1)) == "of yes"
    assert note_on_metric("binary_f1", {}) == ""
    assert note_on_metric("train_accuracy", classes(16, 0)) == "of the last batch"
