"""The Triton kernels of DeBERTa's attention against plain PyTorch: by Triton's interpreter on the CPU, and on a GPU."""

from __future__ import annotations

import pytest

from tests.helpers.triton_programs import compiled, interpreted

PROGRAM = "tests.reference.disentangled_kernels"
COMPARISONS = 40


def test_the_kernels_compute_what_pytorch_computes() -> None:
    assert interpreted(PROGRAM).count(" agrees") == COMPARISONS


@pytest.mark.gpu
def test_the_compiled_kernels_compute_what_pytorch_computes() -> None:
    assert compiled(PROGRAM).count(" agrees") == COMPARISONS
