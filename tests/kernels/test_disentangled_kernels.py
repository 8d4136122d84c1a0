"""The Triton kernels of DeBERTa's attention against plain PyTorch: by Triton's interpreter on the CPU, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

PROGRAM = "tests.reference.disentangled_kernels"
COMPARISONS = 40


def _run(environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", PROGRAM],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_kernels_compute_what_pytorch_computes() -> None:
    pytest.importorskip("triton", reason="Triton comes with torch on Linux only")
    assert _run({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}).count(" agrees") == COMPARISONS


@pytest.mark.gpu
def test_the_compiled_kernels_compute_what_pytorch_computes() -> None:
    assert _run({"TRITON_INTERPRET": "0"}).count(" agrees") == COMPARISONS
