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
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from composer_speedups.callbacks.history import ClassReport, class_rows, note_on_metric
from composer_speedups.callbacks.throughput import Batch, ThroughputMonitor
from composer_speedups.tasks.metrics import MacroF1, MultilabelMacroF1
from composer_speedups.train import plot
from composer_speedups.train.config.load import load_config
from composer_speedups.train.plot import plot_confusion, plot_run
from tests.helpers.common import data_spec, make_trainer, plain_batches, tiny_bert
from tests.helpers.jobs import run
from tests.helpers.ranks import on_ranks


def reported(metric: Any, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    """The report of an evaluation after 7 batches, in three batches of its own."""
    for rows in torch.arange(len(logits)).tensor_split(3):
        metric.update(logits[rows], labels[rows])
    data, report = object(), ClassReport()
    state: Any = SimpleNamespace(
        dataloader=data,
        evaluators=[SimpleNamespace(label="eval", dataloader=SimpleNamespace(dataloader=data))],
        eval_metrics={"eval": {"MacroF1": metric}},
        timestamp=SimpleNamespace(batch=SimpleNamespace(value=7)),
    )
    report.eval_end(state, None)  # type: ignore[arg-type]
    assert report.summary(2) == {}, "an evaluation of an earlier process"
    return report.summary()


@pytest.mark.parametrize(("several", "classes"), [(False, 4), (False, 101), (True, 2), (True, 3)])
def test_the_classes_metrics_are_scikit_learns(several: bool, classes: int) -> None:
    """With several of three labels, the counts have the shape of a confusion matrix, and are none."""
    generator, names = torch.Generator().manual_seed(3), [f"c{i}" for i in range(classes)]
    scores = torch.rand(400, classes, generator=generator)
    if several:
        truth = (torch.rand(400, classes, generator=generator) < 0.4).long()
        predicted, metric = (scores > 0.5).long(), MultilabelMacroF1(names)
    else:
        truth = torch.randint(classes, (400,), generator=generator)
        predicted, metric = scores.argmax(-1), MacroF1(classes, names)
    result = reported(metric, scores, truth)
    expected = precision_recall_fscore_support(truth, predicted, labels=range(classes), zero_division=np.nan)
    for key, column in zip(("precision", "recall", "f1", "samples"), expected, strict=True):
        values = [np.nan if (v := result["classes"][name][key]) is None else v for name in names]
        np.testing.assert_allclose(values, column, err_msg=key)
    matrix = None if several or classes > 100 else confusion_matrix(truth, predicted, labels=range(classes)).tolist()
    assert (result["batch"], result["confusion"]) == (7, matrix)


def test_a_class_that_is_never_predicted_has_no_precision() -> None:
    classes = reported(MacroF1(3), torch.eye(3)[[0, 0, 0]], torch.tensor([0, 0, 1]))["classes"]
    assert classes["1"] == {"precision": None, "recall": 0.0, "f1": 0.0, "samples": 1, "predicted": 0}
    assert classes["2"] == {"precision": None, "recall": None, "f1": None, "samples": 0, "predicted": 0}


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


def test_a_printed_row_has_the_whole_name_of_its_class() -> None:
    names = ["billing question about\nan invoice", "billing question about a refund", "x" * 300]
    classes = {name: {"precision": 0.5, "recall": 0.5, "f1": 0.5, "samples": 2} for name in names}
    rows = [name for name, _, _ in class_rows(classes)]
    assert rows[:2] == ["F1 of billing question about an invoice", "F1 of billing question about a refund"]
    assert rows[2].startswith("F1 of xxx")
    assert rows[2].endswith("x…")


def test_a_metric_of_the_last_batch_has_its_number_of_samples(capsys: pytest.CaptureFixture[str]) -> None:
    report = run("trainer.max_duration=1ep", "data.train_samples=9", "data.batch_size=8")
    assert report["training"]["last_batch_samples"] == 1
    assert "of the last batch (1 sample)\n" in capsys.readouterr().out
    assert note_on_metric("train_loss", {}, 1200) == "of the last batch (1,200 samples)"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are drawn, which are not written."""
    drawn: list[Any] = []
    monkeypatch.setattr(plot, "_write", lambda figure, _: drawn.append(figure))
    return drawn


def test_up_to_30_classes_are_drawn_and_their_names_end_at_their_columns(figures: list[Any]) -> None:
    trainer: Any = SimpleNamespace(state=SimpleNamespace(callbacks=[]))
    for count in (31, 30):
        evaluation = {"batch": 1, "confusion": np.eye(count), "classes": [f"c{i}" for i in range(count)]}
        plot.write_plot(trainer, load_config(None), Path(), evaluation)  # type: ignore[arg-type]
    (figure,) = figures
    for name in figure.axes[0].get_xticklabels():
        assert (name.get_ha(), name.get_rotation_mode(), name.get_rotation()) == ("right", "anchor", 45)


def test_a_plots_means_are_of_a_window(figures: list[Any]) -> None:
    monitor = ThroughputMonitor(window=2)
    monitor.batches = [Batch(i, 8, 0, 0, 0, 0.0, 1.0 + 2 * (i % 2), 0.0, True) for i in range(8)]
    plot_run(monitor, {i: 1.0 + 2 * (i % 2) for i in range(8)}, {}, "run", Path())
    rates, losses = ([*axes.lines[1].get_ydata()] for axes in figures[0].axes)
    assert (rates, losses) == ([8.0] + [4.0] * 7, [1.0] + [2.0] * 7)


def test_characters_that_the_font_lacks_are_left_out_of_pictures_without_a_warning() -> None:
    names = ["\N{SLIGHTLY SMILING FACE}", "fine \N{SLIGHTLY SMILING FACE}"]
    plot_confusion([[1, 0], [0, 1]], names, "run", Path("c.png"))
    assert Path("c.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_classes_cuts_long_names_and_is_wide_enough_for_its_scale(figures: list[Any]) -> None:
    plot_confusion([[1, 0], [0, 1]], ["a" * 30, "b" * 20], "run", Path())
    assert [name.get_text() for name in figures[0].axes[0].get_xticklabels()] == ["a" * 20, "b" * 20]
    assert tuple(figures[0].get_size_inches()) == (4.6, 4.0)
