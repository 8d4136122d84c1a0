"""The Triton kernels compared with plain PyTorch: in Triton's interpreter on the CPU, and compiled on a GPU.

The programs under tests/reference print a line for each comparison and stop at the first that fails.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from composer_speedups.kernels.float8 import targets_of
from tests.conftest import ROOT
from tests.helpers.exhaustive import others_exhaustive
from tests.helpers.hangs import HANGS

# Program → lines of its output by what they hold: interpreted, and compiled where it differs.
PROGRAMS = {
    "positional_kernels": ({" agrees": 121, "slopes equal the gradients' norms": 1}, {}),
    # On a GPU, the layer that drops is compared with each site alone, too: a result and 17 gradients.
    "fused_kernels": (
        {" agrees": 286, "slopes equal the gradients' norms": 4, "masks are independent": 1},
        {" agrees": 286 + 3 * 18},
    ),
    "adapters": ({" agrees": 241}, {}),
    "kernels_at_one_shape": ({" agrees": 182}, {}),
}


@pytest.mark.parametrize(
    ("program", "interpret"),
    [
        *others_exhaustive(((name, True) for name in PROGRAMS), ("kernels_at_one_shape", True).__eq__),
        *(pytest.param(name, False, marks=pytest.mark.gpu) for name in PROGRAMS if name != "kernels_at_one_shape"),
    ],
)
def test_kernels_match_pytorch(program: str, interpret: bool) -> None:
    """In a process of its own, since Triton reads TRITON_INTERPRET when kernels are defined."""
    pytest.importorskip("triton", reason="Triton comes with torch on Linux only")
    environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if interpret else {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "ignore", "-m", f"tests.reference.{program}"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=HANGS
    )
    assert done.returncode == 0, done.stderr[-3000:]
    interpreted, compiled = PROGRAMS[program]
    counts = interpreted if interpret else interpreted | compiled
    assert {text: done.stdout.count(text) for text in counts} == counts, "a comparison is missing"


def test_a_new_scale_leaves_room_below_the_largest_number_and_lasts_until_values_are_small() -> None:
    assert targets_of(torch.float8_e4m3fn) == (448, 224, 14)
    assert targets_of(torch.float8_e5m2) == (57344, 3584, 14)
