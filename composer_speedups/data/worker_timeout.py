"""A DataLoader with a timeout for hanging workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from composer_speedups.core.errors import DataError, RunFailedError

__all__ = ["WorkerTimeoutLoader"]

POLL_SECONDS = 5  # as often as torch checks without a timeout


class WorkerTimeoutLoader(DataLoader[Any]):
    """A ``torch.utils.data.DataLoader`` with a timeout for each batch from its workers.

    With its own ``timeout``, torch checks whether the workers are alive only when the timeout expires. This class
    checks as often as torch does without one. With ``num_workers=0`` it behaves as torch's.

    Args:
        dataset, num_workers, settings: Arguments of torch's class, except ``timeout``.
        worker_timeout: Seconds, exceeded by at most one check interval.

    Raises:
        RunFailedError: From the iterator, if no batch arrived in time.
        RuntimeError: From the iterator, if a worker died; raised by torch.
        DataError: From the iterator, with the worker's own message.
    """

    def __init__(self, dataset: Any, *, worker_timeout: float, num_workers: int = 0, **settings: Any) -> None:
        poll = min(POLL_SECONDS, worker_timeout) if num_workers else 0
        super().__init__(dataset, num_workers=num_workers, timeout=poll, **settings)
        self.worker_timeout = worker_timeout

    def __iter__(self) -> Any:
        batches = super().__iter__()
        return _Watched(batches, self.worker_timeout, self.timeout) if self.num_workers else batches


class _Watched(Iterator[Any]):
    def __init__(self, batches: Iterator[Any], timeout: float, poll: float) -> None:
        self._batches, self._timeout, self._poll = batches, timeout, poll

    def __next__(self) -> Any:
        waited = 0.0
        while True:
            try:
                return next(self._batches)
            except DataError as error:  # torch embeds the worker's message in a traceback
                raise DataError(str(error).rpartition(f"{DataError.__module__}.{DataError.__name__}: ")[2]) from error
            except RuntimeError as error:
                if not str(error).startswith("DataLoader timed out"):
                    raise
                waited += self._poll  # the iterator can be used again
                if waited >= self._timeout:
                    raise RunFailedError(
                        f"data.worker_timeout: no batch arrived from the workers for {waited:g} s; set data.workers=0, "
                        "or raise it if reading takes that long"
                    ) from error
