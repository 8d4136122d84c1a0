"""Out of memory: training continues with smaller micro-batches, or stops with the size to set."""

from __future__ import annotations

import re
import sys
from functools import partial
from typing import Any

import pytest
import torch
from composer.core import Algorithm, DataSpec, Event, State
from composer.loggers import Logger
from composer.models import HuggingFaceModel
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassConfusionMatrix
from transformers import BertForMaskedLM

from composer_speedups import SDPAAttention, Unpadding
from composer_speedups.core.errors import RunFailedError
from composer_speedups.data.loader import tokens_and_weight
from composer_speedups.tasks.mlm import MaskedLanguageModelling
from composer_speedups.tasks.models import FinetuneModel
from composer_speedups.tasks.task import Task
from composer_speedups.train import out_of_memory
from composer_speedups.train.out_of_memory import MicrobatchHistory, MicrobatchTrainer
from composer_speedups.train.report import summary_table
from tests.helpers.common import Batch, Batches, Recorder, batch, final_weights, make_trainer, tiny_bert, tiny_config
from tests.helpers.jobs import run
from tests.reference.tolerance import assert_near

# Composer warns about batches smaller than the micro-batch.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot split tensor of length:UserWarning")
SAID = pytest.mark.filterwarnings("ignore:trainer.microbatch_size. out of memory:UserWarning")
OOM = "CUDA out of memory. Tried to allocate 20.00 MiB.\nmore of it"


class SmallGPU(Algorithm):
    """Raise what CUDA's allocator raises if a micro-batch has more than ``rows`` rows."""

    def __init__(self, rows: int, at: Event = Event.BEFORE_FORWARD) -> None:
        self.rows, self.at = rows, at
        self.seen: list[int] = []

    def match(self, event: Event, state: State) -> bool:
        return event == self.at

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self.seen.append(len(state.batch["labels"]))
        if self.seen[-1] > self.rows:
            raise torch.OutOfMemoryError(OOM)


BATCHES = [batch([9, 16, 3, 12, 5, 8, 2], seed=1), batch([1, 4, 16, 7, 7, 2, 3], seed=2), batch([2, 9, 4], seed=3)]


def masked(rows: list[list[int]], seed: int) -> Batch:
    """Return a batch with labels at the given positions of each row only."""
    made = batch([16] * len(rows), seed=seed)
    labels = torch.full_like(made["input_ids"], -100)
    for row, places in enumerate(rows):
        labels[row, places] = made["input_ids"][row, places]
    return {**made, "labels": labels}


MASKED = [masked([[1, 2, 3, 4, 5], [6], [7, 8], [], [9, 10, 11]], 1), masked([[3], [], [], [1, 5, 7, 9], [2]], 2)]


def train(
    *algorithms: Algorithm, batches: list[Batch] = BATCHES, size: int = 7, task: Task | None = None, **settings: Any
) -> tuple[Any, Recorder, MicrobatchHistory]:
    recorder, history = Recorder(), MicrobatchHistory()
    model: Any = tiny_bert()
    if task is not None:
        torch.manual_seed(0)
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        masked_lm = BertForMaskedLM(tiny_config(initializer_range=0.2, **none))
        model = FinetuneModel(masked_lm, task, train_metrics=False)
    trainer = make_trainer(
        algorithms,
        model=model,
        callbacks=[recorder, history],
        cls=MicrobatchTrainer,
        train_dataloader=DataSpec(
            DataLoader(Batches(batches), batch_size=None),
            get_num_samples_in_batch=lambda b: len(b["labels"]),
            get_num_tokens_in_batch=None if task is None else partial(tokens_and_weight, task),
        ),
        max_duration=f"{len(batches)}ba",
        device_train_microbatch_size=size,
        **settings,
    )
    trainer.fit()
    trainer.close()
    return trainer, recorder, history


