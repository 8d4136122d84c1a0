"""Dropout of the Triton layer and embeddings, each mask read: by Triton's interpreter on the CPU, and on a GPU."""

from __future__ import annotations

import pytest

from tests.helpers.triton_programs import compiled, interpreted

PROGRAM = "tests.reference.fused_dropout"
TENSORS = 18  # a layer's result, and the gradients of its input and of 16 parameters


def test_the_backward_pass_drops_what_the_forward_pass_drops() -> None:
    output = interpreted(PROGRAM)
    assert output.count(" agrees") == TENSORS
    assert output.count("of the gradient's norm") == 2  # a layer's, and the embeddings'


@pytest.mark.gpu
def test_compiled_the_backward_pass_drops_what_the_forward_pass_drops() -> None:
    """All dropout sites together and each alone; slopes at rates (attention/others) of 0.5/0, 0/0.5 and 0.3/0.3."""
    output = compiled(PROGRAM)
    assert output.count(" agrees") == 4 * TENSORS
    assert output.count("of the gradient's norm") == 4
