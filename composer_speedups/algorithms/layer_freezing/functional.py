"""Stop training a model's first layers, and decide from gradients how many of them no longer change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from composer_speedups.families.blocks import blocks_of
from composer_speedups.families.first_layers import first_layers, only_encoder
from composer_speedups.surgery.ddp_reducer import rebuild_reducer

__all__ = ["apply_layer_freezing", "gradient_norms_of_blocks", "settled_blocks"]


def apply_layer_freezing(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer] | None = None,
    layers: Literal["embeddings"] | int = "embeddings",
) -> list[str]:
    """Stop training a model's embeddings, and its first blocks.

    Their parameters no longer require gradients, so the forward pass stores none of their activations, and the backward
    pass ends after them. Their gradients and their state in the optimizers are freed. Dropout stays as it is. Call it
    between the optimizer's step and the next forward pass, before or during training, on every rank.

    Args:
        model: A model with one encoder of a family in ``docs/FAMILIES.md``; changed in place. If it is wrapped in
            DistributedDataParallel, pass the wrapper, whose reducer is then built again without the frozen parameters.
        optimizers: The model's optimizer or optimizers, if they exist. Their groups do not change: an optimizer skips
            parameters without gradients, and does not decay them.
        layers: ``"embeddings"``, or a number of blocks, which are frozen together with the embeddings and with
            everything else that computes the blocks' input, such as DeBERTa's relative positions. A later call may
            freeze more.

    Returns:
        Names of the modules that this call froze; empty if all of them already were.

    Raises:
        ValueError: ``layers`` is neither of the two or exceeds the model's blocks; the model has no encoder of a known
            family, or several; the embeddings are tied to another module, such as a masked-LM head; no parameter would
            be left to train; or more layers are already frozen.
    """
    blocks = check_layers(layers)
    modules = check_freezing(model, blocks)
    parameters = {p for module in modules.values() for p in module.parameters()}
    changed = [name for name, module in modules.items() if any(p.requires_grad for p in module.parameters())]
    for parameter in parameters:
        parameter.requires_grad_(False)
        parameter.grad = None
    for optimizer in _as_list(optimizers):
        for parameter in parameters:
            optimizer.state.pop(parameter, None)
    if changed:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                rebuild_reducer(module)
    return changed


def gradient_norms_of_blocks(model: nn.Module) -> Tensor:
    """Return the L2 norm of the gradient of each block of the encoder, float32 (blocks,), without synchronizing.

    A block without gradients has norm 0. If any gradient is not finite, all norms are 0.

    Args:
        model: A model with one encoder of a known family, after a backward pass.
    """
    blocks = blocks_of(only_encoder(model))
    device = next(model.parameters()).device
    norms = torch.zeros(len(blocks), device=device)
    for index, block in enumerate(blocks):
        gradients = [p.grad for p in block.parameters() if p.grad is not None]
        if gradients:
            norms[index] = torch.stack([n.float() for n in torch._foreach_norm(gradients)]).norm()
    return torch.where(norms.isfinite().all(), norms, 0)


def settled_blocks(before: Sequence[float], now: Sequence[float], frozen: int = 0, percentile: float = 50) -> int:
    """Return how many of the first blocks to freeze, from the norms of their gradients in two successive intervals.

    A trained block's rate of change is ``|before - now| / before``. All trained blocks in front of the first one whose
    rate reaches the given percentile of the rates are frozen; the last block never is.

    Args:
        before: A gradient norm for each block, in an interval of training.
        now: Likewise, in the next interval.
        frozen: Number of first blocks that are already frozen.
        percentile: From 0, which freezes none, to 100, which freezes all in front of the one that changes most.

    Returns:
        The number of first blocks to freeze, at least ``frozen``.

    Raises:
        ValueError: The lists differ in length.

    Source: Liu et al., AutoFreeze, arXiv 2102.01386, section 3.2, and their code.
    """
    if len(before) != len(now):
        raise ValueError(f"norms of {len(before)} and of {len(now)} blocks cannot be compared")
    rates = [abs(b - n) / b if b else float("inf") for b, n in zip(before, now, strict=True)][frozen:]
    if not rates or not all(np.isfinite(rates)):
        return frozen
    limit = float(np.percentile(rates, percentile))
    return frozen + next(index for index, rate in enumerate(rates) if rate >= limit)


def check_freezing(model: nn.Module, blocks: int) -> dict[str, nn.Module]:
    """Return the modules to freeze by name, or raise the ValueError of :func:`apply_layer_freezing`."""
    modules, before = first_layers(model, blocks), frozen_blocks(model)
    if before is not None and before > blocks:
        raise ValueError(
            f"the model's first layers are already frozen with layers={before}; to use "
            f"layers={blocks or 'embeddings'!r}, build a new model"
        )
    parameters = {p for module in modules.values() for p in module.parameters()}
    _refuse_tied(model, modules, parameters)
    if not any(p.requires_grad and p not in parameters for p in model.parameters()):
        raise ValueError(f"layers={blocks or 'embeddings'!r} leaves no parameter to train")
    return modules


def check_layers(layers: Any) -> int:
    """The number of blocks to freeze in addition to the embeddings."""
    if layers == "embeddings":
        return 0
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
        raise ValueError(f"layers must be 'embeddings' or a number of blocks of at least 1, not {layers!r}")
    return layers


def frozen_blocks(model: nn.Module) -> int | None:
    """Number of first blocks that are frozen, with the embeddings and all that computes their input; None without the
    embeddings."""
    frozen = None
    for blocks in range(1 + len(blocks_of(only_encoder(model)))):
        try:
            modules = first_layers(model, blocks)
        except ValueError:  # only the embeddings can be frozen
            break
        if any(p.requires_grad for module in modules.values() for p in module.parameters()):
            break
        frozen = blocks
    return frozen


def _refuse_tied(model: nn.Module, modules: dict[str, nn.Module], parameters: set[nn.Parameter]) -> None:
    inside = {id(inner) for module in modules.values() for inner in module.modules()}
    for path, module in model.named_modules():
        if id(module) in inside or isinstance(module, nn.Embedding):  # T5 registers its embeddings twice
            continue
        tied = next((name for name, p in module._parameters.items() if p is not None and p in parameters), None)
        if tied is not None:
            raise ValueError(
                f"{path}.{tied} is tied to the embeddings and would be frozen, too; load the model with "
                "tie_word_embeddings=False"
            )


def _as_list(optimizers: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
    if optimizers is None:
        return []
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
