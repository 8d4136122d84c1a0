"""WorkerTimeoutLoader with workers that are slow, hang or die."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from composer_speedups.core.errors import RunFailedError
from composer_speedups.data import worker_timeout
from composer_speedups.data.worker_timeout import WorkerTimeoutLoader
from tests.helpers.hangs import HANGS


class Slow(Dataset[int]):
    """Dataset whose row ``i`` is ``i``; loading row ``at`` takes ``seconds``."""

    def __init__(self, at: int, seconds: float) -> None:
        self.at, self.seconds = at, seconds

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> int:
        if i == self.at:
            time.sleep(self.seconds)
        return i


@pytest.fixture(autouse=True)
def _polls_often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(worker_timeout, "POLL_SECONDS", 0.2)
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)  # to join a worker that hangs
    yield
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_the_loader_waits_for_slow_workers(workers: dict[str, Any]) -> None:
    loader = WorkerTimeoutLoader(Slow(3, 0.7 if workers else 0), worker_timeout=HANGS, batch_size=2, **workers)
    expected = list(DataLoader(Slow(0, 0), batch_size=2))
    for _ in range(2):
        torch.testing.assert_close(list(loader), expected)


def test_a_hanging_worker_raises_after_the_timeout() -> None:
    for seconds in (3, 30, 300):  # a busy machine may not start the worker within the first of them
        batches = iter(WorkerTimeoutLoader(Slow(1, HANGS), worker_timeout=seconds, num_workers=1))
        try:
            assert int(next(batches)) == 0
            break
        except RunFailedError:
            continue
    began = time.monotonic()
    line = rf"^data\.worker_timeout: no batch arrived from the workers for {seconds} s; "
    with pytest.raises(RunFailedError, match=line):
        next(batches)
    assert time.monotonic() - began > seconds - 0.5


def test_a_killed_worker_raises_before_the_timeout() -> None:
    batches = iter(WorkerTimeoutLoader(Slow(1, 1000), worker_timeout=1000, num_workers=1))
    assert int(next(batches)) == 0
    heard = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler does not report the worker
    try:
        for child in multiprocessing.active_children():
            child.kill()
        with pytest.raises(RuntimeError, match="exited unexpectedly"):
            next(batches)
    finally:
        signal.signal(signal.SIGCHLD, heard)
