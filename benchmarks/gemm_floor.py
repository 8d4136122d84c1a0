"""The matrix products of a training step on their own: no step can be shorter."""

from __future__ import annotations

import time

import torch
from torch import nn

from composer_speedups.families.blocks import repeated_blocks

__all__ = ["gemm_floor", "linear_shapes"]


def linear_shapes(model: nn.Module) -> list[tuple[int, int]]:
    """(inputs, outputs) of every Linear in the model's repeated blocks, in order."""
    blocks = repeated_blocks(model).values()
    return [(m.in_features, m.out_features) for b in blocks for m in b.modules() if isinstance(m, nn.Linear)]


def gemm_floor(
    shapes: list[tuple[int, int]], tokens: int, device: torch.device, dtype: torch.dtype, repeats: int = 10
) -> float:
    """Seconds of one step's products: forward, input gradient and weight gradient of each Linear.

    Every layer has weights of its own, as in a step; the best of three passes of ``repeats`` steps counts.

    Args:
        shapes: Of the Linears, see :func:`linear_shapes`.
        tokens: Rows of each product.
        device: Where to multiply.
        dtype: What to multiply in.
        repeats: Steps a pass.
    """
    widths = {width for shape in shapes for width in shape}
    rows = {width: torch.randn(tokens, width, device=device, dtype=dtype) for width in widths}
    weights = [torch.randn(outputs, inputs, device=device, dtype=dtype) for inputs, outputs in shapes]

    def step() -> None:
        for weight in weights:
            rows[weight.shape[1]] @ weight.T
        for weight in reversed(weights):
            gradient = rows[weight.shape[0]]
            gradient @ weight
            gradient.T @ rows[weight.shape[1]]

    def timed() -> float:
        _wait(device)
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        _wait(device)
        return (time.perf_counter() - start) / repeats

    step()
    return min(timed() for _ in range(3))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
