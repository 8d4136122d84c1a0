"""A DataLoader that does not wait for ever for workers that hang."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from composer_speedups.core.errors import DataError, RunFailedError

__all__ = ["WorkerTimeoutLoader"]

_LOOK = 5  # seconds; as often as torch does without a timeout


class WorkerTimeoutLoader(DataLoader[Any]):
    """A ``torch.utils.data.DataLoader`` whose workers have so long to give the next batch.

    With its own ``timeout`` torch looks whether the workers live only when that is over. Here it looks as often as
    without one. With ``num_workers=0`` nothing is different.

    Args:
        dataset, num_workers, settings: torch's, but for ``timeout``.
        worker_timeout: Seconds; those of one look more at most.

    Raises:
        RunFailedError: From the iterator, when no batch came in time.
        RuntimeError: Likewise, when a worker died; torch's.
        DataError: Likewise, with the worker's own message.
    """

    def __init__(self, dataset: Any, *, worker_timeout: float, num_workers: int = 0, **settings: Any) -> None:
        look = min(_LOOK, worker_timeout) if num_workers else 0
        super().__init__(dataset, num_workers=num_workers, timeout=look, **settings)
        self.worker_timeout = worker_timeout

    def __iter__(self) -> Any:
        batches = super().__iter__()
        return _Watched(batches, self.worker_timeout, self.timeout) if self.num_workers else batches


class _Watched(Iterator[Any]):
    def __init__(self, batches: Iterator[Any], timeout: float, look: float) -> None:
        self._batches, self._timeout, self._look = batches, timeout, look

    def __next__(self) -> Any:
        waited = 0.0
        while True:
            try:
                return next(self._batches)
            except DataError as error:  # torch puts the worker's traceback around the message
                raise DataError(str(error).rpartition(f"{DataError.__module__}.{DataError.__name__}: ")[2]) from error
            except RuntimeError as error:
                if not str(error).startswith("DataLoader timed out"):
                    raise
                waited += self._look  # the iterator can be asked again
                if waited >= self._timeout:
                    raise RunFailedError(
                        f"data.worker_timeout: no batch came from the workers for {waited:g} s; set data.workers=0, or "
                        "raise it where reading takes that long"
                    ) from error
