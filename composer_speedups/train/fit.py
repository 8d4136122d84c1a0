"""Training from start to end, whatever ends it: signals, dead workers, a lack of memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from composer import Trainer
from composer.devices import Device
from composer.utils import dist
from torch.utils.data import dataloader

from composer_speedups.core.errors import Interrupted, RunFailedError, UserError, first_line
from composer_speedups.core.trainer_state import max_over_ranks

__all__ = [
    "StopSignals",
    "end_evaluation_workers",
    "failed_run",
    "train_to_end",
]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SIZES = ("trainer.microbatch_size: ", "data.batch_size: ")
_WORKER_FIX = "look for the kernel's out-of-memory killer, lower data.workers, or start again"


class StopSignals:
    """Notes SIGTERM and SIGINT inside a ``with`` block, for training to end after a whole batch.

    Before training, and in a run without checkpoints, they end the process at once. After training, they are ignored:
    the report takes a moment. A second Ctrl-C always ends the process at once. Composer's launcher passes a Ctrl-C on
    as a SIGTERM too, which therefore is no second one.

    With several ranks, all stop after the same batch once one of them got a signal.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._phase = "at once"
        self._interrupts = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            self._before = {signum: signal.signal(signum, self._note) for signum in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}

    def defer(self) -> None:
        """From now on, wait for the end of the batch."""
        self._phase = "after the batch"

    def at_once(self) -> None:
        """Training has failed: there is no end of the batch to wait for."""
        self._phase = "at once"

    def ignore(self) -> None:
        """Training is over."""
        self._phase = "never"

    def agreed(self, device: Device) -> int | None:
        """The signal that any rank received so far; every rank must call. ``device`` is where ranks talk."""
        return max_over_ranks(device, self.received or 0) or None

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._interrupts += signum == signal.SIGINT
        if self._interrupts > 1:
            os._exit(128 + signum)
        if self._phase == "at once":
            sys.exit(128 + signum)
        self.received = self.received or signum
        name = signal.Signals(signum).name
        if dist.get_global_rank() == 0 and self._phase == "after the batch":
            # not print: the signal may have come in the middle of one
            os.write(
                2, f"\n{name}: finishing the batch and writing a checkpoint; Ctrl-C (again) stops at once\n".encode()
            )


def train_to_end(trainer: Trainer, stop: StopSignals | None = None) -> None:
    """``trainer.fit()``, also where a resumed run has nothing left to train, of which Composer makes an error.

    Raises:
        RunFailedError: See :func:`failed_run`.
        Interrupted: A signal ended it; the loggers have written what they had.
    """
    state = trainer.state
    assert state.max_duration is not None
    with warnings.catch_warnings():
        # From a checkpoint of an epoch's last batch, Composer goes through the rest of that epoch: no batch at all.
        warnings.filterwarnings("ignore", message="No batches were trained for global rank")
        warnings.filterwarnings("ignore", message="Cannot split .* of length")  # a batch below the micro-batch's size
        warnings.filterwarnings("ignore", message="The ``compute`` method of metric .* was called before")
        try:
            with failed_run(trainer, stop):
                trainer.fit(duration=None if state.timestamp < state.max_duration else "1ba")  # RunHistory stops it
        except Interrupted:
            end_evaluation_workers(trainer)
            trainer.close()
            raise
    end_evaluation_workers(trainer)


def end_evaluation_workers(trainer: Trainer) -> None:
    """End the persistent workers of evaluation loaders. Composer ends those of the training loader only.

    With pinned memory torch would otherwise wait five seconds for each of them when the process ends.
    """
    for evaluator in trainer.state.evaluators:
        iterator = getattr(evaluator.dataloader.dataloader, "_iterator", None)
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()


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
        if (fix := str(error).strip().splitlines()[-1:]) and fix[0].startswith(_SIZES):
            return f"{fix[0]} ({said})"  # of MicrobatchTrainer, which knows what would fit
        return f"out of memory: {said}; lower data.batch_size, data.max_length or trainer.microbatch_size"
    return None


def _from_dataloader(error: Exception) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_filename == dataloader.__file__ for frame, _ in frames)
