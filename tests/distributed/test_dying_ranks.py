"""A rank that dies ends the others at once and its error is shown."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.helpers.hangs import HANGS

pytestmark = pytest.mark.long
LAUNCHERS = {
    "composer": ["composer.cli.launcher", "-n", "2"],
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}
JOB = [
    "-f",
    str(ROOT / "yamls" / "quickstart.yaml"),
    "baseline=null",
    "data.train_samples=480",
    "data.eval_samples=16",
    "data.batch_size=8",
    "data.eval_batch_size=8",
    "data.vocab_size=400",
    "trainer.progress_bar=false",
    "trainer.device=cpu",
    "trainer.dist_timeout=86400",  # the others do not wait for it: they are ended
]


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("how", ["raise", "refuse", "kill"])
def test_the_other_ranks_end_and_the_error_is_shown(launcher: str, rank: str, how: str) -> None:
    command = [sys.executable, "-m", *LAUNCHERS[launcher], "-m", "tests.reference.dying", *JOB]
    environment = {**os.environ, "DYING_RANK": rank, "DYING_HOW": how, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=HANGS)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert ("the rank's own words" if how != "kill" else "-9") in said
