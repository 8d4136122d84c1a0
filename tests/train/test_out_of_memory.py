"""Out of memory: training continues with smaller micro-batches, or stops with the size to set."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
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

from composer_speedups import EarlyLoss, SDPAAttention, Unpadding
from composer_speedups.core.errors import RunFailedError
from composer_speedups.data.batching import split_by_tokens
from composer_speedups.data.loader import tokens_and_weight
from composer_speedups.tasks.mlm import MaskedLanguageModelling
from composer_speedups.tasks.models import FinetuneModel
from composer_speedups.tasks.task import Task
from composer_speedups.train import out_of_memory
from composer_speedups.train.out_of_memory import MicrobatchHistory, MicrobatchTrainer
from composer_speedups.train.report import summary_table
from tests.helpers.common import (
    Batch,
    Batches,
    Recorder,
    batch,
    final_weights,
    make_trainer,
    tiny_bert,
    tiny_config,
    trained,
)
from tests.helpers.jobs import run
from tests.reference.tolerance import assert_near

# Composer warns about batches smaller than the micro-batch.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot split tensor of length:UserWarning")
WARNED = pytest.mark.filterwarnings("ignore:trainer.microbatch_size. out of memory:UserWarning")
OOM = "CUDA out of memory. Tried to allocate 20.00 MiB.\nmore of it"


class SmallGPU(Algorithm):
    """Raise what CUDA's allocator raises, depending on the rows of all micro-batches so far.

    Args:
        too_small: A number of rows, more of which do not fit; or a function of the rows of each micro-batch so far.
        at: When to raise.
    """

    def __init__(self, too_small: int | Callable[[list[int]], bool], at: Event = Event.BEFORE_FORWARD) -> None:
        self.too_small = too_small if callable(too_small) else lambda seen: seen[-1] > too_small
        self.at = at
        self.seen: list[int] = []

    def match(self, event: Event, state: State) -> bool:
        return event == self.at

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self.seen.append(len(state.batch["labels"]))
        if self.too_small(self.seen):
            raise torch.OutOfMemoryError(OOM)


class Watch(Recorder):
    """Also record how many samples the training metrics count in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[int] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        super().run_event(event, state, logger)
        if event == Event.AFTER_TRAIN_BATCH and state.train_metrics:
            self.counted.append(int(state.train_metrics["MulticlassConfusionMatrix"].confmat.sum()))


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
    *algorithms: Algorithm,
    batches: list[Batch] = BATCHES,
    size: int = 7,
    tokens: int | None = None,
    task: Task | None = None,
    **settings: Any,
) -> tuple[Any, Watch, MicrobatchHistory]:
    watch = Watch()
    model: Any = HuggingFaceModel(tiny_bert(), use_logits=True, metrics=[MulticlassConfusionMatrix(2)])
    if task is not None:
        torch.manual_seed(0)
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        masked_lm = BertForMaskedLM(tiny_config(initializer_range=0.2, **none))
        model = FinetuneModel(masked_lm, task, train_metrics=False)
    trainer = trained(
        algorithms,
        model=model,
        callbacks=[watch],
        cls=MicrobatchTrainer,
        train_dataloader=DataSpec(
            DataLoader(Batches(batches), batch_size=None),
            split_batch=None if tokens is None else split_by_tokens(tokens),
            get_num_samples_in_batch=lambda b: len(b["labels"]),
            get_num_tokens_in_batch=None if task is None else partial(tokens_and_weight, task),
        ),
        max_duration=f"{len(batches)}ba",
        device_train_microbatch_size=size,
        **settings,
    )
    return trainer, watch, trainer.history  # type: ignore[attr-defined]


def assert_same_training(one: tuple[Any, Watch, Any], other: tuple[Any, Watch, Any]) -> None:
    assert_near(one[1].losses, other[1].losses, what="losses")
    assert_near(one[1].first_gradients, other[1].first_gradients, what="gradients")
    assert_near(final_weights(one[0]), final_weights(other[0]), what="weights")
    assert one[1].counted == other[1].counted


@WARNED
@pytest.mark.pins
@pytest.mark.parametrize(
    ("gpu", "settings", "seen", "size"),
    [
        *((SmallGPU(3, at), {}, [7, 3, 3, 1, 3, 3, 1, 3], 3)
          for at in (Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.AFTER_BACKWARD)),
        (SmallGPU(1), {}, [7, 3, 1, 1], 1),  # one change, although it halves twice
        (SmallGPU(3), {"tokens": 28}, [3, 4, 2, 2, 2, 1], 2),  # the larger part of 7 samples is halved
        (SmallGPU(lambda seen: len(seen) == 2, Event.AFTER_FORWARD), {"size": 4}, [4, 3, 2, 2, 2, 1], 2),
    ],
)  # fmt: skip
def test_smaller_micro_batches_give_the_same_weights(
    gpu: SmallGPU, settings: dict[str, int], seen: list[int], size: int
) -> None:
    """The failed pass must leave nothing in the gradients and metrics, wherever it failed."""
    before = settings.get("size", 7)
    with pytest.warns(UserWarning, match=rf"microbatch_size: out of memory with \d samples .*; continuing with {size}"):
        pieces = train(gpu, Unpadding(), **settings)
    assert gpu.seen[: len(seen)] == seen
    assert pieces[2].changes == [{"batch": 0, "from": before, "to": size}]
    whole = train(size=before)
    assert whole[2].changes == []
    assert_same_training(pieces, whole)


