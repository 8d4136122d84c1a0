"""Metrics over ranks equal torchmetrics', without collectives that exchange shapes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from composer.utils import dist
from torch import distributed
from torch.nn import functional as F

from composer_speedups.data.tokens import load_tokenizer
from composer_speedups.tasks.classification import Classification
from composer_speedups.tasks.metrics import BinaryF1, MacroF1, Matthews
from composer_speedups.tasks.models import build_model
from composer_speedups.tasks.task import task_class
from composer_speedups.train.config.schema import DataConfig, ModelConfig
from tests.helpers.jobs import run
from tests.helpers.ranks import on_ranks


def _counting(name: str, calls: Counter[str]) -> Any:
    original = getattr(distributed, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return original(*args, **kwargs)

    return noted


def _both_ways(task: str) -> dict[str, tuple[float, float]]:
    """Return for each metric this package's value and torchmetrics' value; every rank has different rows."""
    text = ["a review of a film"]
    tokenizer = load_tokenizer(DataConfig(tokenizer="wordpiece", vocab_size=128), "unused", text)
    config = ModelConfig(size="tiny", init="random")
    model = build_model(config, task_class(task)(), tokenizer, 32)
    values = {}
    drawn = torch.Generator().manual_seed(dist.get_global_rank())
    classes = len(tokenizer) if task == "mlm" else 2
    shape = (6, 5) if task == "mlm" else (6 + dist.get_global_rank(),)
    for name, metric in model.get_metrics(is_train=True).items():
        metric.update(torch.randn(*shape, classes, generator=drawn), torch.randint(classes, shape, generator=drawn))
        own, metric._computed, metric.dist_sync_fn = float(metric.compute()), None, None
        values[name] = own, float(metric.compute())
    return values


@pytest.mark.parametrize("task", ["classification", "mlm"])
def test_metrics_over_ranks_equal_torchmetrics(task: str) -> None:
    ranks = on_ranks(lambda: _both_ways(task))
    assert ranks[0] == ranks[1]
    assert len(ranks[0]) == 2
    for own, expected in ranks[0].values():
        assert own == expected


def _further_collectives(one: int, more: int) -> Counter[str]:
    """Count the collectives that a run of more batches adds."""
    counts = []
    for batches in (one, more):
        calls: Counter[str] = Counter()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_gather", "barrier", "all_gather_object"):
                patch.setattr(distributed, name, _counting(name, calls))
            options = ("trainer.device=cpu", "plot=false", "export=false", "data.train_samples=512")
            run(*options, f"trainer.max_duration={batches}ba", "scheduler.name=constant", f"run_name=run{batches}")
        counts.append(calls)
    return counts[1] - counts[0]


@pytest.mark.parametrize(("one", "more", "added"), [(5, 6, {}), (10, 20, {"all_gather": 6})])
def test_a_logged_batch_needs_one_all_gather_per_metric_state_and_others_none(
    one: int, more: int, added: dict[str, int]
) -> None:
    """The two metrics have six states."""
    for counts in on_ranks(lambda: _further_collectives(one, more)):
        assert dict(counts) == added


@pytest.mark.parametrize("shown", [[0, 1, 2, 3], [0, 2], [1]])
def test_macro_f1_and_matthews_equal_scikit_learns_with_missing_classes(shown: list[int]) -> None:
    from sklearn.metrics import f1_score, matthews_corrcoef

    drawn = torch.Generator().manual_seed(1)
    metrics = [MacroF1(4), Matthews(4)]
    logits, labels = [], []
    for rows in (7, 30, 1):
        logits.append(torch.randn(rows, 4, generator=drawn).index_fill(1, torch.tensor([0]), -9.0))
        labels.append(torch.tensor(shown)[torch.randint(len(shown), (rows,), generator=drawn)])
        for metric in metrics:
            metric.update(logits[-1], labels[-1])
    predicted, expected = torch.cat(logits).argmax(-1).tolist(), torch.cat(labels).tolist()
    assert float(metrics[0].compute()) == pytest.approx(f1_score(expected, predicted, average="macro", zero_division=0))
    assert float(metrics[1].compute()) == pytest.approx(matthews_corrcoef(expected, predicted), abs=1e-6)


def test_the_metrics_of_many_classes_take_memory_in_proportion() -> None:
    metrics = Classification(labels=[f"class {i}" for i in range(10_000)]).metrics(training=False)
    states = [state for metric in metrics.values() for state in metric._defaults.values()]
    held = sum(state.numel() for state in states if isinstance(state, torch.Tensor))
    assert held < 10 * 10_000
    logits = F.one_hot(torch.tensor([0, 9_999, 5]), 10_000).float()
    for metric in metrics.values():
        metric.update(logits, torch.tensor([0, 9_999, 6]))
    assert float(metrics["MacroF1"].compute()) == pytest.approx(2 / 4)


@pytest.mark.parametrize("shown", [[0, 1], [0], [1]])
@pytest.mark.parametrize("guessed", [[0, 1], [0], [1]])
def test_binary_f1_equals_scikit_learns_of_the_second_class(shown: list[int], guessed: list[int]) -> None:
    from sklearn.metrics import f1_score

    drawn = torch.Generator().manual_seed(1)
    metric = BinaryF1(2)
    expected, predicted = [], []
    for rows in (7, 30, 1):
        labels, guesses = (
            torch.tensor(of)[torch.randint(len(of), (rows,), generator=drawn)] for of in (shown, guessed)
        )
        metric.update(F.one_hot(guesses, 2).float(), labels)
        expected += labels.tolist()
        predicted += guesses.tolist()
    assert float(metric.compute()) == pytest.approx(f1_score(expected, predicted, pos_label=1, zero_division=0))
