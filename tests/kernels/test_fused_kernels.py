"""The Triton kernels of fused_layers compared with plain PyTorch: in Triton's interpreter on the CPU, and on a GPU."""

from __future__ import annotations

import pytest

from tests.helpers.triton_programs import compiled, interpreted

PROGRAM = "tests.reference.fused_kernels"
COMPARISONS = 241


def test_interpreted_kernels_match_pytorch() -> None:
    output = interpreted(PROGRAM)
    assert output.count(" agrees") == COMPARISONS
    assert output.count("slopes equal the gradients' norms") == 4
    assert "masks are independent" in output


@pytest.mark.gpu
def test_compiled_kernels_match_pytorch() -> None:
    output = compiled(PROGRAM)
    assert output.count(" agrees") == COMPARISONS
    assert "masks are independent" in output
