"""Gradient checkpointing: identical results, less memory, counted recomputations, other techniques beside it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composer_speedups import (
    FusedLayers,
    GradientCheckpointing,
    MixedPrecision,
    SDPAAttention,
    TorchCompile,
    Unpadding,
    apply,
)
from composer_speedups.core.errors import Refusal
from composer_speedups.kernels.common import counting
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
from tests.reference.loop import gradients
from tests.reference.tolerance import assert_equal


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

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


def checkpointed(model: Any, every: int = 1) -> Any:
    apply(model, [GradientCheckpointing(every)])
    return model


def step(model: Any, inputs: dict[str, Tensor]) -> tuple[int, Tensor, dict[str, Tensor]]:
    """The number of recomputed blocks, the loss and the gradients."""
    torch.manual_seed(7)
    model.zero_grad()
    with counting() as ran:
        loss = model(**inputs).loss
        loss.backward()
    return ran["recomputed_block"], loss.detach(), gradients(model)


@pytest.mark.pins
@pytest.mark.parametrize("every", [1, 2])
def test_losses_and_gradients_with_dropout_are_bitwise_identical(every: int) -> None:
    reference, model = tiny_bert(dropout=0.1), checkpointed(tiny_bert(dropout=0.1), every)
    for inputs in awkward_batches():
        count, *results = step(model, inputs)
        assert_equal(results, [*step(reference, inputs)[1:]])
        assert count == 2 // every


def test_a_plain_module_whose_input_requires_no_gradient() -> None:
    reference, model = Plain(), checkpointed(Plain())
    assert list(model.state_dict()) == list(reference.state_dict())
    x = torch.randn(5, 8)
    for network in (reference, model):
        torch.manual_seed(1)
        network(x).square().sum().backward()
    assert_equal(gradients(model), gradients(reference))


@pytest.mark.pins
def test_activations_take_less_memory() -> None:
    kept = {}
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    for name, algorithms in {"all": [], "half": [GradientCheckpointing(2)], "none": [GradientCheckpointing()]}.items():
        model = tiny_bert()
        saved.clear()
        apply(model, algorithms)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(**batch([32] * 8)).loss
        kept[name] = sum({tensor.data_ptr(): tensor.nbytes for tensor in saved}.values())
        assert loss.requires_grad
    assert kept["none"] < 0.3 * kept["all"]
    assert kept["none"] < kept["half"] < 0.8 * kept["all"]


def test_frozen_blocks_at_the_bottom_are_not_recomputed() -> None:
    model = tiny_bert()
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[0].requires_grad_(False)
    technique, recorder = GradientCheckpointing(), Recorder()
    trained([technique], model=model, callbacks=[recorder])
    assert (technique.evidence["blocks"], technique.evidence["blocks_recomputed"]) == (2, 1)
    assert any(name.startswith("bert.encoder.layer.1") for name in recorder.first_gradients)


def test_hooks_run_once_and_evaluation_recomputes_nothing() -> None:
    model, calls = tiny_bert(), []
    model.bert.encoder.layer[0].register_forward_hook(lambda *_: calls.append("hook"))
    checkpointed(model)
    assert step(model, plain_batches(1)[0])[0] == 2
    assert calls == ["hook"]
    assert step(model.eval(), plain_batches(1)[0])[0] == 0
    with torch.no_grad(), counting() as ran:
        model.train()(**plain_batches(1)[0])
    assert not ran


def test_copies_are_independent_and_undoing_restores_an_override() -> None:
    model = tiny_bert()
    model.bert.encoder.layer[0].forward = model.bert.encoder.layer[0].forward  # the instance already has an override
    before = [dict(vars(layer)) for layer in model.bert.encoder.layer]
    applied = apply(model, [GradientCheckpointing()])
    twin = copy.deepcopy(model)
    assert step(twin, plain_batches(1)[0])[0] == 2
    assert gradients(model) == {}
    applied.undo()
    assert [dict(vars(layer)) for layer in model.bert.encoder.layer] == before


@pytest.mark.parametrize(
    "others",
    [
        lambda: [MixedPrecision("bf16", allow_cpu=True)],
        lambda: [SDPAAttention()],
        lambda: [SDPAAttention("math")],
        lambda: [Unpadding(), FusedLayers()],
        lambda: [TorchCompile("blocks", backend="aot_eager")],
        pytest.param(lambda: [TorchCompile("model", backend="aot_eager")], marks=pytest.mark.exhaustive),
    ],
    ids=["bf16", "sdpa", "sdpa-math", "fused", "compiled blocks", "compiled model"],
)
def test_results_with_other_techniques_and_micro_batches_are_identical(others: Any) -> None:
    results = []
    for algorithms in ([], [technique := GradientCheckpointing()]):
        recorder, beside, settings = Recorder(), others(), microbatches(plain_batches(), 2)
        model = tiny_bert(dropout=0.1)
        model.config.problem_type = "single_label_classification"  # if set in the first batch, it recompiles
        trainer = trained([*beside, *algorithms], model=model, callbacks=[recorder], **settings)
        results.append((recorder.losses, recorder.first_gradients, final_weights(trainer)))
        torch._dynamo.reset()
    assert_equal(results[1], results[0])
    if isinstance(beside[0], TorchCompile):
        assert (beside[0].evidence["graph_breaks"], beside[0].evidence["recompiles"]) == (0, 0)
        assert technique.evidence == {"blocks": 2, "seen_in": "compiled code"}


@pytest.mark.pins
def test_blocks_that_are_not_recomputed_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(function: Any, *args: Any, use_reentrant: bool, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    monkeypatch.setattr("torch.utils.checkpoint.checkpoint", keep)
    assert_not_engaged(make_trainer([GradientCheckpointing()]), "no block was recomputed in the backward")


def test_models_that_cannot_be_recomputed_are_refused() -> None:
    with pytest.raises(Refusal, match="no ModuleList with blocks of one class"):
        checkpointed(nn.Sequential(nn.Linear(2, 2)))
    model = tiny_bert()
    model.gradient_checkpointing_enable()
    with pytest.raises(Refusal, match="recomputed twice; call gradient_checkpointing_disable"):
        make_trainer([GradientCheckpointing()], model=model)
    with pytest.raises(ValueError, match="use_cache=False"):
        checkpointed(Plain()).blocks[0](torch.ones(1, 8), past_key_values=object())


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
