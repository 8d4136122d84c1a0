"""Run training until it ends, fails or is stopped: signals, dead workers, out of memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from types import FrameType
from typing import Any

import torch
from composer import Trainer
from composer.core import State
from composer.devices import Device
from composer.utils import dist

from composer_speedups.core.errors import DataError, Interrupted, Refusal, RunFailedError, causes_of, first_line
from composer_speedups.core.trainer_state import max_over_ranks

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SIZE_KEYS = ("trainer.microbatch_size: ", "data.batch_size: ")
_WORKER_FIX = "look for the kernel's out-of-memory killer, lower data.workers, or start again"


class StopSignals:
    """Records SIGTERM and SIGINT inside a ``with`` block, so that training ends after a complete batch.

    Before training, and in a run without checkpoints, signals end the process immediately. After training they are
    ignored, because writing the report takes only a moment. A second Ctrl-C always ends the process immediately.
    Composer's launcher forwards a Ctrl-C as a SIGTERM as well, which does not count as a second one.

    With several ranks, all of them stop after the same batch once one of them has received a signal.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._phase = "at once"
        self._interrupts = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
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
        """From now on, end immediately: training has failed, and the batch will not end."""
        self._phase = "at once"

    def ignore(self) -> None:
        """From now on, ignore signals: training is over."""
        self._phase = "never"

    def signal_on_any_rank(self, device: Device) -> int | None:
        """The signal that any rank has received so far. Collective; ``device`` is used for the reduction."""
        return max_over_ranks(device, self.received or 0) or None

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._interrupts += signum == signal.SIGINT
        if self._interrupts > 1:
            os._exit(128 + signum)
        name = signal.Signals(signum).name
        if self._phase == "at once":
            if dist.get_global_rank() == 0:
                os.write(2, f"\n{name}: stopped at once; no checkpoint was written\n".encode())
            sys.exit(128 + signum)
        self.received = self.received or signum
        if dist.get_global_rank() == 0 and self._phase == "after the batch":
            # not print, which the signal may have interrupted
            os.write(
                2, f"\n{name}: finishing the batch and writing a checkpoint; Ctrl-C (again) stops at once\n".encode()
            )


def train_to_end(trainer: Trainer, stop: StopSignals | None = None) -> None:
    """``trainer.fit()``, also for a resumed run with nothing left to train, which is an error in Composer.

    Raises:
        DataError, RunFailedError: See :func:`fit`.
        Interrupted: A signal ended training; the loggers have been flushed.
    """
    state = trainer.state
    assert state.max_duration is not None
    with warnings.catch_warnings():
        # Resuming from a checkpoint of an epoch's last batch, Composer iterates over the rest of that epoch, which is
        # empty.
        warnings.filterwarnings("ignore", message="No batches were trained for global rank")
        warnings.filterwarnings("ignore", message="Cannot split .* of length")  # a batch smaller than the micro-batch
        warnings.filterwarnings("ignore", message="The ``compute`` method of metric .* was called before")
        try:
            fit(trainer, None if state.timestamp < state.max_duration else "1ba", stop)  # RunHistory raises Interrupted
        except Interrupted:
            _end_evaluation_workers(trainer)
            trainer.close()
            raise
    _end_evaluation_workers(trainer)


def is_trained(state: State) -> bool:
    """Whether all batches were trained."""
    return state.max_duration is not None and bool(state.timestamp >= state.max_duration)


def _end_evaluation_workers(trainer: Trainer) -> None:
    """End the persistent workers of evaluation loaders. Composer ends only those of the training loader.

    With pinned memory, torch would otherwise wait five seconds for each of them at exit.
    """
    for evaluator in trainer.state.evaluators:
        iterator = getattr(evaluator.dataloader.dataloader, "_iterator", None)
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()


def fit(trainer: Trainer, duration: str | None = None, stop: StopSignals | None = None) -> None:
    """``trainer.fit(duration)``; if it raises, close the callbacks and loggers without waiting for other ranks.

    From then on, signals to ``stop`` end the process immediately, even if a logger blocks.

    Raises:
        RunFailedError: Replaces torch's error if a data worker died or memory ran out. Other errors are passed on.
        DataError: Raised by a data worker, without the worker's traceback.
    """
    try:
        try:
            trainer.fit(duration=duration)
        except BaseException:
            _restore_sigchld()
            raise
    except (EOFError, MemoryError, OSError, RuntimeError, Refusal) as error:
        _restore_sigchld()  # torch's handler may have raised in the first call
        for worker in multiprocessing.active_children():
            worker.kill()  # a worker that hangs would outlive the run
        if stop is not None:
            stop.at_once()
        trainer.engine.close()  # Trainer.close() would wait for ranks that may have died
        if (explained := _explained(error)) is not None:
            raise explained from error
        raise


def _restore_sigchld() -> None:
    """Disable torch's handler, which raises in any line of the main thread when a worker dies."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _explained(error: Exception) -> Refusal | None:
    message = first_line(error).rstrip(". ")
    worker_message = str(error).rpartition(f"{DataError.__module__}.{DataError.__name__}: ")[2]
    if isinstance(error, DataError) and worker_message != str(error):  # torch embeds it in the worker's traceback
        return DataError(worker_message)
    if (death := next(filter(None, map(_worker_death, causes_of(error))), None)) is not None:
        return RunFailedError(f"data.workers: {death}; {_WORKER_FIX}")
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in message:
        if (fix := str(error).strip().splitlines()[-1:]) and fix[0].startswith(_SIZE_KEYS):
            return RunFailedError(f"{fix[0]} ({message})")  # MicrobatchTrainer's message names a size that fits
        return RunFailedError(
            f"out of memory: {message}; lower data.batch_size, data.max_length or trainer.microbatch_size"
        )
    return None


def _worker_death(error: BaseException) -> str | None:
    """What an error says of a DataLoader worker that died; None for another error."""
    message = first_line(error).rstrip(". ")
    if message.startswith("DataLoader worker"):  # raised by torch, by the signal handler or by the worker's queue
        return message
    # it died while it transferred a batch, which only this thread or the one that pins memory notices
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    receiving = os.path.dirname(frames[-1].f_code.co_filename) == os.path.dirname(multiprocessing.__file__)
    if (isinstance(error, (EOFError, ConnectionError)) and receiving) or message.startswith("Pin memory thread"):
        return f"a DataLoader worker died ({message})"
    return None
