"""Compile a layer's kernels side by side before the first batch, which would compile them one after another."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from composer_speedups.algorithms.fused_layers.attention import attention_backward, attention_forward
from composer_speedups.algorithms.fused_layers.gelu import column_sums, gelu_backward
from composer_speedups.algorithms.fused_layers.norm import add_norm_backward, add_norm_forward
from composer_speedups.algorithms.fused_layers.parts import Parts, Rates

__all__ = ["compile_ahead", "launches"]

_TOKENS = 64  # as many as one of unpadding's multiples: Triton compiles for sizes that are multiples of 16, or not


def launches(parts: Parts, rates: Rates, dtype: torch.dtype, device: torch.device) -> list[Callable[[], Any]]:
    """One function a kernel, each of which launches it on a few tokens as training does, then as evaluation does."""
    hidden, inner = parts.query.in_features, parts.up.out_features
    weight = torch.zeros(hidden, dtype=parts.output_norm.weight.dtype, device=device)
    cu = torch.tensor([0, _TOKENS], dtype=torch.int32, device=device)
    seed = torch.zeros(1, dtype=torch.int32, device=device)

    def zeros(width: int) -> torch.Tensor:
        return torch.zeros(_TOKENS, width, dtype=dtype, device=device)

    def attention() -> None:
        for dropout in (rates.weights, 0.0):
            attention_forward(zeros(3 * hidden), cu, _TOKENS, parts.heads, dropout, seed)

    def attention_gradients() -> None:
        logs = torch.zeros(parts.heads, _TOKENS, device=device)
        attention_backward(zeros(hidden), zeros(3 * hidden), zeros(hidden), logs, cu, _TOKENS, rates.weights, seed)

    def norms() -> None:
        for dropout in (rates.output, rates.attention, 0.0):
            add_norm_forward(zeros(hidden), zeros(hidden), weight, weight, 1e-12, dropout, seed)

    def norm_gradients() -> None:
        statistics = torch.zeros(2, _TOKENS, device=device)
        for dropout, again in ((rates.output, None), (rates.attention, weight)):
            add_norm_backward(zeros(hidden), zeros(hidden), statistics, weight, dropout, seed, again)

    def gelu() -> None:
        gelu_backward(zeros(inner), zeros(inner))
        column_sums(zeros(3 * hidden))

    return [attention_gradients, attention, norm_gradients, norms, gelu]


def compile_ahead(parts: Parts, rates: Rates, dtype: torch.dtype, device: torch.device) -> ThreadPoolExecutor:
    """Start compiling; ``shutdown()`` of what is returned waits for it.

    Args:
        parts, rates: Of a layer, wherever it is.
        dtype: What its products are computed in: bf16 or fp16.
        device: A GPU.

    A kernel that cannot be compiled is left to the first batch, which says why.
    """
    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "compile_ahead")
    for launch in launches(parts, rates, dtype, device):
        pool.submit(_on, device, launch)
    return pool


def _on(device: torch.device, launch: Callable[[], Any]) -> None:
    with torch.cuda.device(device), torch.no_grad():  # a thread starts on the first GPU
        launch()
