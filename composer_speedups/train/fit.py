"""Run training until it ends, fails or is stopped: signals, dead workers, out of memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from types import FrameType
from typing import Any, Literal

import torch
from composer import Trainer
from composer.core import State
from composer.devices import Device
from composer.utils import dist

from composer_speedups.core.errors import DataError, Interrupted, Refusal, RunFailedError, causes_of, first_line
from composer_speedups.core.trainer_state import max_over_ranks

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_IGNORED_WARNINGS = (
    "No batches were trained for global rank",  # after resuming from a checkpoint of an epoch's last batch
    "Cannot split .* of length",  # a batch smaller than the micro-batch
    "The ``compute`` method of metric .* was called before",
)
_WORKER_FIX = "look for the kernel's out-of-memory killer, lower data.workers, or start again"


class StopSignals:
    """Records SIGTERM and SIGINT inside a ``with`` block, so that training ends after a complete batch, on all ranks.
    A second Ctrl-C ends the process."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.phase: Literal["at once", "after the batch", "never"] = "at once"
        self._interrupts = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._before = {signum: signal.signal(signum, self._note) for signum in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}

    def signal_on_any_rank(self, device: Device) -> int | None:
        """The signal that any rank has received so far. Collective; ``device`` is used for the reduction."""
        return max_over_ranks(device, self.received or 0) or None

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._interrupts += signum == signal.SIGINT  # Composer's launcher forwards each as a SIGTERM as well
        if self._interrupts > 1:
            os._exit(128 + signum)
        name = signal.Signals(signum).name
        if self.phase == "at once":
            if dist.get_global_rank() == 0:
                os.write(2, f"\n{name}: stopped at once; no checkpoint was written\n".encode())
            sys.exit(128 + signum)
        self.received = self.received or signum
        if dist.get_global_rank() == 0 and self.phase == "after the batch":
            later = "finishing the batch and writing a checkpoint; Ctrl-C (again) stops at once"
            os.write(2, f"\n{name}: {later}\n".encode())  # not print, which the signal may have interrupted


def train_to_end(trainer: Trainer, stop: StopSignals | None = None) -> None:
    """``trainer.fit()``, also for a resumed run with nothing left to train, which is an error in Composer."""
    with warnings.catch_warnings():
        for message in _IGNORED_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        try:
            fit(trainer, "1ba" if is_trained(trainer.state) else None, stop)  # RunHistory raises Interrupted
        except Interrupted:
            _end_evaluation_workers(trainer)
            trainer.close()
            raise
    _end_evaluation_workers(trainer)


def is_trained(state: State) -> bool:
    return state.max_duration is not None and bool(state.timestamp >= state.max_duration)


def _end_evaluation_workers(trainer: Trainer) -> None:
    """End persistent workers with pinned memory, for each of which torch would wait five seconds at exit."""
    for evaluator in trainer.state.evaluators:
        iterator = getattr(evaluator.dataloader.dataloader, "_iterator", None)
        if (shut_down := getattr(iterator, "_shutdown_workers", None)) is not None:
            shut_down()


def fit(trainer: Trainer, duration: str | None = None, stop: StopSignals | None = None) -> None:
    """``trainer.fit(duration)``; if it raises, close the callbacks and loggers without waiting for other ranks."""
    try:
        try:
            trainer.fit(duration=duration)
        except BaseException:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            raise
    except (EOFError, MemoryError, OSError, RuntimeError, Refusal) as error:
        # torch's handler, which raises in any line when a worker dies, may have done so in the first call
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for worker in multiprocessing.active_children():
            worker.kill()  # a worker that hangs would outlive the run
        if stop is not None:
            stop.phase = "at once"  # the batch will not end
        trainer.engine.close()  # Trainer.close() would wait for ranks that may have died
        if (explained := _explained(error)) is not None:
            raise explained from error
        raise


def _explained(error: Exception) -> Refusal | None:
    message = first_line(error).rstrip(". ")
    worker_message = str(error).rpartition(f"{DataError.__module__}.{DataError.__name__}: ")[2]
    if isinstance(error, DataError) and worker_message != str(error):  # torch embeds it in the worker's traceback
        return DataError(worker_message)
    if (worker_error := next(filter(_is_of_a_dead_worker, causes_of(error)), None)) is not None:
        reason = first_line(worker_error).rstrip(". ")
        return RunFailedError(f"data.workers: a DataLoader worker died ({reason}); {_WORKER_FIX}")
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in message:
        if (fix := str(error).strip().splitlines()[-1:]) and fix[0].startswith("trainer.microbatch_size: "):
            return RunFailedError(f"{fix[0]} ({message})")  # MicrobatchTrainer's message names a size that fits
        return RunFailedError(
            f"out of memory: {message}; lower data.batch_size, data.max_length or trainer.microbatch_size"
        )
    return None


def _is_of_a_dead_worker(error: BaseException) -> bool:
    """Whether a worker died: torch reports it, or the worker's connection closed while it sent a batch."""
    if isinstance(error, (EOFError, ConnectionError)):
        frames = traceback.extract_tb(error.__traceback__)
        return bool(frames) and frames[-1].filename.startswith(multiprocessing.__path__[0])
    return str(error).startswith(("DataLoader worker", "Pin memory thread"))
