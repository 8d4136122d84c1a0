"""Triton kernels for encoders in 16 bits. They depend only on torch and Triton, not on the rest of this package.

Shape suffixes: T packed tokens of all rows, R rows, A heads, D units per head (16, 32, 64 or 128), H = A·D hidden
units, F units of the feed-forward layer, B × S padded ids, V entries of an embedding table. Tensors are contiguous and
on one CUDA device, or on the CPU under ``TRITON_INTERPRET=1``. Activations are bf16, fp16 or float32; LayerNorm weights
and embedding tables have any floating dtype; sums and statistics are float32. ``seed`` is int32 (1,), on the device.
The same seed drops the same numbers, so pass the forward pass's seed to the backward pass.

=================================== =================================================================================
``attention.attention_forward``     qkv (T, 3·H), cu_seqlens int32 (R + 1,) → out (T, H), logs float32 (A, T);
                                    ``window`` limits the distance of the attended tokens to either side; ``bias``,
                                    float32 (A, 2·L + 1), is added to the scores by distance
``attention.attention_backward``    gradient of out, and the above → gradient of qkv (T, 3·H), and partial sums of it
                                    over tokens (P, 3·H); ``grad_bias`` receives the gradient of ``bias``
``attention.biased_attention``      attention with a bias by distance, with autograd
``disentangled_attention.``         DeBERTa's attention: ``disentangled_forward`` and ``disentangled_backward`` also
                                    have a table of positions (P, 2·H) with a gradient; ``attend`` is the autograd
                                    operator
``first_token_attention.``          attention of each row's first token: queries (B, H) for the first B rows, keys and
                                    values (T, 2·H), cu_seqlens → (B, H); ``first_token_attention`` has autograd,
                                    ``first_token_forward`` and ``first_token_backward`` are the two passes
``norm.add_norm_forward``           LayerNorm(dropout(x) + residual): x and residual (T, H) → result (T, H), the sum,
                                    stored in x's memory, and statistics float32 (2, T)
``norm.add_norm_backward``          gradient of the result → of the residual and of x (T, H), partial sums (P, 3, H)
``gelu.gelu_forward``               GELU's input (T, F) → GELU's result (T, F)
``gelu.gelu_backward``              gradient (T, F), overwritten, and GELU's input (T, F) → gradient, GELU's result
                                    (T, F) and partial sums of the gradient (P, F)
``gelu_products.``                  GELU's tanh form in products' epilogues: ``gelu_product``, x (T, I), weight (F, I),
                                    bias (F,) → x · weightᵀ + bias and its GELU (T, F); ``gelu_product_backward``,
                                    gradient (T, I), weight (I, F), GELU's input (T, F) → its gradient (T, F)
``gelu.geglu_forward``              dropout(GELU(first half) · second half) of (T, 2·F) → (T, F)
``gelu.geglu_backward``             gradient (T, F), overwritten, and the input → gradient (T, 2·F), the result (T, F)
``norm.pre_norm_forward``           LayerNorm(residual + dropout(sublayer)), with a float32 residual stream (T, H) →
                                    result, sum (T, H), statistics float32 (2, T)
``norm.pre_norm_backward``          gradients of the result and of the sum → of residual and sublayer (T, H), of the
                                    weight float32 (H,), or of weight and bias (2, H), and the recomputed result
``attention.rotate``                rotates the queries and keys in qkv (T, 3·H) by their positions, or back, in place
``narrow.narrow_gradient``          x (T, C), left (T, R) → partial sums of leftᵀ · x, float32 (P, R, C), for R up to 64
``narrow.adapter_gradients``        gradient (T, O) of one or three Linears' outputs, z (T, R), B of each adapter →
                                    gradient · B (T, R) and partial sums of gradientᵀ · z, float32 (P, …), as B
``narrow.gelu_narrow``              GELU's input (T, F) and right (F, R) → GELU's result and its product with right
``narrow.gelu_backward_narrow``     as ``gelu.gelu_backward``, with such products instead of GELU's result and the sums
``dropout.dropped``                 dropout(x) of (T, C), or added to another tensor in place
``casts.cast_together``             up to twelve tensors → copies in another dtype, one after the other in memory
``casts.cast_parameters``           up to twelve float32 parameters → as ``cast_together``, with autograd
``casts.merged_weights``            a layer's six weights and their adapters' A and B → W + scale · B · A in another
                                    dtype, one after the other in memory
``sums.totals``                     up to four partial sums over tokens, float32 (P, …) → their totals (…)
``sums.partial_sums``               (T, F) → partial sums over tokens, float32 (P, F)
``gelu.gelu_float8``                GELU's input (T, F) → GELU's result in 8 bits
``float8.new_scales``               number of 8-bit operands → their scales and recorded magnitudes
``float8.begin_scales``             computes scales for the next pass from the magnitudes of the last one
``float8.cast_float8``              casts a tensor to 8 bits; ``float8.settle`` finishes a cast by another kernel
``float8.cast_weights``             casts a layer's weights to 8 bits, with their transposes
``float8.scaled_product``           (T, I) and (O, I) in 8 bits, bias (O,) → (T, O)
``embeddings.embed``                ids int64 (B, S), tables (V, H) → dropout(LayerNorm(sum)) (B, S, H), with autograd;
                                    ``embed_forward`` and ``embed_backward`` are the two passes
``compile_ahead.compile_ahead``     compiles the kernels of a :class:`Shape` in threads
``common.``                         ``FirstDerivative``: base class of autograd functions without a second derivative;
                                    ``counting``: what the kernels' callers report; ``gradient_buffer``: where a
                                    captured step reads a gradient; ``to_autocast_dtype`` and ``autocast_dtype``;
                                    ``missing_c_compiler``
=================================== =================================================================================

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
