"""Fine-tuning in plain PyTorch: an untouched Hugging Face model, plain AdamW, no Composer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_speedups import with_row_lengths

EPS = 1e-3


class Trained(NamedTuple):
    losses: list[float]  # one per batch
    first_gradients: dict[str, Tensor]  # of the first batch
    weights: dict[str, Tensor]  # after the last batch
    logits: list[Tensor]  # one per batch, in eval mode, before training


def train_plainly(model: Any, batches: list[dict[str, Tensor]], lr: float = 1e-3) -> Trained:
    """Train a copy of ``model``, which computes its own loss, with one AdamW step per batch."""
    logits = eval_logits(copy.deepcopy(model), batches)
    return train_on(model, batches, lambda model, batch: model(**batch).loss, lr)._replace(logits=logits)


def train_on(
    model: Any, batches: list[dict[str, Tensor]], loss_of: Callable[[Any, dict[str, Tensor]], Tensor], lr: float = 1e-3
) -> Trained:
    """The same with the loss that ``loss_of`` computes for a batch, and without logits.

    AdamW's eps is large, because the gradient of the key bias is zero in theory: with a small eps, its rounding noise
    would be scaled up to full steps.
    """
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=EPS, weight_decay=0.01, foreach=False, fused=False)
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        first = first or gradients(model)
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, first, weights(model), [])


def on_gpu(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cuda() for name, value in inputs.items()}


def counted(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch with its row lengths, if the model runs unpadded."""
    batch: dict[str, Tensor] = with_row_lengths(lambda given: given, model)(inputs)
    return batch


@contextmanager
def no_waiting(*, strict: bool = True) -> Iterator[None]:
    """torch's sync debug mode, in which the host may not wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error" if strict else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def losses_on_a_gpu(model: Any, batches: list[dict[str, Tensor]]) -> list[float]:
    """Train an unpadded model on a GPU in bf16 with SGD, counting each batch on the CPU; return the losses."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in batches:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**on_gpu(counted(model, step))).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@torch.no_grad()
def eval_logits(model: Any, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """Return the logits of rows with a real token, or of real tokens; attention over padding only is undefined."""
    training = model.training
    model.eval()
    result = []
    for batch in batches:
        logits = model(**batch).logits.float()
        assert logits.isfinite().all()
        mask = batch["attention_mask"].bool()
        result.append(logits[mask if logits.ndim == 3 else mask.any(-1)])
    model.train(training)
    return result


def gradients(model: Any) -> dict[str, Tensor]:
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def weights(model: Any) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}
