"""The load-balancing loss of a model's routers, and adding it to a training loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from composer_speedups.algorithms.sparse_upcycling.experts import SparseFeedForward


def sparse_layers(model: nn.Module) -> list[SparseFeedForward]:
    """Return the layers of experts in a model, first to last."""
    return [m for m in model.modules() if isinstance(m, SparseFeedForward)]


def load_balancing_loss(model: nn.Module) -> Tensor:
    """Return the load-balancing loss of the last forward pass in training mode, summed over the layers of experts.

    A layer's loss is 1 if its real tokens are spread evenly, and at most ``experts / top_k``. Add it to the training
    loss with a coefficient such as 0.01; otherwise routers tend to use only a few experts.

    Args:
        model: A model changed by ``apply_sparse_upcycling``.

    Returns:
        A scalar with a gradient.

    Raises:
        ValueError: There are no experts, or there was no forward pass in training mode with gradients.

    Source: Switch Transformer, arXiv 2101.03961, section 2.2.
    """
    layers = sparse_layers(model)
    if not layers:
        raise ValueError("the model has no experts; call apply_sparse_upcycling first")
    losses = list(layers[0].routing.balance.values())
    if not losses:
        raise ValueError("the routers recorded nothing: there was no forward pass in training mode with gradients")
    return torch.stack(losses).sum()


def add_to_loss(loss: Any, extra: Tensor) -> Any:
    """Add a term to a ComposerModel's loss and return it in the same form.

    Composer accepts a tensor, a list or tuple of tensors (which it sums), or a dict (of which it uses ``total``, or
    else the sum).
    """
    if isinstance(loss, dict):
        total = {"total": loss["total"] + extra} if "total" in loss else {}
        return {**loss, **total, "load_balancing": extra}
    if isinstance(loss, (list, tuple)):
        return [*loss, extra]
    return loss + extra