@pytest.mark.pins
@pytest.mark.parametrize("at", [Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.AFTER_BACKWARD])
def test_smaller_micro_batches_give_the_same_weights(at: Event) -> None:
    """7 samples become 3 + 3 + 1. The failed pass must leave nothing in the gradients, wherever it failed."""
    whole, losses, untouched = train()
    gpu = SmallGPU(3, at)
    with pytest.warns(UserWarning, match=r"microbatch_size: out of memory with 7 samples .*; continuing with 3"):
        pieces, smaller, history = train(gpu, Unpadding())
    assert gpu.seen == [7, 3, 3, 1, 3, 3, 1, 3]
    assert history.changes == [{"batch": 0, "from": 7, "to": 3}]
    assert untouched.changes == []
    assert_near(smaller.losses, losses.losses, what="losses")
    assert_near(smaller.first_gradients, losses.first_gradients, what="gradients")
    assert_near(final_weights(pieces), final_weights(whole), what="weights")


class SecondPass(Algorithm):
    """Run out of memory in the second forward pass, after a micro-batch that fit."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def match(self, event: Event, state: State) -> bool:
        return event == Event.AFTER_FORWARD

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self.seen.append(len(state.batch["labels"]))
        if len(self.seen) == 2:
            raise torch.OutOfMemoryError(OOM)


@SAID
def test_a_micro_batch_that_fit_is_discarded_if_a_later_one_does_not() -> None:
    """Each sample counts once in the loss, the gradients and the metrics."""

    class Counted(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.reviews: list[int] = []

        def run_event(self, event: Event, state: State, logger: Logger) -> None:
            super().run_event(event, state, logger)
            if event == Event.AFTER_TRAIN_BATCH:
                self.reviews.append(int(state.train_metrics["MulticlassConfusionMatrix"].confmat.sum()))

    def train_counted(*algorithms: Algorithm) -> tuple[Any, Counted]:
        counted = Counted()
        model = HuggingFaceModel(tiny_bert(), use_logits=True, metrics=[MulticlassConfusionMatrix(2)])
        trainer = make_trainer(
            algorithms,
            model=model,
            callbacks=[counted],
            cls=MicrobatchTrainer,
            train_dataloader=DataSpec(
                DataLoader(Batches(BATCHES), batch_size=None), get_num_samples_in_batch=lambda b: len(b["labels"])
            ),
            max_duration="3ba",
            device_train_microbatch_size=4,
        )
        trainer.fit()
        trainer.close()
        return trainer, counted

    whole, expected = train_counted()
    gpu = SecondPass()
    pieces, counted = train_counted(gpu)
    assert gpu.seen[:6] == [4, 3, 2, 2, 2, 1]
    assert_near(counted.losses, expected.losses, what="losses")
    assert_near(counted.first_gradients, expected.first_gradients, what="gradients")
    assert_near(final_weights(pieces), final_weights(whole), what="weights")
    assert counted.reviews == expected.reviews == [7, 7, 3]


@SAID
def test_a_changed_micro_batch_is_a_metric() -> None:
    """Loggers such as W&B raise an error if a hyperparameter changes, and the size may change several times."""
    trainer, _, history = train(SmallGPU(3), SmallGPU(2, Event.AFTER_FORWARD))
    (logger,) = trainer.logger.destinations
    assert history.changes
    assert "microbatch_size" not in logger.hyperparameters
    sizes = [value for _, value in logger.data["trainer/device_train_microbatch_size"]]
    assert sizes[-1] == history.changes[-1]["to"]


@SAID
def test_micro_batches_are_halved_as_often_as_needed() -> None:
    _, losses, _ = train()
    gpu = SmallGPU(1)
    _, smaller, history = train(gpu)
    assert [change["to"] for change in history.changes] == [1]  # one change per batch, although it halves twice
    assert gpu.seen[:4] == [7, 3, 1, 1]
    assert set(gpu.seen[3:]) == {1}
    assert_near(smaller.losses, losses.losses, what="losses")


@SAID
def test_micro_batches_of_a_masked_lm_are_weighted_by_labelled_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples have 0 to 5 labelled tokens. A mean over samples would differ, and be NaN for a sample without any."""
    task = MaskedLanguageModelling()
    whole, losses, _ = train(batches=MASKED, task=task, size=5)
    given, by_config, _ = train(batches=MASKED, task=task, size=2)
    pieces, smaller, _ = train(SmallGPU(1), batches=MASKED, task=task, size=5)
    for recorder, trainer in ((by_config, given), (smaller, pieces)):
        assert_near(recorder.losses, losses.losses, what="losses")
        assert_near(final_weights(trainer), final_weights(whole), what="weights")
    monkeypatch.setattr(MaskedLanguageModelling, "weights_losses", False)
    _, by_rows, _ = train(SmallGPU(1), batches=MASKED, task=task, size=5)
    assert abs(by_rows.losses[0] - losses.losses[0]) > 0.01, "the batches distinguish both means"


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (3, {"on_out_of_memory": "stop"}, r"micro-batch of 7, .*on_out_of_memory is stop; set .*microbatch_size=3$"),
        (0, {}, r"micro-batch of 1, and 1 is the minimum; lower data.max_length"),
    ],
)
@SAID
def test_if_training_cannot_continue_the_error_names_the_setting(rows: int, settings: Any, message: str) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory. Tried to allocate 20.00 MiB.\n") as error:
        train(SmallGPU(rows), **settings)
    assert "more of it" not in str(error.value)
    assert re.search(message, str(error.value))


