"""The load-balancing loss of a model's routers, and its way into a training loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from composer_speedups.algorithms.sparse_upcycling.experts import SparseFeedForward


def sparse_layers(model: nn.Module) -> list[SparseFeedForward]:
    """The layers of experts in a model, first to last."""
    return [m for m in model.modules() if isinstance(m, SparseFeedForward)]


def load_balancing_loss(model: nn.Module) -> Tensor:
    """The load-balancing loss of the last forward pass in training mode, summed over the layers of experts.

    A layer adds 1 when its real tokens spread evenly, and up to ``experts / top_k`` when they do not. Times a
    coefficient such as 0.01 it belongs to the loss; without it, routers tend to use a few experts only.

    Args:
        model: After ``apply_sparse_upcycling``.

    Returns:
        A scalar with a gradient.

    Raises:
        ValueError: There are no experts, or no forward pass in training mode with gradients has run.

    Source: Switch Transformer, arXiv 2101.03961, section 2.2.
    """
    layers = sparse_layers(model)
    if not layers:
        raise ValueError("the model has no experts; call apply_sparse_upcycling first")
    losses = list(layers[0].routing.balance.values())
    if not losses:
        raise ValueError("the routers noted nothing: no forward pass in training mode, or one without gradients")
    return torch.stack(losses).sum()


def add_to_loss(loss: Any, extra: Tensor) -> Any:
    """``loss`` and a further term, in the form that a ComposerModel's loss came in.

    Composer takes a tensor, a list or tuple of tensors that it adds up, or a dict: its ``total``, or else its sum.
    """
    if isinstance(loss, dict):
        total = {"total": loss["total"] + extra} if "total" in loss else {}
        return {**loss, **total, "load_balancing": extra}
    if isinstance(loss, (list, tuple)):
        return [*loss, extra]
    return loss + extra
