"""Fine-tuning in plain PyTorch: an untouched Hugging Face model, plain AdamW, no Composer."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

EPS = 1e-3


class Trained(NamedTuple):
    losses: list[float]  # of each batch
    first_gradients: dict[str, Tensor]  # after the first batch
    weights: dict[str, Tensor]  # after the last
    logits: list[Tensor]  # of each batch in eval mode, before training


def train_plainly(model: Any, batches: list[dict[str, Tensor]], lr: float = 1e-3) -> Trained:
    """One AdamW step a batch on a copy of ``model``.

    A large eps keeps AdamW from blowing rounding noise up to whole steps where the gradient is zero in theory
    (the bias of attention's keys).
    """
    model = copy.deepcopy(model)
    logits = eval_logits(model, batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=EPS, weight_decay=0.01, foreach=False, fused=False)
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        first = first or gradients(model)
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, first, weights(model), logits)


@torch.no_grad()
def eval_logits(model: Any, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """Logits of the rows that have a real token; attention over nothing but padding has no right answer."""
    training = model.training
    model.eval()
    result = []
    for batch in batches:
        logits = model(**batch).logits.float()
        assert logits.isfinite().all()
        result.append(logits[batch["attention_mask"].any(-1)])
    model.train(training)
    return result


def gradients(model: Any) -> dict[str, Tensor]:
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def weights(model: Any) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}