def test_several_ranks_and_captured_graphs_do_not_halve(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = SDPAAttention("math")
    monkeypatch.setattr(SDPAAttention, "fixed_shapes", True)
    with pytest.raises(torch.OutOfMemoryError, match=r"sdpa_attention replays graphs of that size; set .*=3"):
        train(SmallGPU(3), graphs)
    state = make_trainer(device_train_microbatch_size=8).state
    monkeypatch.setattr(out_of_memory.dist, "get_world_size", lambda: 2)
    error = torch.OutOfMemoryError(OOM)
    with pytest.raises(torch.OutOfMemoryError, match=r"2 ranks cannot repeat .*microbatch_size=4, or auto"):
        out_of_memory._half_of(state, 8, "halve", error)


def test_out_of_memory_in_the_optimizer_step_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some weights may already be updated, so the batch cannot be trained again."""

    def update(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError(OOM)

    monkeypatch.setattr(sys.modules["torch.optim.adam"], "adam", update)
    gpu = SmallGPU(7)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        train(gpu)
    assert gpu.seen == [7]


def test_the_report_states_each_change_of_the_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = FinetuneModel.forward

    def small(self: FinetuneModel, given: Batch) -> Any:
        if self.training and len(given["labels"]) > 4:
            raise torch.OutOfMemoryError(OOM)
        return forward(self, given)

    settings = ["trainer.max_duration=3ba", "trainer.eval_batches=1", "export=false"]
    whole = run(*settings)
    monkeypatch.setattr(FinetuneModel, "forward", small)
    with pytest.warns(UserWarning, match="out of memory with 8 samples per forward pass in batch 0; continuing with 4"):
        report = run(*settings)
    training = report["training"]
    assert (training["microbatch_size"], training["microbatch_chosen"]) == (4, "after running out of memory")
    assert training["microbatch_changes"] == [{"batch": 0, "from": 8, "to": 4}]
    assert "chosen after running out of memory" in summary_table(report, "runs")
    assert report["metrics"]["train_loss"] == pytest.approx(whole["metrics"]["train_loss"], rel=1e-3)
    message = r"^trainer\.microbatch_size: .* micro-batch of 8, .*; set trainer\.microbatch_size=4 \(CUDA out of memory"
    with pytest.raises(RunFailedError, match=message):
        run(*settings, "trainer.on_out_of_memory=stop")
