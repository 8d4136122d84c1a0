"""CUDA graphs of an unpadded model, one set per number of packed tokens, with a stand-in for the capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from composer.models import HuggingFaceModel

from composer_speedups import Unpadding
from composer_speedups.algorithms.cuda_graphs.graphed_calls import GraphedCalls
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.core.host import host_of
from composer_speedups.packing.encoder import unpadded_encoders
from composer_speedups.packing.planning import Packing
from tests.helpers.common import Recorder, batch, make_trainer, tiny_bert
from tests.helpers.rerun import graphed
from tests.reference.loop import counted, gradients, train_plainly
from tests.reference.tolerance import assert_near


def graphed_pair(max_graphs: int = 3) -> tuple[Any, Any, GraphedCalls]:
    reference, model = tiny_bert(), tiny_bert()
    for network in (reference, model):
        network.config.problem_type = "single_label_classification"
    unpad(model, 16)
    return reference, model, graphed(model, max_graphs)


def step(reference: Any, model: Any, lengths: list[int], seed: int, *, planned: bool = True) -> None:
    inputs = batch(lengths, 16, seed=seed)
    counted(model, inputs["attention_mask"] if planned else None)
    for network in (reference, model):
        network.zero_grad()
        network(**inputs).loss.backward()
    assert_near(gradients(model), gradients(reference), what=f"{lengths}")


def test_each_number_of_packed_tokens_is_captured_once_and_replayed_with_other_masks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[str] = []
    monkeypatch.setattr(Packing, "_count_and_lay_out", lambda *_: counted.append("inside the forward pass"))
    reference, model, calls = graphed_pair()
    # 32, 32, 16, 48, 32 and 16 packed tokens
    for seed, lengths in enumerate([[12, 7, 9], [1, 16, 4], [3, 2, 1], [16, 15, 2], [10, 10, 1], [1, 1, 1]]):
        step(reference, model, lengths, seed)
    assert (calls.graphs, calls.replays, calls.eager_calls) == (3, 6, 0)
    (encoder,) = unpadded_encoders(model)
    assert encoder.ran == "unpadded"
    given = batch([1, 1, 1], 16)["attention_mask"].bool()
    assert torch.equal(encoder.packing.planned[0].layout.mask_BS, given)  # type: ignore[union-attr]
    assert not counted


def test_above_max_graphs_or_without_a_plan_calls_are_eager() -> None:
    reference, model, calls = graphed_pair(max_graphs=1)
    step(reference, model, [12, 7, 9], 0)
    step(reference, model, [16, 16, 9], 1)
    assert (calls.graphs, calls.replays, calls.eager_calls) == (1, 1, 1)
    step(reference, model, [12, 7, 9], 2, planned=False)
    assert (calls.graphs, calls.replays, calls.eager_calls) == (1, 1, 2)


def test_padded_batches_have_their_own_graph() -> None:
    reference, model, calls = graphed_pair()
    inputs = batch([12, 7, 9], 16)
    inputs["attention_mask"] = inputs["attention_mask"].flip(-1)
    counted(model, inputs["attention_mask"])
    for network in (reference, model):
        network(**inputs).loss.backward()
    assert_near(gradients(model), gradients(reference))
    assert unpadded_encoders(model)[0].ran == "padded"
    step(reference, model, [12, 7, 9], 0)
    assert (calls.graphs, calls.replays) == (2, 2)


def test_a_replay_with_a_plan_of_another_mask_is_an_error() -> None:
    reference, model, calls = graphed_pair()
    step(reference, model, [12, 7, 9], 0)
    counted(model, batch([9, 7, 12], 16)["attention_mask"])
    with pytest.raises(RuntimeError, match="differs from the planned one"):
        model(**batch([12, 7, 9], 16))
    assert calls.graphs == 1


def test_composers_batches_are_planned_before_their_replays() -> None:
    model, recorder = tiny_bert(), Recorder()
    batches = [batch(lengths, 16, seed=i) for i, lengths in enumerate([[12, 7, 9], [1, 16, 4], [3, 2, 1], [9, 9, 9]])]
    expected = train_plainly(model, batches).losses
    technique = Unpadding(16)
    trainer = make_trainer([technique], model=model, batches=batches, callbacks=[recorder])
    calls = graphed(trainer.state.model)
    calls.paused = lambda: host_of(trainer.state).run.observing
    trainer.fit()
    trainer.close()
    assert_near(recorder.losses, expected)
    assert (calls.graphs, calls.replays, calls.eager_calls) == (2, 3, 1)
    assert technique.engaged


def test_a_compared_model_replays_with_the_plans_of_its_batches() -> None:
    """The comparison with the untouched model leaves no plan behind."""
    batches = [batch([9, 16, 3, 12], 16, seed=seed) for seed in range(4)]
    recorders = []
    for check in ("never", "always"):
        model, recorder = HuggingFaceModel(tiny_bert()), Recorder()
        trainer = make_trainer([Unpadding(16, check=check)], model=model, batches=batches, callbacks=[recorder])
        calls = graphed(model, max_graphs=1)
        calls.paused = lambda: host_of(trainer.state).run.observing  # noqa: B023
        trainer.fit()
        trainer.close()
        assert calls.replays == 3, check
        recorders.append(recorder)
    assert_near(recorders[1].losses, recorders[0].losses)
