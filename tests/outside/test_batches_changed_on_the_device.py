"""Batches that change between the loader and the forward pass of a Composer Trainer with unpadding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from composer.core import Algorithm, Callback, DataSpec, Event, State
from composer.loggers import Logger
from torch.utils.data import DataLoader

from composer_speedups import FusedLayers, Unpadding
from composer_speedups.packing.encoder import unpadded_encoders
from tests.helpers.common import Batch, Batches, Recorder, batch, final_weights, make_trainer
from tests.helpers.models import Head, tiny_model
from tests.reference.tolerance import assert_near

pytestmark = pytest.mark.outside


def label_padding(batch: Batch) -> Batch:
    return {**batch, "labels": torch.where(batch["labels"] == -100, 1, batch["labels"])}


def label_padding_in_place(batch: Batch) -> Batch:
    batch["labels"][batch["labels"] == -100] = 1
    return batch


def roll_to_the_left(batch: Batch) -> Batch:
    """Move the padding of the first rows to the left."""
    shift = batch["attention_mask"].shape[1] - int(batch["attention_mask"][0].sum())
    return {name: values.roll(shift, 1) if values.ndim == 2 else values for name, values in batch.items()}


def shorten_in_place(batch: Batch) -> Batch:
    batch["attention_mask"][:, 3:] = 0
    return batch


class Change(Algorithm):
    def __init__(self, change: Callable[[Batch], Batch], event: Event) -> None:
        self.change, self.event = change, event

    def match(self, event: Event, state: State) -> bool:
        return event == self.event

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        state.batch = self.change(state.batch)


class Ran(Callback):
    def __init__(self) -> None:
        self.ran: list[str | None] = []

    def batch_end(self, state: State, logger: Logger) -> None:
        self.ran += [encoder.ran for encoder in unpadded_encoders(state.model)]


def batches(head: Head) -> list[Batch]:
    made = [batch([9, 4, 12], seed=seed) for seed in range(3)]
    if head == "tokens":
        for inputs in made:
            inputs["labels"] = (inputs["input_ids"] % 2).masked_fill(inputs["attention_mask"] == 0, -100)
    return made


def train(head: Head, algorithms: list[Any], transform: Any = None) -> tuple[Any, list[float], list[str | None]]:
    recorder, ran = Recorder(), Ran()
    spec = DataSpec(
        DataLoader(Batches(batches(head)), batch_size=None),
        microbatch_transforms=transform,
        split_batch=lambda whole, size: [{name: values.clone() for name, values in whole.items()}],
        get_num_samples_in_batch=lambda whole: len(whole["labels"]),
    )
    trainer = make_trainer(
        algorithms,
        model=tiny_model("bert", head),
        callbacks=[recorder, ran],
        train_dataloader=spec,
        max_duration="3ba",
    )
    trainer.fit()
    weights = final_weights(trainer)
    trainer.close()
    assert "batch_to_device" not in vars(trainer.state.device)
    return weights, recorder.losses, ran.ran


@pytest.mark.parametrize(
    ("head", "change", "expected"),
    [
        ("tokens", label_padding, "padded"),
        ("tokens", label_padding_in_place, "padded"),
        ("classification", roll_to_the_left, "padded"),
        ("classification", shorten_in_place, "unpadded"),
    ],
)
@pytest.mark.parametrize("where", ["before unpadding", "after unpadding", "microbatch_transforms"])
def test_a_batch_that_changes_is_computed_as_in_the_untouched_model(
    head: Head, change: Callable[[Batch], Batch], expected: str, where: str
) -> None:
    in_place = change.__name__.endswith("in_place")
    transform = change if where == "microbatch_transforms" else None
    changes = [] if transform else [Change(change, Event.BEFORE_FORWARD)]
    weights, losses, _ = train(head, changes, transform)
    techniques = [Unpadding(8, check="never", on_unavailable="warn"), FusedLayers(on_unavailable="warn")]
    ordered = [*techniques, *changes] if where == "after unpadding" else [*changes, *techniques]
    if where == "after unpadding" and in_place:
        # neither another tensor nor another event shows this change; the check of the planned values does
        with pytest.raises(RuntimeError, match=r"give padding the label -100|differs from the planned one"):
            train(head, ordered, transform)
        return
    if expected == "padded":
        with pytest.warns(UserWarning, match="continuing"):
            own = train(head, ordered, transform)
    else:
        own = train(head, ordered, transform)
    assert own[2] == [expected] * 3
    assert_near(own[1], losses, what="losses")
    assert_near(own[0], weights, what="weights")


def test_an_unchanged_batch_is_counted_on_the_host_only() -> None:
    technique = Unpadding(8)
    train("tokens", [technique])
    assert "masks_counted_on_the_device" not in technique.evidence
    assert technique.evidence["padding_of_the_run"] > 0
