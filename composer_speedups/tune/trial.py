"""One trial: train.py in a process of its own, for some steps, and what its report says."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_speedups.train.config.load import save_config
from composer_speedups.train.config.schema import (
    CheckpointConfig,
    Config,
    LoggersConfig,
    MemoryConfig,
    ThroughputConfig,
)
from composer_speedups.train.failed_process import own_line, ran_out_of_memory, where
from composer_speedups.tune.outcomes import Algorithms, Outcome

__all__ = ["Trials", "outcome_of", "outcome_of_failure", "trial_config"]

TRAIN = (sys.executable, "-m", "composer_speedups.train")
_SAID = 300  # characters of a failed process's line
_LAST_WORDS = 2.0  # seconds for a process at its limit to say where it is


def trial_config(
    config: Config, algorithms: Algorithms, steps: int, folder: Path, batch_size: int | None = None
) -> Config:
    """The run cut down to ``steps`` steps, in ``folder``; what decides a step's time stays as it is.

    Composer evaluates at the end of every run: here one batch, no larger than a training batch.
    """
    batch_size = batch_size or config.data.batch_size
    return dataclasses.replace(
        config,
        algorithms=dict(algorithms),
        run_name="trial",
        runs_folder=str(folder),
        export=False,
        plot=False,
        data=dataclasses.replace(config.data, batch_size=batch_size, eval_batch_size=batch_size),
        scheduler=dataclasses.replace(config.scheduler, warmup="0.1dur"),
        trainer=dataclasses.replace(
            config.trainer,
            max_duration=f"{steps}ba",
            eval_interval=f"{steps}ba",
            eval_batches=1,
            progress_bar=False,
            on_out_of_memory="stop",  # a set that does not fit is left out, not measured in smaller pieces
        ),
        checkpoint=CheckpointConfig(),
        callbacks=dataclasses.replace(config.callbacks, throughput=ThroughputConfig(), memory=MemoryConfig()),
        loggers=LoggersConfig(),
    )


class Trials:
    """Runs trials one after another, each in a fresh process with empty compile caches.

    A user's first run compiles too; so the start of a technique that compiles is what it costs then.

    Args:
        config: The given run.
        command: What trains, before its own arguments; tests give their own.
    """

    def __init__(self, config: Config, command: Sequence[str] = TRAIN) -> None:
        self.config, self.command = config, command

    def __call__(self, algorithms: Algorithms, *, steps: int, timeout: float, batch_size: int | None = None) -> Outcome:
        """Train ``steps`` steps with these techniques; ends the process after ``timeout`` seconds, or two more.

        Whatever goes wrong is an :class:`Outcome`, not an exception.
        """
        with tempfile.TemporaryDirectory(prefix="tune-") as name:
            folder = Path(name)
            trial = trial_config(self.config, algorithms, steps, folder, batch_size)
            save_config(trial, folder / "trial.yaml", credentials=True)  # in a folder that nobody else can look into
            caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
            started = time.monotonic()
            status, output = _run([*self.command, "-f", str(folder / "trial.yaml")], caches, timeout)
            wall = time.monotonic() - started
            if status is None:
                return Outcome("time", f"not done after {wall:.0f} s{where(output)}", wall_seconds=wall)
            if status != 0:
                return outcome_of_failure(status, output, wall)
            return outcome_of(json.loads((folder / "trial" / "report.json").read_text()), wall)


def _run(command: list[str], environment: Mapping[str, str], timeout: float) -> tuple[int | None, str]:
    """Exit status (None when it was ended at ``timeout``) and all output, with its stacks where it was ended."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment, "PYTHONFAULTHANDLER": "1"},
            start_new_session=True,  # so that its DataLoader workers and compilers can be ended with it
        )
        status = None
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
                process.send_signal(signal.SIGABRT)  # Python's fault handler leaves its stacks
                process.wait(_LAST_WORDS)
        finally:
            if status is None:
                with contextlib.suppress(ProcessLookupError):  # nobody is left
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        return status, log.read()


def outcome_of(report: Mapping[str, Any], wall_seconds: float) -> Outcome:
    """What a run's report.json says, as an outcome."""
    throughput, training = report["throughput"], report["training"]
    if not throughput.get("steady_batches"):
        batches = training["batches"]
        return Outcome("failed", f"none of its {batches} steps came to a steady state", wall_seconds=wall_seconds)
    techniques = report["algorithms"]
    return Outcome(
        "ok",
        step_seconds=throughput["step_seconds"] + throughput["data_seconds"],
        start_seconds=report["startup"].get("trainer_seconds", 0.0) + throughput["warmup_seconds"],
        other_batches=throughput["other_batches"],
        samples_per_sec=throughput["samples_per_sec"],
        peak_gib=report["memory"].get("peak_gib"),
        tokens_per_step=training["tokens"] / training["batches"],
        wall_seconds=wall_seconds,
        evidence={name: entry["evidence"] for name, entry in techniques.items()},
        unengaged={
            name: str(entry["evidence"].get("unavailable", "it did not engage"))
            for name, entry in techniques.items()
            if not entry["engaged"]
        },
    )


def outcome_of_failure(status: int, output: str, wall_seconds: float) -> Outcome:
    """What an exit status other than 0 and the output say, as an outcome."""
    reason = own_line(output)[:_SAID] or f"it ended with status {status}"
    if ran_out_of_memory(status, output):
        return Outcome("memory", f"ran out of memory ({reason})", wall_seconds=wall_seconds)
    return Outcome("refused" if status == 2 else "failed", reason, wall_seconds=wall_seconds)
