"""Compare a LayerNorm of fast_layernorm with torch's, in float32."""

from __future__ import annotations

import copy

import torch
from torch import nn

from composer_speedups.packing.derived_classes import swap_class
from tests.reference.tolerance import assert_near


def check_layer(
    cls: type[nn.LayerNorm],
    shape: tuple[int, ...],
    device: str,
    autocast: torch.dtype | None,
    *,
    affine: bool = True,
    eps: float = 1e-5,
) -> None:
    """Compare outputs and all gradients with nn.LayerNorm in float32; ``autocast`` is its dtype, or None without it."""
    torch.manual_seed(0)
    dtype = autocast or torch.float32
    reference = nn.LayerNorm(shape[-1], eps, affine)
    for parameter in reference.parameters():
        nn.init.normal_(parameter)
    changed = copy.deepcopy(reference).to(device)
    assert swap_class(changed, nn.LayerNorm, cls) == [""]
    x = torch.randn(shape)
    y = x.detach().to(device).requires_grad_()
    x.requires_grad_()
    expected = reference(x)
    with torch.autocast(device, dtype, enabled=autocast is not None):
        actual = changed(y)
    assert actual.dtype == dtype
    upstream = torch.randn(shape)
    expected.backward(upstream)
    actual.backward(upstream.to(device, dtype))
    assert y.grad is not None
    assert_near([actual.float().cpu(), y.grad.cpu()], [expected, x.grad], dtype, f"{shape}")
    rows = max(1, x.numel() // shape[-1])
    for one, other in zip(changed.parameters(), reference.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.dtype == one.dtype
        # Sums over rows, scaled by their standard deviation.
        assert_near([one.grad.cpu() / rows**0.5], [other.grad / rows**0.5], dtype, f"{shape}, parameters' gradients")
