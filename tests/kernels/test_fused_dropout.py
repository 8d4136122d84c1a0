"""Dropout masks of the Triton layer and embeddings: in Triton's interpreter on the CPU, and on a GPU."""

from __future__ import annotations

import pytest

from tests.helpers.triton_programs import compiled, interpreted

PROGRAM = "tests.reference.fused_dropout"
TENSORS = 18  # a layer's result, and the gradients of its input and of 16 parameters


def test_interpreted_kernels_use_the_same_masks_in_both_passes() -> None:
    output = interpreted(PROGRAM)
    assert output.count(" agrees") == TENSORS
    assert output.count("of the gradient's norm") == 2  # one for a layer, one for the embeddings


@pytest.mark.gpu
def test_compiled_kernels_use_the_same_masks_in_both_passes() -> None:
    """Test all dropout sites together and each alone; slopes at rates (attention/others) of 0.5/0, 0/0.5, 0.3/0.3."""
    output = compiled(PROGRAM)
    assert output.count(" agrees") == 4 * TENSORS
    assert output.count("of the gradient's norm") == 4
