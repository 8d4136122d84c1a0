"""Metrics equal scikit-learn's, on any number of ranks, and reading them does not wait for the device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from composer import Trainer
from composer.core import Callback, Event, State
from composer.loggers import Logger
from composer.utils import dist
from sklearn.metrics import f1_score, matthews_corrcoef
from torch import distributed
from torch.nn import functional as F

import composer_speedups.train.trainer
from composer_speedups.data.loader import build_data
from composer_speedups.tasks.classification import Classification
from composer_speedups.tasks.metrics import BinaryF1, MacroF1, Matthews
from composer_speedups.tasks.models import build_model
from composer_speedups.tasks.settings import DataConfig, ModelConfig
from composer_speedups.tasks.task import task_class
from tests.helpers.jobs import run
from tests.helpers.ranks import on_ranks, once_per_run
from tests.helpers.support import TASKS


@pytest.mark.filterwarnings("ignore:A single label was found:UserWarning")
@pytest.mark.parametrize("shown", [[0, 1, 2, 3], [0, 2], [0, 1], [0], [1]])
@pytest.mark.parametrize("guessed", [[0, 1, 2, 3], [1, 2, 3], [0, 1], [0], [1]])
def test_metrics_by_class_equal_scikit_learns_with_missing_classes(shown: list[int], guessed: list[int]) -> None:
    drawn = torch.Generator().manual_seed(1)
    macro, matthews, binary = metrics = [MacroF1(4), Matthews(4), BinaryF1(2)]
    expected, predicted = [], []
    for rows in (7, 30, 1):
        labels, guesses = (
            torch.tensor(of)[torch.randint(len(of), (rows,), generator=drawn)] for of in (shown, guessed)
        )
        for metric in metrics if max(shown + guessed) < 2 else metrics[:2]:
            metric.update(F.one_hot(guesses, 2 if metric is binary else 4).float(), labels)
        expected += labels.tolist()
        predicted += guesses.tolist()
    assert float(macro.compute()) == pytest.approx(f1_score(expected, predicted, average="macro", zero_division=0))
    assert float(matthews.compute()) == pytest.approx(matthews_corrcoef(expected, predicted), abs=1e-6)
    if binary.update_called:
        assert float(binary.compute()) == pytest.approx(f1_score(expected, predicted, zero_division=0))


def test_the_metrics_of_many_classes_take_memory_in_proportion() -> None:
    metrics = Classification(labels=[f"class {i}" for i in range(10_000)]).metrics(training=False)
    states = [state for metric in metrics.values() for state in metric._defaults.values()]
    held = sum(state.numel() for state in states if isinstance(state, torch.Tensor))
    assert held < 10 * 10_000
    logits = F.one_hot(torch.tensor([0, 9_999, 5]), 10_000).float()
    for metric in metrics.values():
        metric.update(logits, torch.tensor([0, 9_999, 6]))
    assert float(metrics["MacroF1"].compute()) == pytest.approx(2 / 4)


def _counting(name: str, calls: Counter[str]) -> Any:
    original = getattr(distributed, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return original(*args, **kwargs)

    return noted


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


Metrics = dict[tuple[str, int], dict[str, float]]  # by task and number of samples
SIZES = (43, 2)  # samples in batches of 6: of 43, ranks repeat one in a last batch; of 2, one of 3 ranks has none


def evaluated(task_name: str, samples: int) -> dict[str, float]:
    """The metrics of an untrained model over a task's first built-in validation samples."""
    config = DataConfig(
        source="builtin", train_samples=60, eval_samples=samples, batch_size=6, length_scale=0.1, max_length=32,
        padding="longest", tokenizer="wordpiece", vocab_size=300, cache_dir=f"cache{dist.get_global_rank()}",
    )  # fmt: skip
    model_config = ModelConfig(size="tiny", init="random", dropout=0.0)
    task = task_class(task_name)()
    data = build_data(config, task, model_name="", on_gpu=False)
    torch.manual_seed(1)
    model = build_model(model_config, task, data.tokenizer, 32)
    trainer = Trainer(model=model, eval_dataloader=data.eval, device="cpu", progress_bar=False)
    trainer.eval()
    trainer.close()
    (metrics,) = trainer.state.eval_metrics.values()
    return {name: float(metric.compute()) for name, metric in metrics.items()}


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Metrics]]:
    def all_tasks() -> Metrics:
        return {(task, samples): evaluated(task, samples) for task in TASKS for samples in SIZES}

    def compute() -> dict[int, list[Metrics]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path_factory.mktemp("evaluation"))
            return {ranks: on_ranks(all_tasks, ranks) for ranks in (1, 2, 3)}

    return once_per_run(compute, "evaluation_on_ranks", tmp_path_factory)


@pytest.mark.exhaustive
@pytest.mark.parametrize("samples", SIZES)
@pytest.mark.parametrize("task", TASKS)
def test_the_metrics_do_not_depend_on_the_number_of_ranks(
    task: str, samples: int, metrics: dict[int, list[Metrics]]
) -> None:
    """Rounding differs, because batches have other widths; an untrained regression's outputs differ only slightly."""
    (one,) = metrics[1]
    expected = one[task, samples]
    for ranks in (2, 3):
        for rank, own in enumerate(metrics[ranks]):
            assert own[task, samples] == pytest.approx(expected, rel=3e-4, nan_ok=True), (ranks, rank)


class _Strict(Callback):
    """Raise on synchronizations from the second to the sixth evaluation batch."""

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.EVAL_BEFORE_FORWARD and state.eval_timestamp.batch.value > 1:
            torch.cuda.set_sync_debug_mode("error")
        elif event == Event.EVAL_BATCH_END and state.eval_timestamp.batch.value >= 6:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_evaluation_does_not_synchronize_with_the_gpu_between_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    build = composer_speedups.train.trainer.build_trainer

    def strict(*args: Any, **kwargs: Any) -> Any:
        trainer = build(*args, **kwargs)
        trainer.state.callbacks.append(_Strict())
        return trainer

    monkeypatch.setattr(composer_speedups.train.trainer, "build_trainer", strict)
    techniques = [
        "sdpa_attention=null",
        "mixed_precision={dtype: bf16}",
        "unpadding={}",
        "fused_layers={}",
        "early_loss={}",
    ]
    try:
        overrides = [f"algorithms.{technique}" for technique in techniques]
        report = run("trainer.max_duration=1ba", "data.eval_samples=64", "trainer.device=gpu", *overrides)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert 0 <= report["metrics"]["accuracy"] <= 1
