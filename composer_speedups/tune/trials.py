"""The original run: which of its techniques can engage on this machine, and short trials of it in child processes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import resource
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from composer_speedups.callbacks.config import MemoryConfig, ThroughputConfig
from composer_speedups.core.errors import TechniqueError, UserError
from composer_speedups.core.registry import build_techniques, technique_class
from composer_speedups.core.requirements import Context
from composer_speedups.core.settings import Origins, fields_of, time_units
from composer_speedups.core.subprocesses import kill_process_group
from composer_speedups.core.technique import Technique, screen
from composer_speedups.data.loader import build_data
from composer_speedups.tasks.models import resolve_name
from composer_speedups.tasks.task import build_task, checked_task
from composer_speedups.train.child_process import TRAIN, start_training
from composer_speedups.train.config.load import save_config
from composer_speedups.train.config.schema import CheckpointConfig, Config, LoggersConfig
from composer_speedups.train.failed_process import crash_location, failure_reason, ran_out_of_memory
from composer_speedups.tune.candidates import Algorithms, stopping
from composer_speedups.tune.results import Outcome

__all__ = ["OriginalRun", "outcome_of", "outcome_of_failure", "trial_config"]

_STACK_SECONDS = 2.0  # for a process at its timeout to print its stack


class OriginalRun:
    """The run to tune, of which trials are run in child processes.

    Args:
        config: The original run's config.
        context: The device and ranks it trains on.
        program: The module that trains in a trial; replaced in tests.

    Raises:
        UserError: A technique that must engage cannot, as in train.py.

    Attributes:
        techniques: The config's techniques that can engage here.
        unengaged: Techniques with ``on_unavailable: warn`` that cannot engage, and why.
    """

    def __init__(self, config: Config, context: Context, program: str = TRAIN) -> None:
        self.config, self.context, self.program = config, context, program
        techniques = build_techniques(config.algorithms, config.on_unavailable)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # reported in the YAML
            screen(techniques, context)
        self.unengaged = {t.name: str(t.evidence["unavailable"]) for t in techniques if t.engaged is False}
        self.techniques = {n: s for n, s in config.algorithms.items() if n not in self.unengaged}

    @property
    def trains_in_16_bits(self) -> bool:
        """Whether it already trains in lower precision."""
        by_technique = {"mixed_precision", "kahan_optimizer"} & set(self.config.algorithms)
        return self.config.trainer.precision != "fp32" or bool(by_technique)

    @cached_property
    def batches_per_epoch(self) -> int:
        """Number of training batches. Counting them also fills the token cache for all trials."""
        data, model = self.config.data, self.config.model
        on_gpu = self.context.device.type == "cuda"
        built = build_data(
            data, build_task(model, data), model_name=resolve_name(model.name), on_gpu=on_gpu, seed=self.config.seed
        )
        return len(built.train.dataloader)  # type: ignore[arg-type]

    def planned_steps(self, outcome: Outcome) -> int:
        """Optimizer steps of the planned run, at least 1; ``outcome`` gives the number of tokens per step."""
        duration = re.fullmatch(r"(\d+)([a-z]+)", self.config.trainer.max_duration)
        assert duration is not None, "the config accepts no other time"
        number, unit = int(duration[1]), duration[2]
        if unit == "ep":
            return max(1, number * self.batches_per_epoch)
        per_step = {"ba": 1, "sp": self.config.data.batch_size, "tok": outcome.tokens_per_step}
        return max(1, math.ceil(number / per_step[unit]))

    def refusal(self, algorithms: Algorithms) -> str | None:
        """Why train.py would refuse these techniques before it builds a model; None if it would not."""
        try:
            whole = dataclasses.replace(self.config, algorithms=stopping(algorithms))
            checked_task(whole, Origins("config"))
            screen(build_techniques(whole.algorithms), self.context)
        except TechniqueError as error:
            return f"{error.technique}: {error.reason}"
        except UserError as error:
            return str(error).removeprefix("config: ")
        return None

    def with_shares(self, algorithms: Algorithms) -> dict[str, Any]:
        """Express techniques' times, such as ``start: 1ep``, as shares of the planned run, which hold in a trial, too.

        Times remain as they are if they cannot be shares, lie behind the end, or the run is planned in tokens, whose
        number per batch is not known before a trial.
        """
        return {
            name: {key: self._share(technique_class(name), key, value) for key, value in settings.items()}
            for name, settings in algorithms.items()
        }

    def _share(self, technique: type[Technique], key: str, value: Any) -> Any:
        field = fields_of(technique).get(key)
        time = re.fullmatch(r"(\d+)(ba|ep)", str(value))
        planned_in_tokens = self.config.trainer.max_duration.endswith("tok")
        if field is None or "dur" not in time_units(field) or time is None or planned_in_tokens:
            return value
        batches = int(time[1]) * (self.batches_per_epoch if time[2] == "ep" else 1)
        share = batches / self.planned_steps(Outcome("ok"))
        return f"{share:.6f}dur" if 0 < share <= 1 else value

    def measure(self, algorithms: Algorithms, *, steps: int, timeout: float, batch_size: int | None = None) -> Outcome:
        """Train ``steps`` steps with these techniques in a child process that is killed soon after ``timeout`` seconds.

        The process starts with empty compile caches, because a user's first run compiles too. Failures are returned as
        an :class:`Outcome`.
        """
        with tempfile.TemporaryDirectory(prefix="tune-") as name:
            folder = Path(name)
            trial = trial_config(self.config, self.with_shares(algorithms), steps, folder, batch_size)
            save_config(trial, folder / "trial.yaml", resolved=True)  # a folder that other users cannot read
            caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
            started = time.monotonic()
            status, output = _run(self.program, ["-f", str(folder / "trial.yaml")], caches, timeout)
            wall = time.monotonic() - started
            if status is None:
                return Outcome("time", f"not done after {wall:.0f} s{crash_location(output)}", wall_seconds=wall)
            if status != 0:
                return outcome_of_failure(status, output, wall)
            return outcome_of(json.loads((folder / "trial" / "report.json").read_text()), wall)


def trial_config(
    config: Config, algorithms: Algorithms, steps: int, folder: Path, batch_size: int | None = None
) -> Config:
    """The config of a trial: ``steps`` steps in ``folder``, with everything that determines a step's time unchanged.

    Composer evaluates at the end of every run: here one batch, at most as large as a training batch.
    """
    batch_size = batch_size or config.data.batch_size
    return dataclasses.replace(
        config,
        algorithms=dict(algorithms),
        baseline=None,
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
            early_stopping=None,
            # a set that does not fit is left out instead of measured with smaller micro-batches
            on_out_of_memory="stop",
        ),
        checkpoint=CheckpointConfig(),
        callbacks=dataclasses.replace(config.callbacks, throughput=ThroughputConfig(), memory=MemoryConfig()),
        loggers=LoggersConfig(),
    )


def _run(program: str, arguments: list[str], environment: Mapping[str, str], timeout: float) -> tuple[int | None, str]:
    """Exit status (None if it was killed at ``timeout``) and all output, with its stacks if it was killed."""
    with tempfile.TemporaryFile() as log:
        process = start_training(arguments, log, {**environment, "PYTHONFAULTHANDLER": "1"}, program)
        status = None
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
                process.send_signal(signal.SIGABRT)  # Python's fault handler prints its stacks
                process.wait(_STACK_SECONDS)
        finally:
            if status is None:
                kill_process_group(process)
        log.seek(0)
        return status, log.read().decode(errors="replace")


def outcome_of(report: Mapping[str, Any], wall_seconds: float) -> Outcome:
    """Convert a run's report.json to an outcome."""
    throughput, training = report["throughput"], report["training"]
    if not throughput.get("steady_batches"):
        batches = training["batches"]
        return Outcome("failed", f"none of its {batches} steps reached the steady state", wall_seconds=wall_seconds)
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
    """Convert a nonzero exit status and the output to an outcome."""
    reason = failure_reason(status, output)
    if ran_out_of_memory(status, output):
        return Outcome("memory", reason, wall_seconds=wall_seconds)
    return Outcome("refused" if status == 2 else "failed", reason, wall_seconds=wall_seconds)
