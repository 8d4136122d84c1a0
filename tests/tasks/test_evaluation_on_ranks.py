"""An evaluation gives the same metrics on any number of ranks, also where ranks have no sample of their own."""

from __future__ import annotations

import pytest
import torch
from composer import Trainer
from composer.utils import dist

from composer_speedups.data.loader import build_data
from composer_speedups.tasks.data_config import DataConfig
from composer_speedups.tasks.models import build_model
from composer_speedups.tasks.settings import ModelConfig
from composer_speedups.tasks.task import task_class
from tests.helpers.ranks import on_ranks, once_per_run
from tests.helpers.support import TASKS

Metrics = dict[tuple[str, int], dict[str, float]]  # by task and number of samples
pytestmark = pytest.mark.exhaustive
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
