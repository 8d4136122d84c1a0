"""What ends a run on its way, in one line: what was logged so far is kept, and nothing else is waited for."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import traceback
from collections.abc import Iterator

import torch
from composer import Trainer
from torch.utils.data import dataloader

from composer_speedups.core.errors import RunFailedError, UserError, first_line
from composer_speedups.train.interrupt import StopSignals

__all__ = ["failed_run"]

_WORKER_FIX = "look for the kernel's out-of-memory killer, lower data.workers, or start again"


@contextlib.contextmanager
def failed_run(trainer: Trainer, stop: StopSignals | None = None) -> Iterator[None]:
    """Around ``trainer.fit()``: when it raises, the Trainer's callbacks and loggers are closed, other ranks or not.

    Signals to ``stop`` then end the process at once, whatever a logger waits for.

    Raises:
        RunFailedError: In place of torch's error, where a data worker died or memory ran out. Other errors are
            themselves.
    """
    try:
        yield
    except (EOFError, MemoryError, OSError, RuntimeError, UserError) as error:
        _hear_no_more_of_workers()
        for worker in multiprocessing.active_children():
            worker.kill()  # one that hangs would outlive the run
        if stop is not None:
            stop.at_once()
        trainer.engine.close()  # Trainer.close() would wait for ranks that may be gone
        if (line := _explained(error)) is not None:
            raise RunFailedError(line) from error
        raise


def _hear_no_more_of_workers() -> None:
    """torch's handler raises at whatever line is running when a worker ends, and one death may be told twice."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _explained(error: Exception) -> str | None:
    said = first_line(error).rstrip(". ")
    if said.startswith("DataLoader worker"):  # torch's, from the signal of a child's death or from its queue
        return f"data.workers: {said}; {_WORKER_FIX}"
    if isinstance(error, (EOFError, ConnectionError)) and _from_dataloader(error):  # while it handed a batch over
        return f"data.workers: a DataLoader worker died ({said}); {_WORKER_FIX}"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in said:
        if (fix := str(error).strip().splitlines()[-1:]) and fix[0].startswith("trainer.microbatch_size: "):
            return f"{fix[0]} ({said})"  # of MicrobatchTrainer, which knows what would fit
        return f"out of memory: {said}; lower data.batch_size, data.max_length or trainer.microbatch_size"
    return None


def _from_dataloader(error: Exception) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_filename == dataloader.__file__ for frame, _ in frames)
