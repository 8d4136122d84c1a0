"""Gradient checkpointing: identical results, less memory, counted recomputations, and training in a Trainer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from composer_speedups import (
    GradientCheckpointing,
    MemoryAnatomy,
    MixedPrecision,
    SDPAAttention,
    TorchCompile,
    apply_fused_layers,
    apply_gradient_checkpointing,
    apply_unpadding,
    undo_gradient_checkpointing,
)
from composer_speedups.algorithms.gradient_checkpointing import recompute
from composer_speedups.core.errors import NotEngagedError, TechniqueError
from tests.helpers.common import (
    Recorder,
    assert_not_engaged,
    awkward_batches,
    batch,
    final_weights,
    make_trainer,
    microbatches,
    plain_batches,
    tiny_bert,
    trained,
)
from tests.helpers.exhaustive import SCOPES
from tests.helpers.models import tiny_model
from tests.reference.loop import gradients

LAYERS = ["bert.encoder.layer.0", "bert.encoder.layer.1"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + scale * self.dropout(self.linear(x)).tanh()


class Plain(nn.Module):
    """No Hugging Face model; its input requires no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


def step(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(7)
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), gradients(model)


def assert_equal(actual: Any, expected: Any) -> None:
    assert len(expected) > 0
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


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
    assert_not_engaged(trainer, "no block was recomputed")


@pytest.mark.exhaustive
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
    for network in (reference, model):
        torch.manual_seed(1)
        network(x).square().sum().backward()
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


def test_a_second_trainer_does_not_count_what_the_first_recomputed() -> None:
    model = tiny_bert()
    trained([GradientCheckpointing()], model=model)
    model.bert.requires_grad_(False)
    assert_not_engaged(make_trainer([GradientCheckpointing()], model=model), "no block was recomputed")


def test_hooks_run_once_and_evaluation_recomputes_nothing() -> None:
    model, calls = tiny_bert(), []
    layer = model.bert.encoder.layer[0]
    layer.register_forward_hook(lambda *_: calls.append("hook"))
    apply_gradient_checkpointing(model)
    step(model, plain_batches(1)[0])
    assert calls == ["hook"]
    assert recompute.recomputations(layer) == 1
    model.eval()
    step(model, plain_batches(1)[0])
    with torch.no_grad():
        model.train()(**plain_batches(1)[0])
    assert recompute.recomputations(layer) == 1


def test_blocks_are_copied_and_undone() -> None:
    model = tiny_bert()
    forward = model.bert.encoder.layer[0].forward
    model.bert.encoder.layer[0].forward = forward  # the instance already has an override
    before = [dict(vars(layer)) for layer in model.bert.encoder.layer]
    apply_gradient_checkpointing(model)
    twin = copy.deepcopy(model)
    step(twin, plain_batches(1)[0])
    assert [recompute.recomputations(layer) for layer in twin.bert.encoder.layer] == [1, 1]
    assert [recompute.recomputations(layer) for layer in model.bert.encoder.layer] == [0, 0]
    assert gradients(model) == {}
    assert undo_gradient_checkpointing(model) == LAYERS
    assert undo_gradient_checkpointing(model) == []
    assert [dict(vars(layer)) for layer in model.bert.encoder.layer] == before


@pytest.mark.parametrize(
    "other",
    [lambda: MixedPrecision("bf16", allow_cpu=True), SDPAAttention, lambda: SDPAAttention("math")],
    ids=["bf16", "sdpa", "sdpa-math"],
)
def test_results_with_other_techniques_and_micro_batches_are_identical(other: Any) -> None:
    results = []
    for algorithms in ([], [GradientCheckpointing()]):
        recorder = Recorder()
        settings = microbatches(plain_batches(), 2)
        trainer = trained([other(), *algorithms], model=tiny_bert(dropout=0.1), callbacks=[recorder], **settings)
        results.append((recorder.losses, recorder.first_gradients, final_weights(trainer)))
    assert_equal(results[1], results[0])


@pytest.mark.pins
def test_a_checkpoint_function_that_recomputes_nothing_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(function: Any, *args: Any, use_reentrant: bool, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    assert recompute.checkpoint is torch_checkpoint.checkpoint
    monkeypatch.setattr(recompute, "checkpoint", keep)
    with pytest.raises(NotEngagedError, match="no block was recomputed in the first backward pass"):
        trained([GradientCheckpointing()])


def test_blocks_of_which_only_some_are_fused_are_recomputed() -> None:
    model = tiny_bert().train()
    model.bert.encoder.layer[0].intermediate.register_forward_hook(lambda *_: None)
    apply_unpadding(model)
    apply_fused_layers(model)
    assert apply_gradient_checkpointing(model) == LAYERS


def test_models_that_cannot_be_recomputed_are_refused() -> None:
    with pytest.raises(ValueError, match="no ModuleList with blocks of one class"):
        apply_gradient_checkpointing(nn.Sequential(nn.Linear(2, 2)))
    model = tiny_bert()
    model.gradient_checkpointing_enable()
    with pytest.raises(TechniqueError, match="recomputed twice; call gradient_checkpointing_disable"):
        make_trainer([GradientCheckpointing()], model=model)
    blocks = nn.ModuleList([Block(), Block()])
    apply_gradient_checkpointing(blocks)
    with pytest.raises(ValueError, match="use_cache=False"):
        blocks[0](torch.ones(1, 8), past_key_values=object())


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
def test_recomputed_dropout_masks_are_the_same_on_a_gpu(precision: str) -> None:
    results = []
    for algorithms in ([], [GradientCheckpointing()]):
        recorder = Recorder()
        trained(algorithms, model=tiny_bert(dropout=0.1), callbacks=[recorder], gpu=True, precision=precision)
        results.append((recorder.losses, recorder.first_gradients))
    # Embedding gradients are summed in no fixed order on a GPU.
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_inductor_recomputes_and_peak_memory_falls() -> None:
    kept = []
    for algorithms in ([], [GradientCheckpointing()]):
        anatomy = MemoryAnatomy(interval=1)
        batches = [batch([64] * 64, seed=i) for i in range(3)]
        trained([*algorithms, TorchCompile("model")], batches=batches, callbacks=[anatomy], gpu=True)
        kept.append(anatomy.parts["activations_gib"])
        torch._dynamo.reset()
    assert kept[1] < 0.7 * kept[0]
