"""Workers that are slow, hang or die, and how long their DataLoader waits for them."""

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


class Slow(Dataset[int]):
    """Row ``i`` is ``i``; row ``at`` takes ``seconds``."""

    def __init__(self, at: int, seconds: float) -> None:
        self.at, self.seconds = at, seconds

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> int:
        if i == self.at:
            time.sleep(self.seconds)
        return i


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(worker_timeout, "_LOOK", 0.2)
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)  # to join a worker that hangs
    yield
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_slow_workers_are_waited_for(workers: dict[str, Any]) -> None:
    loader = WorkerTimeoutLoader(Slow(3, 0.7 if workers else 0), worker_timeout=60, batch_size=2, **workers)
    expected = list(DataLoader(Slow(0, 0), batch_size=2))
    for _ in range(2):
        torch.testing.assert_close(list(loader), expected)


def test_a_worker_that_hangs_is_not() -> None:
    # A busy machine has started the worker within three seconds.
    batches = iter(WorkerTimeoutLoader(Slow(1, 1000), worker_timeout=3, num_workers=1))
    assert int(next(batches)) == 0
    began = time.monotonic()
    with pytest.raises(RunFailedError, match=r"^data\.worker_timeout: no batch arrived from the workers for 3 s; "):
        next(batches)
    assert 2.5 < time.monotonic() - began < 30


def test_a_worker_that_died_unheard_is_noticed_long_before() -> None:
    batches = iter(WorkerTimeoutLoader(Slow(1, 1000), worker_timeout=1000, num_workers=1))
    assert int(next(batches)) == 0
    heard = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # as before torch knows the worker
    try:
        for child in multiprocessing.active_children():
            child.kill()
        with pytest.raises(RuntimeError, match="exited unexpectedly"):
            next(batches)
    finally:
        signal.signal(signal.SIGCHLD, heard)
