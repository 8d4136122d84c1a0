"""Tolerances by the dtype of a computation."""

from __future__ import annotations

from typing import Any

import torch

# fp32: the same sums in another order, which also depends on the kind of CPU.
# bf16: 8 bits of mantissa, a few layers, values near 1.
TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"rtol": 1e-4, "atol": 3e-5},
    torch.bfloat16: {"rtol": 5e-2, "atol": 2e-2},
    torch.float16: {"rtol": 1e-2, "atol": 4e-3},
    # 3 bits of mantissa, two layers with large weights; test_float8_linear.py has tighter bounds, layer by layer.
    torch.float8_e4m3fn: {"rtol": 0.1, "atol": 0.2},
}


def assert_equal(actual: Any, expected: Any) -> None:
    """Compare bit by bit; lists and dicts must not be empty."""
    assert len(expected) > 0
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def assert_near(actual: Any, expected: Any, dtype: torch.dtype = torch.float32, what: str = "") -> None:
    """Call ``torch.testing.assert_close`` with the dtype's tolerance; lists and dicts must not be empty."""
    assert len(expected) > 0, f"nothing to compare: {what}"
    torch.testing.assert_close(actual, expected, **TOLERANCES[dtype], check_dtype=False, msg=lambda m: f"{what}: {m}")
