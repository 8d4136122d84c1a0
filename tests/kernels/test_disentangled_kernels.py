"""DeBERTa's Triton attention kernels compared with plain PyTorch: in Triton's interpreter on the CPU, and on a GPU."""

from __future__ import annotations

import pytest

from tests.helpers.triton_programs import compiled, interpreted

PROGRAM = "tests.reference.disentangled_kernels"
COMPARISONS = 40


def test_interpreted_kernels_match_pytorch() -> None:
    assert interpreted(PROGRAM).count(" agrees") == COMPARISONS


@pytest.mark.gpu
def test_compiled_kernels_match_pytorch() -> None:
    assert compiled(PROGRAM).count(" agrees") == COMPARISONS
