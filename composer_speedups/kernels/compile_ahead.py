"""Compile a model's kernels in parallel before the first batch, which would compile them one after another."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import torch

from composer_speedups.kernels import Shape
from composer_speedups.kernels.attention import attention_backward, attention_forward
from composer_speedups.kernels.embeddings import embed_backward, embed_forward
from composer_speedups.kernels.first_token_attention import first_token_backward, first_token_forward
from composer_speedups.kernels.float8 import (
    ACTIVATION,
    GRADIENT,
    Float8,
    begin_scales,
    cast_float8,
    cast_weights,
    new_scales,
)
from composer_speedups.kernels.gelu import gelu_backward, gelu_float8, gelu_forward
from composer_speedups.kernels.norm import add_norm_backward, add_norm_forward
from composer_speedups.kernels.sums import totals

__all__ = ["Compiling", "compile_ahead", "launches"]

Launch = Callable[[], Any]

_TOKENS = 64  # a multiple of 16, like unpadded batches: Triton specializes kernels for sizes that are multiples of 16


def launches(
    shape: Shape, dtype: torch.dtype, device: torch.device, *, float8: bool = False
) -> tuple[list[Launch], list[Launch]]:
    """Return functions that each launch a few kernels on a few tokens: those of training, and the others of evaluation.

    The slowest to compile come first. With ``float8``, kernels of 8-bit layers are added; the last layer may need the
    16-bit ones.
    """
    hidden, inner = shape.hidden, shape.inner
    weight = torch.zeros(hidden, device=device)
    cu = torch.tensor([0, _TOKENS], dtype=torch.int32, device=device)
    seed = torch.zeros(1, dtype=torch.int32, device=device)

    def zeros(width: int) -> torch.Tensor:
        return torch.zeros(_TOKENS, width, dtype=dtype, device=device)

    def attention(dropout: float) -> None:
        attention_forward(zeros(3 * hidden), cu, _TOKENS, shape.heads, dropout, seed)

    def attention_gradients() -> None:
        logs = torch.zeros(shape.heads, _TOKENS, device=device)
        attention_backward(
            zeros(hidden), zeros(3 * hidden), zeros(hidden), logs, cu, _TOKENS, shape.attention_weights, seed
        )

    def first_token(dropout: float) -> None:
        first_token_forward(zeros(hidden)[:1], zeros(2 * hidden), cu, shape.heads, dropout, seed)

    def first_token_gradients() -> None:
        query, logs = zeros(hidden)[:1], torch.zeros(shape.heads, 1, device=device)
        first_token_backward(query, query, zeros(2 * hidden), query, logs, cu, shape.attention_weights, seed)

    def norm(dropout: float) -> None:
        add_norm_forward(zeros(hidden), zeros(hidden), weight, weight, 1e-12, dropout, seed)

    def norm_gradients(dropout: float, again: torch.Tensor | None) -> None:
        add_norm_backward(
            zeros(hidden), zeros(hidden), torch.zeros(2, _TOKENS, device=device), weight, dropout, seed, again
        )

    def gelu() -> None:
        gelu_forward(zeros(inner))

    def gelu_gradients() -> None:
        gelu_backward(zeros(inner), zeros(inner))
        norms = torch.zeros(1, 3, hidden, device=device)
        totals([norms, torch.zeros(1, inner, device=device), norms, torch.zeros(1, 3 * hidden, device=device)])

    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device=device)
    row = torch.zeros(1, shape.embedding, device=device)

    def embedded(dropout: float) -> torch.Tensor:
        return embed_forward([ids] * 3, [row] * 3, row[0], row[0], 1e-12, dropout, dtype, seed)[1]

    def embedding_gradients() -> None:
        grad = torch.zeros(1, _TOKENS, shape.embedding, dtype=dtype, device=device)
        embed_backward(grad, [ids] * 3, [row] * 3, row[0], embedded(shape.embedded), seed, shape.embedded, (-1, -1))

    training: list[Launch] = [
        attention_gradients, embedding_gradients, partial(attention, shape.attention_weights),
        partial(norm_gradients, shape.attention, weight), partial(norm_gradients, shape.output, None), gelu_gradients,
        *(partial(norm, rate) for rate in sorted({shape.attention, shape.output})),
        first_token_gradients, partial(first_token, shape.attention_weights), gelu,
    ]  # fmt: skip
    evaluation: list[Launch] = [
        partial(attention, 0.0), partial(norm, 0.0), partial(embedded, 0.0), partial(first_token, 0.0)
    ]  # fmt: skip
    if not float8:
        return training, evaluation
    scales = new_scales(1, device)

    def operand(width: int, kind: torch.dtype) -> Float8:
        return Float8.like(zeros(width), kind, scales[0])

    def norm8(dropout: float) -> None:
        output = operand(hidden, ACTIVATION)
        add_norm_forward(zeros(hidden), zeros(hidden), weight, weight, 1e-12, dropout, seed, output)

    def norm8_gradients(dropout: float, again: torch.Tensor | None) -> None:
        more = None if again is None else zeros(hidden)
        add_norm_backward(
            zeros(hidden), zeros(hidden), torch.zeros(2, _TOKENS, device=device), weight, dropout, seed, again, more,
            operand(hidden, GRADIENT),
        )  # fmt: skip

    def gelu8() -> None:
        gelu_float8(zeros(inner), scales[0])
        gelu_backward(zeros(inner), zeros(inner), operand(inner, GRADIENT))

    def casts() -> None:
        square = torch.zeros(hidden, hidden, device=device)
        up, down = torch.zeros(inner, hidden, device=device), torch.zeros(hidden, inner, device=device)
        cast_weights([square] * 4 + [up, down], [scales[0]] * 4)
        cast_float8(zeros(hidden), scales[0])
        begin_scales(new_scales(3, device), 1, keep=True)

    def attention8(dropout: float) -> None:
        output = operand(hidden, ACTIVATION)
        attention_forward(zeros(3 * hidden), cu, _TOKENS, shape.heads, dropout, seed, operand=output)

    def attention8_gradients() -> None:
        logs = torch.zeros(shape.heads, _TOKENS, device=device)
        attention_backward(
            zeros(hidden), zeros(3 * hidden), zeros(hidden), logs, cu, _TOKENS, shape.attention_weights, seed,
            operand=operand(3 * hidden, GRADIENT),
        )  # fmt: skip

    training += [
        attention8_gradients, partial(attention8, shape.attention_weights), casts, gelu8,
        partial(norm8_gradients, shape.attention, weight), partial(norm8_gradients, shape.output, None),
        partial(norm8, shape.attention),
    ]  # fmt: skip
    return training, [*evaluation, partial(norm8, 0.0), partial(attention8, 0.0)]


class Compiling:
    """Kernels that are being compiled in background threads."""

    def __init__(self, pool: ThreadPoolExecutor, training: list[Future[None]]) -> None:
        self._pool, self._training = pool, training

    def wait(self) -> None:
        """Wait until the kernels of training are compiled; those of evaluation are compiled after them."""
        wait(self._training)

    def close(self, *, cancel: bool = False) -> None:
        """Wait for all kernels, or with ``cancel``, only for those whose compilation has started."""
        self._pool.shutdown(cancel_futures=cancel)


def compile_ahead(shape: Shape, dtype: torch.dtype, device: torch.device, *, float8: bool = False) -> Compiling:
    """Start compiling a model's kernels in background threads.

    If a kernel cannot be compiled, the first batch raises the error.

    Args:
        shape: Widths and dropout probabilities of the model.
        dtype: Dtype of the model's matmuls: bf16 or fp16.
        device: A GPU.
        float8: Whether to compile the kernels of 8-bit layers, too.
    """
    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "compile_ahead")
    found = launches(shape, dtype, device, float8=float8)
    training, _ = ([pool.submit(_on, device, each) for each in some] for some in found)
    pool.shutdown(wait=False)  # the threads end when all kernels are compiled
    return Compiling(pool, training)


def _on(device: torch.device, launch: Launch) -> None:
    with torch.cuda.device(device), torch.no_grad():  # a new thread's current device is the first GPU
        launch()
