"""Gradient checkpointing: bitwise identical results, less memory, counted recomputations, and missing ones detected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composer_speedups import GradientCheckpointing, MemoryAnatomy, TorchCompile, apply_gradient_checkpointing
from composer_speedups.algorithms.gradient_checkpointing import recompute
from composer_speedups.core.errors import NotEngagedError
from tests.helpers.blocks import Plain, assert_equal, step
from tests.helpers.common import Recorder, awkward_batches, batch, final_weights, make_trainer, tiny_bert, trained
from tests.helpers.exhaustive import SCOPES
from tests.helpers.models import tiny_model
from tests.reference.loop import gradients

LAYERS = ["bert.encoder.layer.0", "bert.encoder.layer.1"]


@pytest.mark.pins
@pytest.mark.parametrize("every", [1, 2])
def test_losses_and_gradients_with_dropout_are_bitwise_identical(every: int) -> None:
    reference, model = tiny_bert(dropout=0.1), tiny_bert(dropout=0.1)
    assert apply_gradient_checkpointing(model, every) == LAYERS[::every]
    assert apply_gradient_checkpointing(model, every) == []
    for inputs in awkward_batches():
        assert_equal(step(model, inputs), step(reference, inputs))
    assert recompute.recomputations(model.bert.encoder.layer[0]) == len(awkward_batches())
    assert recompute.recomputations(model.bert.encoder.layer[1]) == (len(awkward_batches()) if every == 1 else 0)


@pytest.mark.parametrize("scope", SCOPES)
def test_compiled_gradients_are_bitwise_identical(scope: Any) -> None:
    results, technique = [], GradientCheckpointing()
    for algorithms in ([], [technique]):
        recorder, compiled = Recorder(), TorchCompile(scope, backend="aot_eager")
        model = tiny_bert(dropout=0.1)
        model.config.problem_type = "single_label_classification"  # if set in the first batch, it recompiles
        trainer = trained([compiled, *algorithms], model=model, callbacks=[recorder])
        assert (compiled.evidence["graph_breaks"], compiled.evidence["recompiles"]) == (0, 0)
        results.append((recorder.losses, recorder.first_gradients, final_weights(trainer)))
        torch._dynamo.reset()
    assert_equal(results[1], results[0])
    assert technique.evidence == {
        "blocks": 2,
        "regions_recomputed": 2 if scope == "model" else 1,  # blocks share one graph
        "seen_in": "compiled graphs",
    }


def test_the_evidence_says_that_a_second_run_reuses_compiled_blocks() -> None:
    seen = []
    for _ in range(2):
        techniques = [GradientCheckpointing(), TorchCompile("blocks", backend="aot_eager")]
        trained(techniques)
        seen.append((techniques[0].evidence["seen_in"], techniques[1].evidence["reused_from_this_process"]))
    assert seen == [("compiled graphs", False), ("graphs compiled by an earlier run of this process", True)]


def test_compiled_blocks_that_keep_their_activations_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradientCheckpointing, "_seen_in_this_process", True)  # independent of earlier tests
    trainer = make_trainer([GradientCheckpointing(), TorchCompile("blocks", backend="eager")])
    for layer in trainer.state.model.model.bert.encoder.layer:
        recompute.undo(layer)
    with pytest.raises(NotEngagedError, match="no block was recomputed"):
        trainer.fit()
    trainer.close()


def test_a_block_with_a_graph_break_is_recomputed_and_counted() -> None:
    model = tiny_model("bert", layers=1)
    inner = model.bert.encoder.layer[0].intermediate

    class Breaking(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return inner(hidden)

    model.bert.encoder.layer[0].intermediate = Breaking()
    technique = GradientCheckpointing()
    trained([technique, TorchCompile("model", backend="eager")], model=model)
    assert technique.engaged


@pytest.mark.pins
def test_activations_take_less_memory() -> None:
    kept = {}
    for name, algorithms in {"all": [], "half": [GradientCheckpointing(2)], "none": [GradientCheckpointing()]}.items():
        anatomy = MemoryAnatomy(interval=1)
        trained(algorithms, batches=[batch([32] * 8, seed=i) for i in range(2)], callbacks=[anatomy])
        kept[name] = anatomy.parts["activations_gib"]
    assert kept["none"] < 0.3 * kept["all"]
    assert kept["none"] < kept["half"] < 0.8 * kept["all"]


def test_a_plain_module_whose_input_requires_no_gradient() -> None:
    reference, model = Plain(), Plain()
    assert apply_gradient_checkpointing(model) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(model.state_dict()) == list(reference.state_dict())
    x = torch.randn(5, 8)
    for each in (reference, model):
        torch.manual_seed(1)
        each(x).square().sum().backward()
    assert_equal(gradients(model), gradients(reference))
    assert [recompute.recomputations(b) for b in model.blocks] == [1, 1, 1]


def test_frozen_blocks_at_the_bottom_are_not_recomputed() -> None:
    model = tiny_bert()
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[0].requires_grad_(False)
    technique, recorder = GradientCheckpointing(), Recorder()
    trained([technique], model=model, callbacks=[recorder])
    assert (technique.evidence["blocks"], technique.evidence["blocks_recomputed"]) == (2, 1)
    assert any(name.startswith("bert.encoder.layer.1") for name in recorder.first_gradients)
