"""Guards of a run across interruptions: signals, resumes, explicit checkpoints, and guard state in checkpoints."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.core import State

from composer_speedups.core.errors import ConfigError, Interrupted, RunFailedError
from composer_speedups.tasks.models import FinetuneModel
from composer_speedups.train.checkpoints import checkpoints_in
from composer_speedups.train.report import StartupTimes
from tests.helpers.jobs import run
from tests.train.test_autoresume import JOB, crash_after

CHECKPOINTS = Path("runs/job/checkpoints")
NAMED = [*JOB, "checkpoint.interval=3ba", "checkpoint.keep=1"]


@contextlib.contextmanager
def at_batch_end(monkeypatch: pytest.MonkeyPatch, acts: dict[int, Callable[[State], Any]]) -> Iterator[None]:
    """Within the context, call ``acts[n]`` after n trained batches, before a checkpoint is saved."""

    def batch_end(_: Any, state: State, logger: Any) -> None:
        if act := acts.get(state.timestamp.batch.value):
            act(state)

    with monkeypatch.context() as patch:
        patch.setattr(StartupTimes, "batch_end", batch_end)
        yield


def stop(_: State) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def names() -> list[str]:
    return [path.name for path in checkpoints_in(CHECKPOINTS)]


def test_a_signal_does_not_save_nan_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil_and_stop(state: State) -> None:
        with torch.no_grad():
            next(state.model.parameters()).fill_(float("nan"))
        stop(state)

    with (
        at_batch_end(monkeypatch, {5: spoil_and_stop}),
        pytest.raises(RunFailedError, match="which is not written") as told,
    ):
        run(*NAMED)
    assert "resume from runs/job/checkpoints/ep0-ba3-rank0.pt with checkpoint.weights_only=true" in str(told.value)
    assert names() == ["ep0-ba3-rank0.pt"]
    assert run(*NAMED)["training"]["batches"] == 8


@pytest.mark.exhaustive
def test_a_signal_does_not_save_diverged_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = "callbacks.divergence={smoothing: 0.0, margin: 0.0, factor: 1.0}"
    plain, climb = FinetuneModel.loss, {"by": 0.0}
    monkeypatch.setattr(FinetuneModel, "loss", lambda self, *given: plain(self, *given) + climb["by"])
    acts = {4: lambda _: climb.update(by=5.0), 5: stop}
    with at_batch_end(monkeypatch, acts), pytest.raises(Interrupted) as stopped:
        run(*NAMED, guard)
    assert stopped.value.code == 143
    resumes = (
        r"after batch 5, without a checkpoint, since the loss had climbed; .* runs/job/checkpoints/ep0-ba3-rank0.pt$"
    )
    assert re.search(resumes, str(stopped.value))
    assert names() == ["ep0-ba3-rank0.pt"]


@pytest.mark.exhaustive
def test_another_learning_rate_needs_weights_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with crash_after(5, monkeypatch):
        run(*JOB)
    given = ["checkpoint.load=runs/job/checkpoints/ep0-ba4-rank0.pt", "run_name=other", "export=false"]
    trusted = "checkpoint.trust_checkpoint=true"
    brief = ["trainer.max_duration=6ba", "trainer.eval_batches=1"]
    with pytest.raises(ConfigError, match=r"^optimizer\.lr: the checkpoint continues with 0\.001 instead of 1e-05; "):
        run(*given, trusted, *brief, "optimizer.lr=1e-5")
    assert run(*given, trusted, *brief)["training"]["batches"] == 6
    assert run(*given, *brief, "optimizer.lr=1e-5", "checkpoint.weights_only=true")["training"]["batches"] == 6


@pytest.mark.exhaustive
def test_a_run_resumes_after_its_initial_checkpoint_was_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    with crash_after(5, monkeypatch):
        run(*NAMED)
    again = [*NAMED, f"checkpoint.load={CHECKPOINTS}/ep0-ba3-rank0.pt"]
    with crash_after(7, monkeypatch):
        run(*again)
    assert names() == ["ep1-ba6-rank0.pt"]
    assert run(*again)["resumed"][-1] == {"batch": 6, "checkpoint": "ep1-ba6-rank0.pt"}
    with pytest.raises(ConfigError, match=r"^checkpoint\.load is not a file: .*ep0-ba3-rank0\.pt"):
        run(*again, "run_name=new")


def test_resuming_keeps_a_halved_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, seen = FinetuneModel.forward, list[int]()

    def small_until_saved(self: FinetuneModel, batch: Any) -> Any:
        if self.training:
            seen.append(len(batch["labels"]))
            if len(batch["labels"]) > 4 and small:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return plain(self, batch)

    small = True
    monkeypatch.setattr(FinetuneModel, "forward", small_until_saved)
    with pytest.warns(UserWarning, match="continuing with 4"), crash_after(5, monkeypatch):
        run(*JOB)
    small = False
    seen.clear()
    training = run(*JOB)["training"]
    assert set(seen) == {4}
    assert (training["microbatch_size"], training["microbatch_chosen"]) == (4, "after running out of memory")
    assert training["microbatch_changes"] == [{"batch": 0, "from": 8, "to": 4}]
