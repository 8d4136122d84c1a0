"""CUDA graphs of an unpadded model, one set per number of packed tokens, with a stand-in for the capture."""

from __future__ import annotations

from typing import Any

import pytest
from composer.models import HuggingFaceModel

from composer_speedups import Unpadding, untouched
from composer_speedups.algorithms.cuda_graphs.graphed_calls import GraphedCalls
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.packing.encoder import Packing, unpadded_encoders, with_counted_rows
from tests.helpers.common import Batch, Recorder, batch, make_trainer, tiny_bert
from tests.helpers.rerun import graphed
from tests.helpers.unpadded import compared
from tests.reference.loop import train_plainly
from tests.reference.tolerance import assert_near


def graphed_pair(max_graphs: int = 3) -> tuple[Any, Any, GraphedCalls]:
    reference, model = tiny_bert(), tiny_bert()
    for network in (reference, model):
        network.config.problem_type = "single_label_classification"
    unpad(model, 16)
    return reference, model, graphed(model, max_graphs)


def step(reference: Any, model: Any, inputs: Batch) -> str:
    with with_counted_rows(model, inputs, inputs):
        return compared(reference, model, lambda network: network(**inputs).loss)


def test_each_number_of_packed_tokens_is_captured_once_and_replayed_with_other_masks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Packing, "_count_and_lay_out", lambda *_: pytest.fail("counted inside the forward pass"))
    reference, model, calls = graphed_pair()
    # 32, 32, 16, 48, 32 and 16 packed tokens
    for seed, lengths in enumerate([[12, 7, 9], [1, 16, 4], [3, 2, 1], [16, 15, 2], [10, 10, 1], [1, 1, 1]]):
        step(reference, model, batch(lengths, 16, seed=seed))
    assert (calls.graphs, calls.replays, calls.eager_calls) == (3, 6, 0)


def test_above_max_graphs_or_without_row_lengths_or_untouched_calls_are_eager() -> None:
    reference, model, calls = graphed_pair(max_graphs=1)
    step(reference, model, batch([12, 7, 9], 16))
    step(reference, model, batch([16, 16, 9], 16, seed=1))
    assert (calls.graphs, calls.replays, calls.eager_calls) == (1, 1, 1)
    inputs = batch([12, 7, 9], 16, seed=2)
    assert compared(reference, model, lambda network: network(**inputs).loss) == "packed"
    assert (calls.graphs, calls.replays, calls.eager_calls) == (1, 1, 2)
    with untouched(model):
        assert step(reference, model, inputs) == "padded"
    assert (calls.graphs, calls.replays) == (1, 1)


def test_padded_batches_have_their_own_graph() -> None:
    reference, model, calls = graphed_pair()
    inputs = batch([12, 7, 9], 16)
    step(reference, model, {**inputs, "attention_mask": inputs["attention_mask"].flip(-1)})
    step(reference, model, inputs)
    assert (calls.graphs, calls.replays) == (2, 2)


def test_composers_batches_are_counted_before_their_replays() -> None:
    recorder = Recorder()
    batches = [batch(lengths, 16, seed=i) for i, lengths in enumerate([[12, 7, 9], [1, 16, 4], [3, 2, 1], [9, 9, 9]])]
    expected = train_plainly(tiny_bert(), batches).losses
    for check in ("never", "always"):
        recorder, technique, model = Recorder(), Unpadding(16, check=check), HuggingFaceModel(tiny_bert())
        trainer = make_trainer([technique], model=model, batches=batches, callbacks=[recorder])
        calls = graphed(trainer.state.model)
        calls.reads_known_batch = bool(unpadded_encoders(model))
        trainer.fit()
        trainer.close()
        assert_near(recorder.losses, expected)
        assert calls.graphs == 2, check
        assert technique.engaged
