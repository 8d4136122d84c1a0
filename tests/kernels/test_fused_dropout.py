"""Dropout of the Triton layer and embeddings, each mask read: by Triton's interpreter on the CPU, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

TENSORS = 18  # a layer's result, and the gradients of its input and of 16 parameters


def _run(environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.reference.fused_dropout"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_backward_pass_drops_what_the_forward_pass_drops() -> None:
    pytest.importorskip("triton", reason="Triton comes with torch on Linux only")
    output = _run({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert output.count(" agrees") == TENSORS
    assert output.count("of the gradient's norm") == 2  # a layer's, and the embeddings'


@pytest.mark.gpu
def test_compiled_the_backward_pass_drops_what_the_forward_pass_drops() -> None:
    """All dropout sites together and each alone; slopes at rates (attention/others) of 0.5/0, 0/0.5 and 0.3/0.3."""
    output = _run({"TRITON_INTERPRET": "0"})
    assert output.count(" agrees") == 4 * TENSORS
    assert output.count("of the gradient's norm") == 4
