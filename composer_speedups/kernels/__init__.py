"""Triton kernels for encoders in 16 bits. They depend only on torch and Triton, not on the rest of this package.

Shape suffixes: T packed tokens of all rows, R rows, A heads, D units per head (16, 32, 64 or 128), H = A·D hidden
units, F units of the feed-forward layer, B × S padded ids, V entries of an embedding table. Tensors are contiguous and
on one CUDA device, or on the CPU under ``TRITON_INTERPRET=1``. Activations are bf16, fp16 or float32; LayerNorm weights
and embedding tables have any floating dtype; sums and statistics are float32. ``seed`` is int32 (1,), on the device.
The same seed drops the same numbers, so pass the forward pass's seed to the backward pass.

Each module holds the kernels of one step of a layer, and its functions say which shapes they take and return. Those
with autograd are ``attention.biased_attention``, ``disentangled_attention.attend``, ``casts.cast_parameters``,
``embeddings.embed`` and ``first_token_attention.first_token_attention``.

Attention in two rows of 5 and 3 tokens, and its gradient::

    import torch
    from composer_speedups.kernels.attention import attention_backward, attention_forward

    heads, dropout = 2, 0.1
    qkv = torch.randn(8, 3 * heads * 16, device=device)
    cu_seqlens = torch.tensor([0, 5, 8], dtype=torch.int32, device=device)
    seed = torch.tensor([7], dtype=torch.int32, device=device)
    out, logs = attention_forward(qkv, cu_seqlens, 5, heads, dropout, seed)
    grad_qkv, partial_sums = attention_backward(torch.ones_like(out), qkv, out, logs, cu_seqlens, 5, dropout, seed)
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Shape"]


class Shape(NamedTuple):
    """The widths and dropout probabilities that a model's kernels are compiled for.

    Attributes:
        hidden, inner, heads: Hidden units, feed-forward units and heads of a layer.
        attention_weights, attention, output: Dropout of a layer's attention weights, attention output and output.
        embedding: Width of the embeddings.
        embedded: Dropout of the embeddings' output.
        biased: Whether attention has a bias by distance.
        tanh: Whether GELU is the tanh form, which is a part of the products around it.
    """

    hidden: int
    inner: int
    heads: int
    attention_weights: float
    attention: float
    output: float
    embedding: int
    embedded: float
    biased: bool = False
    tanh: bool = False
