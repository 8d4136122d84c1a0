"""HF Trainer and Composer's HuggingFaceModel around a changed model, as their own test suites use them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.core import Evaluator
from composer.models import HuggingFaceModel
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy
from transformers import Trainer, TrainingArguments, default_data_collator

from composer_speedups import FusedLayers, Unpadding, apply_recommended, recommended, with_row_lengths
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.kernels.common import counting
from tests.helpers.common import Batch, batch, data_spec, make_trainer, plain_batches, tiny_bert, trained
from tests.helpers.exhaustive import others_exhaustive
from tests.helpers.models import tiny_model
from tests.helpers.rerun import graphed
from tests.reference.tolerance import assert_near

pytestmark = [pytest.mark.outside, pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")]


class Rows(torch.utils.data.Dataset[Batch]):
    """Rows of one batch."""

    def __init__(self, whole: Batch) -> None:
        self.whole = whole

    def __len__(self) -> int:
        return len(self.whole["input_ids"])

    def __getitem__(self, index: int) -> Batch:
        return {name: values[index] for name, values in self.whole.items()}


def labelled(*, padding: bool) -> Batch:
    inputs = batch([5, 12, 9, 3, 7, 12, 2, 8])
    labels = inputs["input_ids"] % 2 + (inputs["attention_mask"] == 0)
    ignored = labels.masked_fill(inputs["attention_mask"] == 0, -100)
    return {**inputs, "labels": labels.clamp(max=1) if padding else ignored}


def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return nn.functional.cross_entropy(outputs["logits"].view(-1, 2), labels.view(-1))


def trained_by_hf(
    model: Any,
    data: Batch,
    folder: Path,
    smoothing: float = 0.0,
    loss: Any = None,
    collate: Any = None,
    **settings: Any,
) -> tuple[dict[str, Any], float]:
    arguments = TrainingArguments(
        str(folder), max_steps=4, per_device_train_batch_size=4, report_to=[], disable_tqdm=True,
        optim="sgd", label_smoothing_factor=smoothing, save_strategy="no", logging_strategy="no", seed=1,
        **{"use_cpu": True, "learning_rate": 0.1, **settings},
    )  # fmt: skip
    rows: Any = {"train_dataset": Rows(data), "eval_dataset": Rows(data), "data_collator": collate}
    trainer = Trainer(model, arguments, compute_loss_func=loss, **rows)
    trainer.train()
    return copy.deepcopy(model.state_dict()), trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize(
    ("smoothing", "loss", "padding"),
    others_exhaustive(
        [(*settings, padding) for settings in ((0.1, None), (0.0, own_loss), (0.0, None)) for padding in (True, False)],
        {(0.1, None, True), (0.0, own_loss, False)}.__contains__,
    ),
)
def test_hf_trainer_trains_and_evaluates_like_the_untouched_model(
    smoothing: float, loss: Any, padding: bool, tmp_path: Path
) -> None:
    data = labelled(padding=padding)
    weights, evaluated = trained_by_hf(tiny_model("bert", "tokens"), data, tmp_path / "a", smoothing, loss)
    model = tiny_model("bert", "tokens")
    apply_recommended(model)
    if padding:
        reason = "the loss reads outputs at padding positions" if smoothing or loss else "padding has a label"
        with pytest.raises(ValueError, match=reason):
            trained_by_hf(model, data, tmp_path / "b", smoothing, loss)
        return
    with counting() as ran:
        own, own_evaluated = trained_by_hf(model, data, tmp_path / "b", smoothing, loss)
    assert ran["packed_encoder"] > 1
    assert_near(own, weights, what="weights")
    assert own_evaluated == pytest.approx(evaluated, abs=1e-5)


def test_hf_trainer_replays_graphs_and_removes_the_columns_that_the_model_does_not_name(tmp_path: Path) -> None:
    data = {**batch([5, 12, 9, 3, 7, 12, 2, 8]), "text_id": torch.arange(8)}
    weights, evaluated = trained_by_hf(tiny_bert(), data, tmp_path / "a")
    model = tiny_bert()
    unpad(model, 64)
    calls, collate = graphed(model, max_graphs=2), with_row_lengths(default_data_collator, model)
    own, own_evaluated = trained_by_hf(model, data, tmp_path / "b", collate=collate)
    assert (calls.graphs, calls.replays, calls.eager_calls) == (1, 4, 0)
    assert_near(own, weights, what="weights")
    assert own_evaluated == pytest.approx(evaluated, abs=1e-5)


# What Composer's tests of HuggingFaceModel check.


def composer_model(**settings: Any) -> HuggingFaceModel:
    metrics = [MulticlassAccuracy(num_classes=2, average="micro")]
    return HuggingFaceModel(tiny_bert(), metrics=metrics, use_logits=True, **settings)  # type: ignore[arg-type]


def test_composer_trains_evaluates_and_predicts_like_the_untouched_model() -> None:
    results = []
    for techniques in ([], [Unpadding(8), FusedLayers()]):
        model, batches = composer_model(), plain_batches()
        trainer = make_trainer(techniques, model=model, batches=batches)
        with counting() as ran:
            trainer.fit()
            names = ["MulticlassAccuracy"]
            trainer.eval(
                Evaluator(
                    label="eval", dataloader=data_spec(batches), metric_names=names, device_eval_microbatch_size=3
                )
            )
        assert not ran["counted_in_the_call"]
        predicted = trainer.predict(data_spec(batches))
        accuracy = trainer.state.eval_metrics["eval"]["MulticlassAccuracy"].compute()
        results.append([accuracy, *(outputs["logits"] for outputs in predicted)])
        trainer.close()
    assert_near(results[1], results[0])


def test_tuples_as_outputs_and_further_entries_of_a_batch() -> None:
    losses: list[Any] = []
    for techniques in (list[Any](), recommended(on_unavailable="warn")[3:5]):
        model = composer_model()
        model.model.config.return_dict = False
        batches = [{**inputs, "text_id": torch.arange(len(inputs["labels"]))} for inputs in plain_batches()]
        trained(techniques, model=model, batches=batches)
        losses.append(copy.deepcopy(model.state_dict()))
    assert_near(losses[1], losses[0])
