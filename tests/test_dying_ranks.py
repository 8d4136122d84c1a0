"""A rank that dies ends the others within seconds, with its error shown and an exit status other than 0."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.long
LAUNCHERS = {
    "composer": ["composer.cli.launcher", "-n", "2"],
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}
JOB = [
    "-f",
    str(ROOT / "yamls" / "quickstart.yaml"),
    "data.train_samples=480",
    "data.eval_samples=16",
    "data.batch_size=8",
    "data.eval_batch_size=8",
    "data.vocab_size=400",
    "trainer.progress_bar=false",
    "trainer.device=cpu",
]


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("how", ["raise", "refuse", "kill"])
def test_the_others_end_and_the_error_is_shown(launcher: str, rank: str, how: str) -> None:
    command = [sys.executable, "-m", *LAUNCHERS[launcher], "-m", "tests.reference.dying", *JOB]
    environment = {**os.environ, "DYING_RANK": rank, "DYING_HOW": how, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    ended, said = time.time(), done.stdout + done.stderr
    assert done.returncode != 0
    died = re.search(r"dying at (\S+)", said)
    if died is not None:  # Composer's launcher keeps what a killed rank other than 0 had said to itself
        assert ended - float(died[1]) < 40
    assert ("the rank's own words" if how != "kill" else "-9") in said
