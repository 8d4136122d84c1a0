"""Gradient checkpointing in a Trainer and with other techniques: hooks, copies, micro-batches, refusals and GPUs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from composer.core import DataSpec
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.data import DataLoader

from composer_speedups import (
    GradientCheckpointing,
    MemoryAnatomy,
    MixedPrecision,
    SDPAAttention,
    TorchCompile,
    apply_gradient_checkpointing,
    undo_gradient_checkpointing,
)
from composer_speedups.algorithms.gradient_checkpointing import recompute
from composer_speedups.core.errors import NotEngagedError, TechniqueError
from tests.helpers.blocks import Block, assert_equal, step
from tests.helpers.common import (
    Batches,
    Recorder,
    batch,
    final_weights,
    make_trainer,
    plain_batches,
    tiny_bert,
    trained,
)
from tests.reference.loop import gradients

LAYERS = ["bert.encoder.layer.0", "bert.encoder.layer.1"]


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
        trainer = trained([other(), *algorithms], model=tiny_bert(dropout=0.1), callbacks=[recorder], **microbatches(2))
        results.append((recorder.losses, recorder.first_gradients, final_weights(trainer)))
    assert_equal(results[1], results[0])


def microbatches(rows: int) -> dict[str, Any]:
    def split(whole: dict[str, Tensor], size: Any) -> list[dict[str, Tensor]]:
        pieces = {name: tensor.split(rows) for name, tensor in whole.items()}
        return [dict(zip(pieces, piece, strict=True)) for piece in zip(*pieces.values(), strict=True)]

    loader = DataLoader(Batches(plain_batches()), batch_size=None)
    spec = DataSpec(loader, split_batch=split, get_num_samples_in_batch=lambda b: len(b["labels"]))
    return {"train_dataloader": spec, "device_train_microbatch_size": rows}


@pytest.mark.pins
def test_a_checkpoint_function_that_recomputes_nothing_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(function: Any, *args: Any, use_reentrant: bool, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    assert recompute.checkpoint is torch_checkpoint.checkpoint
    monkeypatch.setattr(recompute, "checkpoint", keep)
    with pytest.raises(NotEngagedError, match="no block was recomputed in the first backward pass"):
        trained([GradientCheckpointing()])


def test_models_that_cannot_be_recomputed_are_refused() -> None:
    for build in (lambda: GradientCheckpointing(0), lambda: apply_gradient_checkpointing(tiny_bert(), 0)):
        with pytest.raises(ValueError, match="every must be at least 1, not 0"):
            build()
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
