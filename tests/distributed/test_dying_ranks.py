"""A rank that dies ends the others at once and its error is shown; a launcher that dies ends its ranks."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from composer_speedups.train.checkpoints.saver import checkpoints_in
from tests.conftest import ROOT
from tests.helpers.hangs import HANGS, wait_until

pytestmark = pytest.mark.long
LAUNCHERS = {
    "composer": ["composer.cli.launcher", "-n", "2"],
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}
CHECKPOINTS = Path("runs/quickstart/checkpoints")
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


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_and_their_workers_end_with_a_killed_launcher(launcher: str) -> None:
    endless = ["trainer.max_duration=100000ba", "trainer.eval_interval=100000ba", "checkpoint.interval=5ba"]
    settings = [*JOB, *endless, "checkpoint.keep=-1", "data.workers=1", "data.persistent_workers=true"]
    command = [sys.executable, "-m", *LAUNCHERS[launcher], str(ROOT / "train.py"), *settings]
    with open("said", "w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
    wait_until(lambda: checkpoints_in(CHECKPOINTS) or process.poll() is not None, "no checkpoint is written")
    written = checkpoints_in(CHECKPOINTS)
    ranks = psutil.Process(process.pid).children(recursive=True)
    try:
        assert written, Path("said").read_text()
        assert len(ranks) >= 4, "two ranks, and a worker of each"
        process.kill()
        process.wait()
        _, left = psutil.wait_procs(ranks, timeout=HANGS)
        assert left == []
    finally:
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
    assert f"train.py: the launcher (process {process.pid}) ended before its ranks" in Path("said").read_text()
    newest = checkpoints_in(CHECKPOINTS)[0]
    batch = int(re.search(r"ba(\d+)", newest.name)[1])
    assert f"train.py: stopped by SIGTERM after batch {batch}, with a checkpoint" in Path("said").read_text()
