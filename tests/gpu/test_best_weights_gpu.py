"""BestWeights under captured CUDA graphs: the restored weights are the kept ones, and evaluate like them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from composer import Trainer
from composer.core import Callback, DataSpec, State
from composer.loggers import Logger
from composer.models import HuggingFaceModel
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from composer_speedups import BestWeights, CUDAGraphs, FusedLayers, MixedPrecision, Unpadding
from tests.helpers.common import data_spec, learnable_batches, make_trainer, tiny_bert

pytestmark = pytest.mark.gpu


class Evaluated(Callback):
    """Records weights and accuracy of each evaluation."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.accuracy: dict[int, float] = {}

    def eval_end(self, state: State, logger: Logger) -> None:
        batch = state.timestamp.batch.value
        self.weights[batch] = {name: value.detach().cpu().clone() for name, value in state.model.state_dict().items()}
        self.accuracy[batch] = float(state.eval_metric_values["MulticlassAccuracy"])


def test_the_best_weights_are_restored_under_cuda_graphs() -> None:
    best, evaluated = BestWeights("accuracy", mode="min"), Evaluated()  # the smallest is not that of the last batch
    metrics: Any = [MulticlassAccuracy(num_classes=2, average="micro")]
    evaluation: DataSpec = data_spec(learnable_batches(8))
    trainer: Trainer = make_trainer(
        [MixedPrecision(), Unpadding(), FusedLayers(), CUDAGraphs()],
        model=HuggingFaceModel(tiny_bert(), use_logits=True, metrics=metrics),
        batches=learnable_batches(60),
        gpu=True,
        callbacks=[evaluated, best],
        eval_dataloader=evaluation,
        eval_interval="10ba",
    )
    trainer.fit()
    smallest = min(evaluated.accuracy, key=evaluated.accuracy.__getitem__)
    assert best.batch == smallest < 60
    assert {value.device.type for value in best.weights.values()} == {"cpu"}
    assert best.restore(trainer.state)
    restored = {name: value.detach().cpu() for name, value in trainer.state.model.state_dict().items()}
    torch.testing.assert_close(restored, evaluated.weights[smallest], rtol=0, atol=0)
    trainer.eval()
    accuracy = float(trainer.state.eval_metric_values["MulticlassAccuracy"])
    assert accuracy == pytest.approx(evaluated.accuracy[smallest], abs=0.02)
    trainer.close()
