"""Tasks in your own Composer Trainer, without a config and without train.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from composer import Trainer
from torch.utils.data import DataLoader
from transformers import BertForSequenceClassification

from composer_speedups import tasks
from composer_speedups.core.errors import ConfigError
from composer_speedups.data.loader import build_data
from composer_speedups.tasks import Classification, FinetuneModel, Reranking
from composer_speedups.tasks.data_config import DataConfig
from tests.helpers.common import batch, tiny_config


def test_every_public_name_can_be_imported() -> None:
    for name in tasks.__all__:
        assert getattr(tasks, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Clasification'"):
        tasks.Clasification  # noqa: B018


def test_a_task_trains_and_evaluates_in_a_composer_trainer() -> None:
    task = Classification(labels=["no", "perhaps", "yes"], label_smoothing=0.1)
    torch.manual_seed(0)
    stock = BertForSequenceClassification(tiny_config(**task.head_settings()))
    model = FinetuneModel(stock, task)
    assert stock.config.id2label == {0: "no", 1: "perhaps", 2: "yes"}
    batches: list[Any] = [batch([9, 7, 12], 12, seed=seed) for seed in range(4)]
    rows = [{name: values[row] for name, values in part.items()} for part in batches for row in range(3)]
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(rows, batch_size=3),
        eval_dataloader=DataLoader(rows, batch_size=3),
        max_duration="1ep",
        progress_bar=False,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        device="cpu",
    )
    trainer.fit()
    trainer.close()
    stock.eval()
    with torch.no_grad():
        logits = torch.cat([stock(part["input_ids"], part["attention_mask"]).logits for part in batches])
    labels = torch.cat([part["labels"] for part in batches])
    (metrics,) = trainer.state.eval_metrics.values()
    torch.testing.assert_close(metrics["CrossEntropy"].compute(), torch.nn.functional.cross_entropy(logits, labels))
    assert float(metrics["MulticlassAccuracy"].compute()) == pytest.approx(
        float((logits.argmax(-1) == labels).float().mean())
    )


def test_a_loss_that_compares_samples_cannot_be_streamed() -> None:
    config = DataConfig(source="files", train_file="a.csv", streaming=True)
    with pytest.raises(ConfigError, match=r"^model\.loss pairwise needs every document of a query up front"):
        build_data(config, Reranking(loss_name="pairwise"), model_name="", on_gpu=False)
