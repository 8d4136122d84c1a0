"""Programs that compare Triton kernels, each a process: Triton reads TRITON_INTERPRET when kernels are defined."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

__all__ = ["compiled", "interpreted"]


def interpreted(program: str) -> str:
    """The output of a module under ``tests.reference`` whose kernels run in Triton's interpreter, on the CPU."""
    pytest.importorskip("triton", reason="Triton comes with torch on Linux only")
    return _run(program, {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""})


def compiled(program: str) -> str:
    """Likewise, of kernels that are compiled for the GPU."""
    return _run(program, {"TRITON_INTERPRET": "0"})


def _run(program: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", program],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
