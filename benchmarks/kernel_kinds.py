"""The kinds of kernels in a profile of a training step, recognized by their names."""

from __future__ import annotations

import re

# The first matching pattern decides. Inductor's names list what was fused, so several may match.
_PATTERNS = {
    "communication": r"nccl|gloo|c10d::",
    "attention": r"flash|fmha|attention|sdpa|^(?!.*log_?softmax).*softmax",
    "optimizer": r"adam|multi_tensor_apply|optimizer",
    "scaling to float8": r"triton.*_scaled_mm",  # operations that inductor fuses before a float8 product
    "GEMM": r"gemm|nvjet|xmma|cublas|splitk|cutlass|::(addmm|mm|bmm|baddbmm|linear|matmul)$|mkldnn_linear|_scaled_mm",
    "activation": r"gelu|erf|tanh|relu",
    "LayerNorm, dropout, residual": r"layer_?norm|dropout|GammaBeta|masked_scale|bernoulli|seed|LayerNorm",
    "embeddings": r"embedding",
    "reductions": r"column_sums|reduce|_red_|::sum$|::mean$|_per_fused_sum|foreach_norm|LpNorm",
    "copies and casts": r"memcpy|memset|copy|catarray|::cat$|::to$|fill|zero_|contiguous",
}
KINDS = (*_PATTERNS, "other")
_COMPILED = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _PATTERNS.items()}


def kind_of(name: str) -> str:
    """The kind, one of :data:`KINDS`, of a CUDA kernel's or, in a CPU profile, an aten operator's name."""
    return next((kind for kind, pattern in _COMPILED.items() if pattern.search(name)), "other")
