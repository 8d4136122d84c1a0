"""Pure bfloat16 training: Kahan summation keeps updates that rounding would lose; parameters keep their identity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from composer_speedups import KahanOptimizer, apply_kahan_optimizer
from composer_speedups.callbacks.peaks import precision_in_force
from composer_speedups.core.errors import TechniqueError
from composer_speedups.core.requirements import Context
from composer_speedups.core.technique import screen
from tests.helpers.common import assert_not_engaged, make_trainer, tiny_bert


def descend(kind: str, steps: int = 200, lr: float = 1e-4) -> torch.Tensor:
    """Train weights of 1.0 with a gradient of 1, in steps of a thirtieth of bfloat16's resolution at 1.0."""
    model = nn.Linear(8, 8, bias=False, dtype=torch.float32)
    nn.init.ones_(model.weight)
    optimizer: Any = AdamW(model.parameters(), lr=lr, weight_decay=0.0, foreach=False)
    if kind == "kahan":
        optimizer = apply_kahan_optimizer(model, optimizer)
    elif kind == "bfloat16":
        model.bfloat16()
    for _ in range(steps):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    return model.weight.detach().float()


def test_kahan_summation_keeps_updates_that_bfloat16_loses() -> None:
    expected = descend("float32")
    torch.testing.assert_close(expected, torch.full((8, 8), 0.98))
    assert descend("bfloat16").eq(1).all(), "without Kahan summation every update rounds away"
    torch.testing.assert_close(descend("kahan"), expected, rtol=0, atol=2**-8)  # half of bfloat16's resolution below 1


def test_weight_decay_is_adamws_unless_it_rounds_away() -> None:
    for decay, expected in ((50.0, 0.95), (0.5, 1.0)):  # lr · decay: 0.05 is kept, 0.0005 rounds away (see the card)
        weight = nn.Linear(4, 4, bias=False)
        nn.init.ones_(weight.weight)
        optimizer = apply_kahan_optimizer(weight, AdamW(weight.parameters(), lr=1e-3, weight_decay=decay))
        weight.weight.grad = torch.zeros_like(weight.weight)
        optimizer.step()
        torch.testing.assert_close(weight.weight.detach().float(), torch.full((4, 4), expected), rtol=0, atol=2**-8)


@pytest.mark.parametrize(("beta2", "follows"), [(0.99, True), (0.999, False)])
def test_second_moments_decay_up_to_the_cards_beta2(beta2: float, follows: bool) -> None:
    layer = nn.Linear(4, 4, bias=False)
    optimizer = apply_kahan_optimizer(layer, AdamW(layer.parameters(), betas=(0.9, beta2)))
    for gradient, steps in ((1.0, 600), (1e-3, 600)):
        for _ in range(steps):
            layer.weight.grad = torch.full_like(layer.weight, gradient)
            optimizer.step()
    assert bool((optimizer.state[layer.weight]["exp_avg_sq"] < 0.5).all()) is follows


def test_parameters_ties_and_buffers_are_kept() -> None:
    model: Any = tiny_bert()
    model.register_buffer("scale", torch.ones(3))
    model.extra = nn.Linear(32, 64, bias=False)
    model.extra.weight = model.bert.embeddings.word_embeddings.weight
    model.bert.pooler.requires_grad_(False)
    model.eval()
    before = dict(model.named_parameters())
    optimizer = apply_kahan_optimizer(model, AdamW([p for p in model.parameters() if p.requires_grad]))
    assert all(p is before[n] for n, p in model.named_parameters())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}, "including frozen ones"
    assert model.extra.weight is model.bert.embeddings.word_embeddings.weight
    assert model.scale.dtype == torch.float32
    assert not model.bert.pooler.dense.weight.requires_grad
    assert not model.training
    assert apply_kahan_optimizer(model, optimizer) is optimizer
    assert type(optimizer).__qualname__ != "AdamW", "Composer's checkpoints identify optimizers by class name"


def test_the_evidence_names_dtypes_and_whether_weight_decay_rounds_away() -> None:
    technique = KahanOptimizer()
    trainer = make_trainer([technique])
    trainer.fit()
    assert technique.evidence["weights"] == "bfloat16"
    assert technique.evidence["state_dtypes"] == {k: ["bfloat16"] for k in ("exp_avg", "exp_avg_sq", "kahan_comp")}
    assert technique.evidence["weight_decay"] == "rounds away"
    assert precision_in_force(trainer.state) == "bf16", "throughput/mfu uses its peak rate"
    trainer.close()


@pytest.mark.parametrize("sabotage", ["summation", "weights"])
def test_lost_summation_and_restored_weights_are_detected(sabotage: str) -> None:
    trainer = make_trainer([KahanOptimizer()])
    if sabotage == "weights":
        trainer.state.model.float()
    else:
        for group in trainer.state.optimizers[0].param_groups:
            group["kahan_sum"] = False
    said = "the weights are float32" if sabotage == "weights" else "no step left a compensation"
    assert_not_engaged(trainer, said)


def test_a_gpu_without_bfloat16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Turing")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(TechniqueError, match=r"bfloat16 needs .* 8\.0 or newer, and Turing is 7\.5"):
        screen([KahanOptimizer()], Context(torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    screen([KahanOptimizer()], Context(torch.device("cuda")))


def test_autocast_and_fp16_weights_are_refused() -> None:
    with pytest.raises(TechniqueError, match=r"kahan_optimizer: .*autocast \(amp_bf16\); set the Trainer's precision"):
        screen([KahanOptimizer()], Context(torch.device("cpu"), "amp_bf16"))
    model = nn.Linear(2, 2, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"torch\.float16 parameters; load it in float32 or bfloat16"):
        apply_kahan_optimizer(model, AdamW(model.parameters()))
    assert model.weight.dtype == torch.float16


@pytest.mark.gpu
def test_its_triton_kernel_matches_its_loop() -> None:
    results = []
    for triton in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(64, 64).cuda()
        optimizer = apply_kahan_optimizer(model, AdamW(model.parameters(), lr=1e-4))
        for group in optimizer.param_groups:
            group["triton"], group["foreach"] = triton, False
        for step in range(20):
            for parameter in model.parameters():
                generator = torch.Generator("cuda").manual_seed(step)
                parameter.grad = torch.randn(parameter.shape, generator=generator, device="cuda").bfloat16()
            optimizer.step()
        results.append({n: p.detach().float() for n, p in model.named_parameters()})
    torch.testing.assert_close(results[1], results[0], rtol=2**-7, atol=2e-3)
