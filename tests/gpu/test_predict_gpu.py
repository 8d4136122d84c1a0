"""Predictions and evaluation on the GPU: those of the CPU in float32, and nearly so in bf16."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_speedups.data.builtin import builtin_samples
from composer_speedups.data.sources import labelled_samples
from composer_speedups.data.summary import DataSummary
from composer_speedups.predict.model import FinishedModel
from tests.helpers.jobs import run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("task", ["classification", "token_classification", "reranking", "embedding", "mlm"])
def test_metrics_are_those_of_the_cpu(task: str) -> None:
    run(
        f"model.task={task}", "trainer.max_duration=6ba", "trainer.device=cpu", "run_name=done", "data.length_scale=0.2"
    )
    columns = builtin_samples(task, 64, 5, "eval", 0.2)
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def metrics(**where: str) -> dict[str, float]:
        model = FinishedModel.load(Path("runs/done/model"), evaluates=True, **where)
        return model.evaluate(labelled_samples(rows, "rows", model.task, DataSummary())[0], 16)[0]

    expected = metrics(device="cpu")
    assert len(expected) >= 2
    assert metrics(device="gpu", precision="fp32") == pytest.approx(expected, rel=1e-3, abs=1e-3)
    if "loss" in expected:
        assert metrics(device="gpu")["loss"] == pytest.approx(expected["loss"], rel=0.02)
