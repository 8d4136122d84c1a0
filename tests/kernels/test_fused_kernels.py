"""The Triton kernels of fused_layers against plain PyTorch: by Triton's interpreter on the CPU, and on a GPU."""

from __future__ import annotations

import pytest

from tests.helpers.triton_programs import compiled, interpreted

PROGRAM = "tests.reference.fused_kernels"
COMPARISONS = 221


def test_the_kernels_compute_what_pytorch_computes() -> None:
    output = interpreted(PROGRAM)
    assert output.count(" agrees") == COMPARISONS
    assert output.count("slopes and the gradients' norms are the same") == 4
    assert "masks are independent" in output


@pytest.mark.gpu
def test_the_compiled_kernels_compute_what_pytorch_computes() -> None:
    output = compiled(PROGRAM)
    assert output.count(" agrees") == COMPARISONS
    assert "masks are independent" in output
