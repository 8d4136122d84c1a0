"""Precision, recall and F1 of each class, and the confusion matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from composer.core import Callback, State
from composer.loggers import Logger

from composer_speedups.callbacks.evaluations import is_evaluation_of
from composer_speedups.tasks.metrics import ByClass

_MOST_ROWS = 10
_WIDEST = 48  # characters of a printed class with the words before it


class ClassReport(Callback):
    """Keeps how often each class was true and predicted in each evaluation, from its :class:`.ByClass` metric.

    ``trainer.eval()`` counts, too, but not on other data that it is given. In each Trainer it starts anew.

    Args:
        dataloader_label: Label of the evaluator. Default ``"eval"``.

    Attributes:
        names: Names of the K classes.
        counts: Batches trained → how often each class is a true one, a predicted one, and both, (3, K).
        confusions: Batches trained → the number of samples whose true class is i and whose predicted class is j,
            (K, K); None with several labels per sample, or more than 100 classes.
    """

    def __init__(self, dataloader_label: str = "eval") -> None:
        self.dataloader_label = dataloader_label
        self._begin()

    def _begin(self) -> None:
        self.names: list[str] = []
        self.counts: dict[int, npt.NDArray[np.int64]] = {}
        self.confusions: dict[int, npt.NDArray[np.int64] | None] = {}

    def init(self, state: State, logger: Logger) -> None:
        self._begin()

    def eval_end(self, state: State, logger: Logger) -> None:
        if not is_evaluation_of(state, self.dataloader_label):
            return
        for metric in state.eval_metrics[self.dataloader_label].values():
            if isinstance(metric, ByClass) and metric.update_called:
                metric.compute()  # computed and cached by Composer
                assert metric.seen is not None
                batch, confusion = state.timestamp.batch.value, metric.confusion
                self.names = list(metric.names)
                self.counts[batch] = metric.seen.cpu().numpy()
                self.confusions[batch] = None if confusion is None else confusion.cpu().numpy()

    def summary(self, batch: int | None = None) -> dict[str, Any]:
        """The section ``classes`` of report.json; empty if there was no such evaluation.

        Args:
            batch: The number of batches trained before the evaluation; None for the last one.

        Returns:
            ``batch``; ``classes``: name → ``precision``, ``recall``, ``f1`` (None where undefined), ``samples`` and
            ``predicted``; ``confusion``: for each true class, how often each class was predicted, in the order of
            ``classes``, or None as in ``confusions``.
        """
        batch = batch if batch is not None else max(self.counts, default=-1)
        if batch not in self.counts:
            return {}
        confusion = self.confusions[batch]
        return {
            "batch": batch,
            "classes": metrics_by_class(self.names, self.counts[batch]),
            "confusion": None if confusion is None else confusion.tolist(),
        }


def metrics_by_class(names: Sequence[str], counts: npt.NDArray[np.int64]) -> dict[str, dict[str, Any]]:
    """Name → ``precision``, ``recall``, ``f1`` (None where undefined), ``samples`` and ``predicted``.

    Args:
        names: Names of the K classes.
        counts: As in :attr:`ClassReport.counts`.
    """
    return {
        name: {
            "precision": _ratio(hits, predicted),
            "recall": _ratio(hits, true),
            "f1": _ratio(2 * hits, true + predicted),
            "samples": true,
            "predicted": predicted,
        }
        for name, (true, predicted, hits) in zip(names, counts.T.tolist(), strict=True)
    }


def class_rows(classes: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, float | None, str]]:
    """``F1 of spam``, 0.812, ``precision 0.9, recall 0.74, 31 samples`` for each of up to ten classes.

    Args:
        classes: From :func:`metrics_by_class`.
    """
    for name, values in classes.items() if len(classes) <= _MOST_ROWS else ():
        shown = [f"{key} {values[key]:.4g}" for key in ("precision", "recall") if values[key] is not None]
        label = " ".join(f"F1 of {name}".split())
        yield (
            label if len(label) <= _WIDEST else f"{label[: _WIDEST - 1]}…",
            values["f1"],
            ", ".join([*shown, f"{values['samples']:,} samples"]),
        )


def note_on_metric(metric: str, classes: Mapping[str, Mapping[str, Any]]) -> str:
    """What a printed metric is of: ``of the last batch``, ``of spam``, or ``every sample was predicted as ham``; empty
    for others.

    Args:
        metric: Its name in reports.
        classes: From :func:`metrics_by_class`; empty if the task has none.
    """
    if metric.startswith("train_"):
        return "of the last batch"
    predicted = {name: values["predicted"] for name, values in classes.items() if values["predicted"]}
    samples = [values["samples"] for values in classes.values() if values["samples"]]
    one_of_each = sum(predicted.values()) == sum(samples)  # not several labels per sample
    if metric == "accuracy" and len(predicted) == 1 < len(samples) and one_of_each:
        return f"every sample was predicted as {next(iter(predicted))}"
    return f"of {[*classes][1]}" if metric.endswith("binary_f1") and len(classes) == 2 else ""


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
