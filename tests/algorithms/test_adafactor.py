"""Adafactor: the paper's update rule, factored state, and learning rates that follow the schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from composer_speedups import AdafactorOptimizer, apply_adafactor
from tests.helpers.common import assert_not_engaged, make_trainer, plain_batches, tiny_bert, trained


def reference_update(gradients: list[Tensor], lr: float) -> Tensor:
    """Apply algorithm 4 of arXiv 1804.04235 without relative steps to a matrix of zeros."""
    weight = torch.zeros_like(gradients[0])
    rows, columns = torch.zeros(weight.shape[0]), torch.zeros(weight.shape[1])
    for t, gradient in enumerate(gradients, 1):
        decay = 1 - t**-0.8
        squares = gradient.square() + 1e-30
        rows = decay * rows + (1 - decay) * squares.sum(1)
        columns = decay * columns + (1 - decay) * squares.sum(0)
        update = gradient / (torch.outer(rows, columns) / rows.sum()).sqrt()
        weight = weight - lr * update / max(1.0, float(update.square().mean().sqrt()))
    return weight


def test_updates_follow_the_paper() -> None:
    weight = nn.Parameter(torch.zeros(5, 7))
    optimizer = apply_adafactor(AdamW([weight], lr=1e-2, weight_decay=0.0))
    gradients = [torch.randn(5, 7, generator=torch.Generator().manual_seed(i)) * 10**i for i in range(4)]
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(weight.detach(), reference_update(gradients, 1e-2))


@pytest.mark.parametrize("scale", [False, True])
def test_a_step_has_the_size_of_the_learning_rate(scale: bool) -> None:
    weight = nn.Parameter(torch.full((6, 4), 0.05))
    apply = apply_adafactor(AdamW([weight], lr=1e-3, weight_decay=0.0), scale)
    weight.grad = torch.ones_like(weight) * 1e-4
    apply.step()
    expected = 1e-3 * (0.05 if scale else 1.0)
    torch.testing.assert_close(weight.detach(), torch.full((6, 4), 0.05 - expected))


def test_the_state_is_smaller_than_adamws() -> None:
    technique = AdafactorOptimizer()
    trained([technique])
    evidence = technique.evidence
    matrices = sum(p.ndim > 1 for p in tiny_bert().parameters())
    assert evidence["factored"] == f"{matrices} of {matrices}"
    assert evidence["adamw_state_bytes"] == 8 * sum(p.numel() for p in tiny_bert().parameters())
    assert evidence["state_bytes"] < evidence["adamw_state_bytes"] / 8
    assert set(evidence["state_dtypes"]) == {"exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col"}


def test_states_of_the_two_variants_are_not_interchangeable() -> None:
    technique = AdafactorOptimizer(scale_parameter=True)
    trainer = trained([technique], batches=plain_batches(1))
    assert technique.evidence["optimizer"] == "Adafactor(scale_parameter=True)"
    state = trainer.state.optimizers[0].state_dict()
    other = apply_adafactor(AdamW(tiny_bert().parameters()))
    with pytest.raises(ValueError, match=r"belongs to Adafactor\(scale_parameter=True\), and this optimizer is Adaf"):
        other.load_state_dict(state)


def test_unfactored_state_is_detected() -> None:
    trainer = make_trainer([AdafactorOptimizer()])
    optimizer: Any = trainer.state.optimizers[0]
    optimizer._get_options = lambda group, shape: (False, False)  # never factor, as for vectors
    assert_not_engaged(trainer, "no matrix has factored second moments")


def test_an_optimizer_without_a_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="no matrix whose second moments could be factored; use AdamW"):
        apply_adafactor(AdamW([nn.Parameter(torch.zeros(3))]))
