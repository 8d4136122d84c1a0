"""LoRA in a Trainer: sabotage is detected; other techniques, schedulers, FLOPs and a second Trainer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from composer.models import HuggingFaceModel

from composer_speedups import GradientCheckpointing, LoRA, MixedPrecision, SDPAAttention, TorchCompile, apply_lora
from composer_speedups.algorithms.lora.adapters import adapted_layers, trained_copies
from composer_speedups.core.errors import NotEngagedError
from composer_speedups.tasks.classification import Classification
from composer_speedups.tasks.models import FinetuneModel
from tests.helpers.adapters import two_groups
from tests.helpers.common import batch, final_weights, make_trainer, plain_batches, tiny_bert, trained
from tests.reference.tolerance import assert_near


def sabotaged(sabotage: Any, technique: LoRA | None = None) -> None:
    trainer = make_trainer([technique or LoRA()])
    sabotage(trainer)
    try:
        trainer.fit()
    finally:
        trainer.close()


@pytest.mark.pins
def test_sabotage_is_detected() -> None:
    def thaw(trainer: Any) -> None:
        weight = trainer.state.model.model.bert.pooler.dense.weight.requires_grad_()
        trainer.state.optimizers[0].param_groups[0]["params"].append(weight)

    def forget(trainer: Any) -> None:
        trainer.state.optimizers[0].param_groups[0]["params"].pop()

    def forget_all(trainer: Any) -> None:
        model = copy.deepcopy(trainer.state.model)
        trainer.state.optimizers[0].param_groups[0]["params"][:] = [p for p in model.parameters() if p.requires_grad]

    def switch_off(trainer: Any) -> None:
        for layer in adapted_layers(trainer.state.model).values():
            layer.enable_adapters(False)
        for wrapper in trained_copies(trainer.state.model).values():
            wrapper.enable_adapters(False)
        trainer.state.model.model.bert.embeddings.LayerNorm.weight.requires_grad_()  # so the loss requires grad

    with pytest.raises(NotEngagedError, match="frozen weights were trained"):
        sabotaged(thaw)
    with pytest.raises(NotEngagedError, match=r"the optimizer does not have classifier\.modules_to_save"):
        sabotaged(forget)
    with pytest.raises(NotEngagedError, match="no step changed an adapter"):
        sabotaged(forget_all)
    with pytest.raises(NotEngagedError, match=r"frozen weights were trained|no adapter got a gradient"):
        sabotaged(switch_off)


def test_a_frozen_weight_changed_through_data_is_detected() -> None:
    """The weight changes through ``.data``, without a gradient and without a new tensor version."""

    def decay(trainer: Any) -> None:
        weight = trainer.state.model.model.bert.pooler.dense.weight
        trainer.state.optimizers[0].register_step_post_hook(lambda *_: weight.data.mul_(1 - 1e-5))

    with pytest.raises(NotEngagedError, match=r"frozen weights were trained \(bert\.pooler\.dense\.weight\)"):
        sabotaged(decay)


@pytest.mark.parametrize("undone", [False, True])
def test_after_a_first_step_with_learning_rate_zero_the_end_of_the_run_decides(undone: bool) -> None:
    """With a learning-rate warm-up from 0, the first step changes nothing."""
    technique = LoRA()
    trainer = make_trainer([technique])
    optimizer = trainer.state.optimizers[0]
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # the scheduler changes it from the second batch on
    if undone:
        before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]

        def restore(*_: Any) -> None:
            for p, old in zip(optimizer.param_groups[0]["params"], before, strict=True):
                p.data.copy_(old)

        optimizer.register_step_post_hook(restore)
        with pytest.raises(NotEngagedError, match="no step changed an adapter"):
            trainer.fit()
    else:
        trainer.fit()
        assert (technique.evidence["parameters_moved"], technique.evidence["adapters_with_gradient"]) == (10, 4)
    trainer.close()


@pytest.mark.parametrize("batches", [2, 3])
def test_a_run_of_two_batches_may_end_before_the_learning_rate_rises(batches: int) -> None:
    trainer = make_trainer([LoRA()], batches=plain_batches(batches))
    optimizer = trainer.state.optimizers[0]
    optimizer.param_groups[0]["initial_lr"] = 0.01  # of a scheduler that warms up
    optimizer.register_step_pre_hook(lambda optimizer, *_: [g.update(lr=0.0) for g in optimizer.param_groups] and None)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    if batches == 2:
        trainer.fit()
    else:
        with pytest.raises(NotEngagedError, match="no step changed an adapter"):
            trainer.fit()
    trainer.close()


def test_a_torch_scheduler_keeps_its_parameter_groups() -> None:
    model = tiny_bert()
    optimizer = two_groups(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    trained(
        [LoRA()],
        model=HuggingFaceModel(model),
        optimizer=optimizer,
        schedulers=scheduler,
        step_schedulers_every_batch=True,
    )
    assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-3 * 0.5**4)


@pytest.mark.parametrize(
    "others",
    [
        lambda: [GradientCheckpointing()],
        lambda: [SDPAAttention()],
        lambda: [TorchCompile("blocks", backend="aot_eager")],
        lambda: [TorchCompile("model", backend="aot_eager"), GradientCheckpointing()],
    ],
    ids=["checkpointing", "sdpa", "blocks", "model+checkpointing"],
)
def test_with_other_techniques_it_trains_to_the_same_weights(others: Any) -> None:
    results = []
    chosen: list[list[Any]] = [[], others()]
    for algorithms in chosen:
        model = tiny_bert()
        model.config.problem_type = "single_label_classification"  # if set in the first batch, it recompiles
        trainer = trained([LoRA(), *algorithms], model=model)
        results.append(final_weights(trainer))
        for technique in algorithms:
            assert technique.engaged
            assert technique.evidence.get("graph_breaks", 0) == 0
            # The first block has its own graph: its input comes from frozen embeddings and requires no gradient.
            assert technique.evidence.get("recompiles", 0) == (technique.evidence.get("scope") == "blocks")
    assert_near(results[1], results[0])


def test_adapters_stay_float32_under_autocast() -> None:
    technique = LoRA(dropout=0.1)
    trainer = trained([MixedPrecision("bf16", allow_cpu=True), technique])
    assert {w.dtype for w in final_weights(trainer).values()} == {torch.float32}


def test_flops_exclude_the_gradients_of_frozen_weights() -> None:
    full, adapted = FinetuneModel(tiny_bert(), Classification()), FinetuneModel(tiny_bert(), Classification())
    apply_lora(adapted)
    inputs = batch([16] * 4)
    linear = 2 * (4 * 32 * 32 + 2 * 32 * 64)  # weights of two blocks
    assert full.flops_per_batch(inputs) - adapted.flops_per_batch(inputs) == 2 * 64 * linear


def test_a_second_trainer_continues_with_the_same_adapters() -> None:
    model = tiny_bert()
    for _ in range(2):
        technique = LoRA()
        trainer = trained([technique], model=HuggingFaceModel(model, use_logits=True), batches=plain_batches(2))
        assert technique.evidence["modules"] == 4
        assert technique.evidence["base_unchanged"]
        assert all(p.requires_grad for group in trainer.state.optimizers[0].param_groups for p in group["params"])


@pytest.mark.gpu
def test_a_skipped_fp16_step_is_not_an_error() -> None:
    technique = LoRA()
    trained([technique, MixedPrecision("fp16")], gpu=True)
    assert technique.engaged
