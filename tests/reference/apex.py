"""A stand-in for Apex's fused LayerNorm: its modules, its function's signature and its treatment of autocast.

Apex must be built from source, and the machines that run the tests do not have it. The stand-in computes with torch;
the tests check how our module calls it. Source of the signature: NVIDIA/apex,
apex/normalization/fused_layer_norm.py at 014f30f.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F


class FusedLayerNormAffineFunction(torch.autograd.Function):
    """Refuse mixed dtypes, compute in float32 and return the input's dtype, like Apex's function."""

    calls = 0

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Any, eps: float, _memory: bool
    ) -> Tensor:
        assert input.dtype == weight.dtype == bias.dtype, "the kernel reads all three as one dtype"
        FusedLayerNormAffineFunction.calls += 1
        ctx.save_for_backward(input, weight, bias)
        ctx.arguments = (normalized_shape, eps)
        return F.layer_norm(input.float(), normalized_shape, weight.float(), bias.float(), eps).to(input.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        with torch.enable_grad():
            values = [t.detach().float().requires_grad_() for t in ctx.saved_tensors]
            shape, eps = ctx.arguments
            output = F.layer_norm(values[0], shape, values[1], values[2], eps)
        gradients = torch.autograd.grad(output, values, upstream[0].float())
        return *(g.to(t.dtype) for g, t in zip(gradients, ctx.saved_tensors, strict=True)), None, None, None


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Any,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    return FusedLayerNormAffineFunction.apply(input, weight, bias, normalized_shape, eps, memory_efficient)


def install(monkeypatch: pytest.MonkeyPatch) -> type[FusedLayerNormAffineFunction]:
    """Make ``import apex`` and ``import fused_layer_norm_cuda`` import the stand-in."""
    names = ("apex", "apex.normalization", "apex.normalization.fused_layer_norm", "fused_layer_norm_cuda")
    for name in names:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    functions: Any = sys.modules["apex.normalization.fused_layer_norm"]
    functions.fused_layer_norm_affine = fused_layer_norm_affine
    FusedLayerNormAffineFunction.calls = 0
    return FusedLayerNormAffineFunction
