"""A short trial of a run with another set of techniques, in a child process."""

from __future__ import annotations

import json
import math
import re
import tempfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from composer_speedups.callbacks.config import MemoryConfig, ThroughputConfig
from composer_speedups.core.engaging import check
from composer_speedups.core.errors import ConfigError, Refusal
from composer_speedups.core.registry import build_techniques
from composer_speedups.core.run import Run
from composer_speedups.data.loader import build_data
from composer_speedups.sweep.processes import Ended, Job, Process
from composer_speedups.sweep.sets import Algorithms
from composer_speedups.tasks.models import resolve_name
from composer_speedups.tasks.task import build_task
from composer_speedups.train.config.load import save_config
from composer_speedups.train.config.schema import CheckpointConfig, Config, LoggersConfig


@dataclass(frozen=True)
class Trial:
    """A set of techniques, and what its trial measured. Times are in seconds."""

    label: str
    algorithms: Algorithms = field(default_factory=dict)
    # of the process; untried: not allowed, or no time
    status: Literal["ok", "out of memory", "time", "refused", "failed", "untried"] = "ok"
    reason: str = ""  # one line; empty for ok
    step_seconds: float = math.nan  # mean of the steady steps, including waiting for data
    start_seconds: float = 0.0  # from loaded data to the steady state: engaging, compiling, capturing, warm-up
    start_steps: int = 0  # number of steps in start_seconds
    samples_per_sec: float = math.nan  # in the steady state
    peak_gib: float | None = None  # of the GPU, or resident memory on a CPU
    tokens_per_step: float = math.nan  # mean number of real tokens per step
    wall_seconds: float = 0.0  # duration of the whole process

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def planned_seconds(self, steps: int) -> float:
        """Estimated training time of ``steps`` steps: the start once, then steady steps. Infinite if the trial failed.

        Imports, loading data, evaluations and checkpoints are not included, because they hardly depend on the
        techniques.
        """
        if not self.ok:
            return math.inf
        return self.start_seconds + max(0, steps - self.start_steps) * self.step_seconds


def break_even_steps(base: Trial, other: Trial) -> int | None:
    """Number of steps after which ``other`` has made up for its longer start; 0 if it starts as fast, None for
    never."""
    saved = base.step_seconds - other.step_seconds
    # Steps of the start are trained steps too, and both may have trained different numbers of them.
    extra = (other.start_seconds - other.start_steps * other.step_seconds) - (
        base.start_seconds - base.start_steps * base.step_seconds
    )
    return max(0, math.ceil(extra / saved)) if saved > 0 else None


class OriginalRun:
    """The run to tune: its length, why train.py would refuse a set of techniques, and trials.

    Args:
        config: Its config.
        run: The device and ranks it trains on, as techniques check them.
    """

    def __init__(self, config: Config, run: Run) -> None:
        self.config, self.run = config, run

    @cached_property
    def batches_per_epoch(self) -> int:
        """Number of training batches. Counting them also fills the token cache for all trials."""
        data, model = self.config.data, self.config.model
        on_gpu = self.run.device.type == "cuda"
        built = build_data(
            data,
            build_task(self.config.task),
            model_name=resolve_name(model.name),
            on_gpu=on_gpu,
            seed=self.config.seed,
        )
        return len(built.train.dataloader)  # type: ignore[arg-type]

    def planned_steps(self, trial: Trial) -> int:
        """Optimizer steps of the planned run, at least 1; ``trial`` gives the number of tokens per step."""
        duration = re.fullmatch(r"(\d+)([a-z]+)", self.config.trainer.max_duration)
        assert duration is not None, "the config accepts no other time"
        number, unit = int(duration[1]), duration[2]
        if unit == "ep":
            return max(1, number * self.batches_per_epoch)
        per_step = {"ba": 1, "sp": self.config.data.batch_size, "tok": trial.tokens_per_step}
        return max(1, math.ceil(number / per_step[unit]))

    def refusal(self, algorithms: Algorithms) -> str | None:
        """Why train.py would refuse these techniques before it builds a model; None if it would not."""
        try:
            whole = self.config.replaced(algorithms=dict(algorithms))
            check(build_techniques(whole.algorithms), self.run)
        except ConfigError as error:
            return str(error).removeprefix("config: ")
        except Refusal as error:
            return f"{error.who}: {error.reason}"
        return None

    def measure(self, label: str, algorithms: Algorithms, steps: int, timeout: float) -> Trial:
        """Train ``steps`` steps with these techniques in a child process that is killed after ``timeout`` seconds.

        The process starts with empty compile caches, because a user's first run compiles too. A failure is a Trial with
        its reason.
        """
        with tempfile.TemporaryDirectory(prefix="tune-") as name:
            folder = Path(name)
            trial = trial_config(self.config, algorithms, steps, folder)
            save_config(trial, folder / "trial.yaml", resolved=True)  # a folder that other users cannot read
            caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
            job = Job(["-f", str(folder / "trial.yaml")], folder / "log", caches)
            return trial_of(label, algorithms, Process(job).wait(timeout), folder / "trial")


def trial_config(config: Config, algorithms: Algorithms, steps: int, folder: Path) -> Config:
    """The config of a trial: ``steps`` steps in ``folder``, with everything that determines a step's time unchanged.

    Composer evaluates at the end of every run: here one batch, at most as large as a training batch.
    """
    return config.replaced(
        algorithms=dict(algorithms),
        on_unavailable=config.on_unavailable if algorithms == config.algorithms else "stop",
        baseline=None,
        run_name="trial",
        runs_folder=str(folder),
        export=False,
        plot=False,
        data=config.data.replaced(eval_batch_size=config.data.batch_size),
        scheduler=config.scheduler.replaced(warmup="0.1dur"),
        trainer=config.trainer.replaced(
            max_duration=f"{steps}ba",
            eval_interval=f"{steps}ba",
            eval_batches=1,
            progress_bar=False,
            early_stopping=None,
            # a set that does not fit is left out instead of measured with smaller micro-batches
            on_out_of_memory="stop",
        ),
        checkpoint=CheckpointConfig(),
        callbacks=config.callbacks.replaced(throughput=ThroughputConfig(), memory=MemoryConfig()),
        loggers=LoggersConfig(),
    )


def trial_of(label: str, algorithms: Algorithms, ended: Ended, folder: Path) -> Trial:
    """The Trial of a process that ended, with the report in its run's folder."""
    wall = ended.seconds
    if ended.kind != "ok":
        return Trial(label, algorithms, ended.kind, ended.reason, wall_seconds=wall)
    report = json.loads((folder / "report.json").read_text())
    throughput, training = report["throughput"], report["training"]
    if not throughput.get("steady_batches"):
        reason = f"none of its {training['batches']} steps reached the steady state"
        return Trial(label, algorithms, "failed", reason, wall_seconds=wall)
    return Trial(
        label,
        algorithms,
        step_seconds=throughput["step_seconds"] + throughput["data_seconds"],
        start_seconds=report["startup"].get("trainer_seconds", 0.0) + throughput["warmup_seconds"],
        start_steps=throughput["other_batches"],
        samples_per_sec=throughput["samples_per_sec"],
        peak_gib=report["memory"].get("peak_gib"),
        tokens_per_step=training["tokens"] / training["batches"],
        wall_seconds=wall,
    )
