"""Compile a model's kernels in parallel before the first batch, which would compile them one after another."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import torch

from composer_speedups.kernels import Shape
from composer_speedups.kernels.attention import attention_backward, attention_forward
from composer_speedups.kernels.casts import cast_together, merged_weights
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
from composer_speedups.kernels.narrow import (
    MAX_WIDTH,
    adapter_gradients,
    gelu_backward_narrow,
    gelu_narrow,
    narrow_gradient,
)
from composer_speedups.kernels.norm import add_norm_backward, add_norm_forward
from composer_speedups.kernels.sums import partial_sums, totals

__all__ = ["Compiling", "compile_ahead", "launches"]

Launch = Callable[[], Any]

_TOKENS = 64  # a multiple of 16, like unpadded batches: Triton specializes kernels for sizes that are multiples of 16


def launches(
    shape: Shape, dtype: torch.dtype, device: torch.device, *, float8: bool = False, ranks: Sequence[int] = ()
) -> tuple[list[Launch], list[Launch]]:
    """Return functions that each launch a few kernels on a few tokens: those of training, and the others of evaluation.

    With ``float8``, kernels of 8-bit layers are added; the last layer may need the 16-bit ones. ``ranks`` are the ranks
    of the adapters of query, key, value, out, up and down, 0 for a Linear without one; empty without adapters.
    """
    zeros = partial(torch.zeros, device=device)
    x_TH, kv_T2H, qkv_T3H = (zeros(_TOKENS, width * shape.hidden, dtype=dtype) for width in (1, 2, 3))
    x_TF, query_1H, weight_H = zeros(_TOKENS, shape.inner, dtype=dtype), x_TH[:1], zeros(shape.hidden)
    cu_seqlens, seed = torch.tensor([0, _TOKENS], dtype=torch.int32, device=device), zeros(1, dtype=torch.int32)
    logs, statistics = zeros(shape.heads, _TOKENS), zeros(2, _TOKENS)
    ids, table = zeros(1, _TOKENS, dtype=torch.int64), zeros(1, shape.embedding)
    grad_embedded, weight_E = zeros(1, _TOKENS, shape.embedding, dtype=dtype), table[0]
    norms = zeros(1, 3, shape.hidden)
    bias, grad_bias = (zeros(shape.heads, 2 * _TOKENS + 1) if shape.biased else None for _ in range(2))
    scales, rate = new_scales(1, device)[0], shape.attention_weights

    def layer(*, in_float8: bool) -> tuple[list[Launch], list[Launch]]:
        def operand(x: torch.Tensor, kind: torch.dtype = ACTIVATION) -> Float8 | None:
            return Float8.like(x, kind, scales) if in_float8 else None

        def attention(dropout: float) -> Launch:
            arguments = qkv_T3H, cu_seqlens, _TOKENS, shape.heads, dropout, seed
            return partial(attention_forward, *arguments, operand=operand(x_TH), bias=bias)

        def norm(dropout: float) -> Launch:
            return partial(add_norm_forward, x_TH, x_TH, weight_H, weight_H, 1e-12, dropout, seed, operand(x_TH))

        def norm_gradients(dropout: float, bias_H: torch.Tensor | None) -> Launch:
            more_TH = x_TH if in_float8 and bias_H is not None else None
            operands = bias_H, more_TH, operand(x_TH, GRADIENT)
            return partial(add_norm_backward, x_TH, x_TH, statistics, weight_H, dropout, seed, *operands)

        attention_arguments = x_TH, qkv_T3H, x_TH, logs, cu_seqlens, _TOKENS, rate, seed
        training: list[Launch] = [
            partial(
                attention_backward, *attention_arguments, operand=operand(qkv_T3H, GRADIENT), bias=bias,
                grad_bias=grad_bias,
            ),
            attention(rate),
            norm_gradients(shape.attention, weight_H), norm_gradients(shape.output, None),
            *(norm(dropout) for dropout in sorted({shape.attention, shape.output})),
            partial(partial_sums, x_TF) if shape.tanh else partial(gelu_backward, x_TF, x_TF, operand(x_TF, GRADIENT)),
        ]  # fmt: skip
        return training, [attention(0.0), norm(0.0)]

    def embeddings(dropout: float) -> Launch:
        return partial(embed_forward, [ids] * 3, [table] * 3, weight_E, weight_E, 1e-12, dropout, dtype, seed)

    def first_token(dropout: float) -> Launch:
        return partial(first_token_forward, query_1H, kv_T2H, cu_seqlens, shape.heads, dropout, seed)

    hidden, inner = shape.hidden, shape.inner
    weights = [*[zeros(hidden, hidden)] * 4, zeros(inner, hidden), zeros(hidden, inner)]
    biases = [*[weight_H] * 4, zeros(inner), weight_H]
    embedded = [ids] * 3, [table] * 3, weight_E, statistics, seed, shape.embedded, (-1, -1)
    first_tokens = query_1H, query_1H, kv_T2H, query_1H, zeros(shape.heads, 1), cu_seqlens, rate, seed
    training, evaluation = layer(in_float8=False)
    training += [
        partial(embed_backward, grad_embedded, *embedded), embeddings(shape.embedded), partial(gelu_forward, x_TF),
        partial(totals, [norms, zeros(1, shape.inner), norms, zeros(1, 3 * shape.hidden)]),
        partial(first_token_backward, *first_tokens), first_token(rate),
        partial(cast_together, weights + biases, dtype),
        partial(cast_together, [x.to(dtype) for x in weights + biases], torch.float32),
    ]  # fmt: skip
    evaluation += [embeddings(0.0), first_token(0.0)]
    if float8:
        for kernels, in_8_bits in zip((training, evaluation), layer(in_float8=True), strict=True):
            kernels += in_8_bits
        training += [
            partial(gelu_float8, x_TF, scales), partial(cast_weights, weights, [scales] * 4),
            partial(cast_float8, x_TH, scales), partial(begin_scales, new_scales(3, device), 1, keep=True),
        ]  # fmt: skip
    if float8 or ranks:  # whose weights have a kernel of their own
        training.append(partial(cast_together, biases, dtype))
    if ranks:
        adapters = [(zeros(1, weight.shape[1]), zeros(len(weight), 1), 1.0) for weight in weights]
        outputs = (dtype, torch.float32)[: 1 + float8]
        training += [partial(merged_weights, weights, adapters, output) for output in outputs]
        training += _of_adapters(x_TH, qkv_T3H, x_TF, ranks, float8=float8)
    return training, evaluation


def _of_adapters(
    x_TH: torch.Tensor, qkv_T3H: torch.Tensor, x_TF: torch.Tensor, ranks: Sequence[int], *, float8: bool
) -> list[Launch]:
    def narrow(rows: int, rank: int) -> torch.Tensor | None:
        return x_TH.new_zeros(rows, rank) if 0 < rank <= MAX_WIDTH else None

    training: list[Launch] = []
    *_, out, up, down = ranks
    for y, some in ((qkv_T3H, ranks[:3]), (x_TH, [out]), (x_TH, [down])):
        if (z := narrow(_TOKENS, sum(some))) is not None:
            b = x_TH.new_zeros(sum(some) * x_TH.shape[1])
            training.append(partial(adapter_gradients, y, z, b, some))
    inputs = [narrow(_TOKENS, rank) for rank in (sum(ranks[:3]), out, up)]
    training += [partial(narrow_gradient, x_TH, dz) for dz in inputs if dz is not None]
    if max(up, down) <= MAX_WIDTH:
        z, right, dz = narrow(_TOKENS, up), narrow(x_TF.shape[1], up), narrow(_TOKENS, down)
        for operand in (None, Float8.like(x_TF, GRADIENT, new_scales(1, x_TF.device)[0]))[: 1 + float8]:
            training.append(partial(gelu_backward_narrow, x_TF, x_TF, z, right, dz, operand))
        if down:
            a = x_TF.new_zeros(down, x_TF.shape[1])
            training += [partial(gelu_narrow, x_TF, a.t(), write=write) for write in (True, False)[: 1 + float8]]
    return training


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


def compile_ahead(
    shape: Shape, dtype: torch.dtype, device: torch.device, *, float8: bool = False, ranks: Sequence[int] = ()
) -> Compiling:
    """Start compiling a model's kernels in background threads.

    If a kernel cannot be compiled, the first batch raises the error.

    Args:
        shape: Widths and dropout probabilities of the model.
        dtype: Dtype of the model's matmuls: bf16 or fp16.
        device: A GPU.
        float8: Whether to compile the kernels of 8-bit layers, too.
        ranks: See :func:`launches`.
    """
    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "compile_ahead")
    kernels = launches(shape, dtype, device, float8=float8, ranks=ranks)
    training, _ = ([pool.submit(_on, device, launch) for launch in some] for some in kernels)
    pool.shutdown(wait=False)  # the threads end when all kernels are compiled
    return Compiling(pool, training)


def _on(device: torch.device, launch: Launch) -> None:
    with torch.cuda.device(device), torch.no_grad():  # a new thread's current device is the first GPU
        launch()
