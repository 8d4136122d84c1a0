"""Triton kernels for encoders in 16 bits, usable alone: they need torch and Triton, and nothing else of this package.

Shape suffixes: T tokens of all rows, packed one after another, R rows, A heads, D units a head (16, 32, 64 or 128),
H = A·D hidden units, F units of the feed-forward layer, B × S padded ids, V entries of an embedding table. Tensors are
contiguous and on one CUDA device; under ``TRITON_INTERPRET=1`` on the CPU. Activations are bf16, fp16 or float32,
LayerNorm's weights and embedding tables of any floating dtype; sums and statistics are float32. ``seed`` is int32 (1,)
on the device: the same seed drops the same numbers, so the backward pass is given that of the forward pass.

=================================== =================================================================================
``attention.attention_forward``     qkv (T, 3·H), cu_seqlens int32 (R + 1,) → out (T, H), logs float32 (A, T);
                                    with a ``window``, to so many tokens before and after
``attention.attention_backward``    gradient of out, and the above → gradient of qkv (T, 3·H)
``disentangled_attention.``         DeBERTa's: ``disentangled_forward`` and ``disentangled_backward`` also take a table
                                    of positions (P, 2·H), which gets a gradient; ``attend`` is both, with autograd
``norm.add_norm_forward``           LayerNorm(dropout(x) + residual): x and residual (T, H) → result (T, H), the sum,
                                    written over x, and statistics float32 (2, T)
``norm.add_norm_backward``          gradient of the result → of the residual and of x (T, H), sums float32 (3, H)
``gelu.gelu_backward``              gradient (T, F), which is overwritten, and GELU's input (T, F) → gradient, GELU's
                                    result (T, F) and the bias's gradient float32 (F,)
``geglu.geglu_forward``             dropout(GELU(first half) · second half) of (T, 2·F) → (T, F)
``geglu.geglu_backward``            gradient (T, F), which is overwritten, and the input → gradient (T, 2·F), the result
``pre_norm.pre_norm_forward``       LayerNorm(residual + dropout(sublayer)), with a float32 residual stream (T, H) →
                                    result, sum (T, H), statistics float32 (2, T)
``pre_norm.pre_norm_backward``      gradients of the result and of the sum → of residual and sublayer (T, H), of the
                                    weight float32 (H,), and the result again
``rotary.rotate``                   rotary positions of the queries and keys in qkv (T, 3·H), in place, and back
``gelu.column_sums``                (T, F) → float32 (F,)
``gelu.gelu_float8``                GELU's input (T, F) → GELU's result in 8 bits
``float8.new_scales``               numbers of operands in 8 bits → what the kernels know of their magnitudes
``float8.begin_scales``             scales for the next pass, from the magnitudes of the last one
``float8.cast_float8``              any tensor → itself in 8 bits. ``float8.settle`` finishes what another kernel cast
``float8.cast_weights``             a layer's weights → in 8 bits, straight and transposed
``float8.scaled_product``           (T, I) and (O, I) in 8 bits, bias (O,) → (T, O)
``embeddings.embed``                ids int64 (B, S), tables (V, H) → dropout(LayerNorm(sum)) (B, S, H); an autograd
                                    function. ``embed_forward`` and ``embed_backward`` are its halves
``compile_ahead.compile_ahead``     compiles all of them for a :class:`Shape` in threads
=================================== =================================================================================

Attention over two rows, of 5 and of 3 tokens, and its gradient::

    import torch
    from composer_speedups.kernels.attention import attention_backward, attention_forward

    heads, dropout = 2, 0.1
    qkv = torch.randn(8, 3 * heads * 16, device=device)
    cu_seqlens = torch.tensor([0, 5, 8], dtype=torch.int32, device=device)
    seed = torch.tensor([7], dtype=torch.int32, device=device)
    out, logs = attention_forward(qkv, cu_seqlens, 5, heads, dropout, seed)
    grad_qkv = attention_backward(torch.ones_like(out), qkv, out, logs, cu_seqlens, 5, dropout, seed)
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Shape"]


class Shape(NamedTuple):
    """What a model's kernels are compiled for: widths, and probabilities of dropping.

    Attributes:
        hidden, inner, heads: Of a layer.
        weights, attention, output: Dropped of a layer's attention weights, of its attention's output, of its output.
        embedding: Width of the embeddings.
        embedded: Dropped of their output.
    """

    hidden: int
    inner: int
    heads: int
    weights: float
    attention: float
    output: float
    embedding: int
    embedded: float