@WARNED
def test_a_repeated_batch_logs_the_loss_of_its_last_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed pass had sent the loss of its first micro-batch to the host."""
    monkeypatch.setattr(EarlyLoss, "needs", lambda *_: ())  # on the CPU
    gpu = SmallGPU(lambda seen: len(seen) == 2, Event.AFTER_FORWARD)
    assert_same_training(train(gpu, EarlyLoss(), size=4), train(size=4))


@WARNED
def test_micro_batches_of_a_masked_lm_are_weighted_by_labelled_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples have 0 to 5 labelled tokens. A mean over samples would differ, and be NaN for a sample without any."""
    train_masked = partial(train, batches=MASKED, task=MaskedLanguageModelling())
    whole = train_masked(size=5)
    for size in (2, 3):  # three micro-batches, and two
        assert_same_training(train_masked(size=size), whole)
    assert_same_training(train_masked(SmallGPU(1), size=5), whole)
    monkeypatch.setattr(MaskedLanguageModelling, "weights_losses", False)
    by_rows = train_masked(SmallGPU(1), size=5)
    assert abs(by_rows[1].losses[0] - whole[1].losses[0]) > 0.01, "the batches distinguish both means"


@WARNED
def test_if_training_cannot_continue_the_error_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"20.00 MiB.\n.* micro-batch of 7, .* is stop; set .*_size=3$"):
        train(SmallGPU(3), on_out_of_memory="stop")
    with pytest.raises(torch.OutOfMemoryError, match=r"micro-batch of 1, and 1 is the minimum; lower data.max_length"):
        train(SmallGPU(0))
    graphs = SDPAAttention("math")
    train(SmallGPU(3), graphs)  # in smaller micro-batches, since only the line below claims that it has graphs
    monkeypatch.setattr(SDPAAttention, "fixed_shapes", True)
    with pytest.raises(torch.OutOfMemoryError, match=r"sdpa_attention replays graphs of that size; set .*=3"):
        train(SmallGPU(3), graphs)
    state = make_trainer(device_train_microbatch_size=8).state
    monkeypatch.setattr(out_of_memory.dist, "get_world_size", lambda: 2)
    error = torch.OutOfMemoryError(OOM)
    with pytest.raises(torch.OutOfMemoryError, match=r"several ranks cannot repeat .*microbatch_size=4"):
        out_of_memory._half_of(state, 8, "halve", error)
    monkeypatch.undo()
    assert out_of_memory._half_of(state, 8, "halve", error) == 4
    monkeypatch.setattr(State, "fsdp_config", object())  # FSDP2 would not train any parameter after a repeated batch
    with pytest.raises(torch.OutOfMemoryError, match=r"cannot repeat a batch .*; set trainer\.microbatch_size=4"):
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
    whole = run(*settings, "trainer.microbatch_size=2")
    assert (whole["training"]["microbatch_size"], whole["training"]["microbatch_chosen"]) == (2, "by the config")
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


# Batches that need about 10 GiB without micro-batches.
LARGE = [
    "trainer.max_duration=3ba",
    "model.size=mini",
    "data.train_samples=2048",
    "data.batch_size=1024",
    "data.max_length=256",
    "data.padding=max_length",
    "algorithms={fused_optimizer: {}}",
    "export=false",
]


@contextlib.contextmanager
def three_gib_more() -> Iterator[float]:
    """Limit this process to 3 GiB of GPU memory beyond what earlier tests hold; yield the limit in GiB."""
    gc.collect()
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + 3 * 2**30
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield limit / 2**30
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("microbatch", ["null", "512", "auto"])
@pytest.mark.filterwarnings("ignore:trainer.microbatch_size. out of memory:UserWarning")
@pytest.mark.filterwarnings("ignore:`device_train_microbatch_size='auto'` may:UserWarning")  # Composer advises
@pytest.mark.filterwarnings("ignore:CUDA out of memory or excessive:RuntimeWarning")  # at each halving
def test_a_batch_that_does_not_fit_the_gpu_is_trained_in_micro_batches(microbatch: str) -> None:
    """Neither the whole batch nor the configured micro-batch fits."""
    whole = run(*LARGE, "trainer.microbatch_size=64")
    with three_gib_more() as limit:
        report = run(*LARGE, f"trainer.microbatch_size={microbatch}")
    training = report["training"]
    assert training["microbatch_chosen"] == ("automatically" if microbatch == "auto" else "after running out of memory")
    assert training["microbatch_size"] in (16, 32, 64, 128, 256)
    assert training["samples"] == 3 * 1024
    assert report["memory"]["peak_gib"] < limit
    assert report["metrics"]["train_loss"] == pytest.approx(whole["metrics"]["train_loss"], rel=1e-3)
