"""CPU threads of torch, frozen garbage, a Trainer of one's own on two ranks, and ranks that die."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import composer_speedups.train.trainer
from composer_speedups import FusedOptimizer, OffloadedOptimizer
from composer_speedups.distributed.cpu import _at_first, share_cores
from composer_speedups.train.config.schema import Config
from tests.conftest import ROOT
from tests.helpers.hangs import HANGS
from tests.helpers.jobs import run
from tests.helpers.ranks import on_ranks

TINY = ["--size", "tiny", "--samples", "64", "--batch-size", "4", "--max-length", "32", "--duration", "6ba"]


def example(*arguments: str) -> dict[str, Any] | None:
    """Run ``examples/own_trainer.py``; return the JSON of its last line, or None on ranks that print nothing."""
    sys.argv = ["own_trainer.py", *TINY, "--on-unavailable", "warn", *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(ROOT / "examples" / "own_trainer.py"), run_name="__main__")
    lines = printed.getvalue().strip().splitlines()
    return json.loads(lines[-1]) if lines else None


@pytest.mark.exhaustive
def test_the_example_trains_on_two_ranks() -> None:
    first, second = on_ranks(example)
    assert second is None
    assert (first["ranks"], first["batch_size_per_rank"], first["batches"]) == (2, 4, 6)
    assert first["samples_per_sec"] > 0
    assert first["loss"] == pytest.approx(0.69, abs=0.2)
    assert first["techniques"]["unpadding"]["engaged"]
    assert not first["techniques"]["cuda_graphs"]["engaged"], "there is no GPU"
    assert first["ddp"]["overlapped_steps"] == 4, "all but the first two"
    assert first["ddp"]["gradients_read_by"] is None
    plain, _ = on_ranks(lambda: example("--plain"))
    assert plain["ddp"] is None


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch use eight threads, as on a machine with eight cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    _at_first.cache_clear()
    yield
    torch.set_num_threads(before)
    _at_first.cache_clear()


@pytest.mark.usefixtures("cores")
def test_ranks_of_a_node_share_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for computes, ranks, threads in [(True, 1, 8), (True, 3, 2), (True, 9, 1), (False, 1, 1)]:
        monkeypatch.setattr("composer.utils.dist.get_local_world_size", lambda ranks=ranks: ranks)
        for _ in range(2):  # a second Trainer in the process does not divide again
            share_cores(computes=computes)
            assert torch.get_num_threads() == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    share_cores(computes=True)
    assert torch.get_num_threads() == 1, "the variable is respected"


@pytest.mark.parametrize(
    ("on", "technique", "computes"),
    [
        ("cpu", None, True),
        ("cuda", None, False),
        ("cuda", OffloadedOptimizer(), True),
        ("cuda", FusedOptimizer(), False),
    ],
)
def test_threads_are_shared_only_if_the_host_computes(
    on: str, technique: Any, computes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*, computes: bool, at_most: int | None) -> None:
        raise InterruptedError(computes)

    monkeypatch.setattr(composer_speedups.train.trainer, "share_cores", asked)
    config, device = Config(), SimpleNamespace(_device=torch.device(on))
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=768))
    parts: list[Any] = [config, model, None, [technique] if technique else [], device, None]
    with pytest.raises(InterruptedError, match=str(computes)):
        composer_speedups.train.trainer.build_trainer(*parts)


@pytest.mark.usefixtures("cores")
def test_a_cpu_run_uses_all_cores_two_ranks_share_them_and_a_small_model_uses_one() -> None:
    def threads(size: str) -> int:
        torch.set_num_threads(8)
        run("trainer.max_duration=1ba", "trainer.eval_batches=1", "data.batch_size=4", f"model.size={size}")
        return torch.get_num_threads()

    assert threads("mini") == 8
    assert threads("tiny") == 1
    assert on_ranks(partial(threads, "mini")) == [4, 4]


LAUNCHERS = {
    "composer": ["composer.cli.launcher", "-n", "2"],
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}
# The other ranks are ended before dist_timeout.
JOB = """
baseline=null data.train_samples=480 data.eval_samples=16 data.batch_size=8 data.eval_batch_size=8 data.vocab_size=400
trainer.progress_bar=false trainer.device=cpu trainer.dist_timeout=86400
""".split()


@pytest.mark.long
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("how", ["raise", "refuse", "kill"])
def test_the_other_ranks_end_and_the_error_is_shown(launcher: str, rank: str, how: str) -> None:
    command = [sys.executable, "-m", *LAUNCHERS[launcher], "-m", "tests.reference.dying", "-f", "quickstart", *JOB]
    environment = {**os.environ, "DYING_RANK": rank, "DYING_HOW": how, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=HANGS)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert ("the rank's own words" if how != "kill" else "-9") in said
