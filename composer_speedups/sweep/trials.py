"""Try sets of techniques in short runs, and run the fastest one and the original again in turns."""

from __future__ import annotations

import json
import math
import re
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from composer_speedups.callbacks.config import MemoryConfig, ThroughputConfig
from composer_speedups.callbacks.throughput import shown_rate
from composer_speedups.core.engaging import check
from composer_speedups.core.errors import ConfigError, Refusal, RunFailedError
from composer_speedups.core.registry import build_techniques
from composer_speedups.core.run import Run
from composer_speedups.sweep.processes import Ended, Job, Process
from composer_speedups.sweep.sets import Algorithms, Changes, combined, forbidden, key_of
from composer_speedups.tasks.task import build_task
from composer_speedups.train.config.load import save_config
from composer_speedups.train.config.schema import CheckpointConfig, Config, LoggersConfig
from composer_speedups.train.console import about
from composer_speedups.train.trainer import data_of

if TYPE_CHECKING:
    from composer_speedups.sweep.tune import TuneConfig

_MIN_GAIN = 0.02  # fraction of the planned run's time below which a difference always counts as noise


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

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def planned_seconds(self, steps: int) -> float:
        """Estimated time of ``steps`` steps without imports, data and evaluations; infinite if it failed."""
        if not self.ok:
            return math.inf
        return self.start_seconds + max(0, steps - self.start_steps) * self.step_seconds


@dataclass
class Result:
    """What a search measured. Times are in seconds."""

    original: Trial
    planned_steps: int
    trials: list[Trial] = field(default_factory=list)  # one for each set of the table
    again: dict[str, list[float]] = field(default_factory=dict)  # planned times of "original" and "fastest", in turns
    noise: float = 0.0  # least difference of planned times that counts
    chosen: Trial | None = None  # a set that was faster than the original by more than the noise
    speedup: float | None = None  # median planned time of the original divided by that of the chosen one
    kept_original: str = ""  # why no set was chosen


class OriginalRun:
    """The run to tune: its length, why train.py would refuse a set of techniques, and trials."""

    def __init__(self, config: Config, run: Run) -> None:
        self.config, self.run = config, run

    @cached_property
    def batches_per_epoch(self) -> int:
        """Number of training batches. Counting them also fills the token cache for all trials."""
        data = data_of(self.config, build_task(self.config.task), on_gpu=self.run.device.type == "cuda")
        return len(data.train.dataloader)  # type: ignore[arg-type]

    def planned_steps(self, trial: Trial) -> int:
        """Optimizer steps of the planned run, at least 1; ``trial`` gives the number of tokens per step."""
        duration = re.fullmatch(r"(\d+)([a-z]+)", self.config.trainer.max_duration)
        assert duration is not None, "the config accepts no other time"
        number, unit = int(duration[1]), duration[2]
        if unit == "ep":
            return max(1, number * self.batches_per_epoch)
        samples = self.config.data.batch_size or trial.samples_per_sec * trial.step_seconds
        per_step = {"ba": 1, "sp": samples, "tok": trial.tokens_per_step}
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

    def measure(self, label: str, algorithms: Algorithms, steps: int, timeout: float | None = None) -> Trial:
        """Train ``steps`` steps in a child process with empty compile caches, as a user's first run has them."""
        with tempfile.TemporaryDirectory(prefix="tune-") as name:
            folder = Path(name)
            config = trial_config(self.config, algorithms, steps, folder)
            save_config(config, folder / "trial.yaml", resolved=True)  # a folder that other users cannot read
            caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
            job = Job(["-f", str(folder / "trial.yaml")], folder / "log", caches)
            trial = trial_of(label, algorithms, Process(job).wait(timeout), folder / "trial")
        if (label, trial.status) != ("original", "refused"):  # which search() raises
            print(f"{label}: {self.outcome(trial)}", flush=True)
        return trial

    def outcome(self, trial: Trial) -> str:
        """The rate of a trial, and what the planned run takes with its techniques; or why it failed."""
        if not trial.ok:
            return trial.reason
        planned = about(trial.planned_seconds(self.planned_steps(trial)), trial.peak_gib)
        return f"{shown_rate(trial.samples_per_sec)} samples/s, {planned}"


def search(run: OriginalRun, sets: Mapping[Changes, Mapping[str, Algorithms]], settings: TuneConfig) -> Result:
    """Measure the original set and each set of the table once, and the fastest one and the original again."""
    end = time.monotonic() + settings.budget_seconds
    original = run.measure("original", run.config.algorithms, settings.steps)
    if original.status == "refused":
        raise ConfigError(original.reason)
    if not original.ok:
        raise RunFailedError(f"original YAML: the original run fails: {original.reason}; train.py must run it first")
    result = Result(original, run.planned_steps(original))
    seen = {key_of(run.config.algorithms): "the original YAML"}
    for changes, labelled in sets.items():
        for label, techniques in labelled.items():
            algorithms, left = combined(run.config, techniques), end - time.monotonic()
            if reason := forbidden(changes, settings.allow or ()):
                trial = Trial(label, algorithms, "untried", reason)
            elif reason := run.refusal(algorithms):
                trial = Trial(label, algorithms, "refused", reason)
            elif same := seen.get(key_of(algorithms)):
                trial = Trial(label, algorithms, "untried", f"the same techniques as {same}")
            elif left <= 0:
                trial = Trial(label, algorithms, "untried", "no time was left; increase tune.budget_seconds")
            else:
                seen[key_of(algorithms)] = label
                trial = run.measure(label, algorithms, settings.steps, left)
            result.trials.append(trial)
    _choose(run, result, settings)
    return result


def _choose(run: OriginalRun, result: Result, settings: TuneConfig) -> None:
    """Run the original and the fastest set in turns. It is chosen if it is faster by more than the noise here too."""
    steps, original = result.planned_steps, result.original
    base = original.planned_seconds(steps)
    result.noise = _MIN_GAIN * base
    fastest = min(result.trials, key=lambda trial: trial.planned_seconds(steps), default=original)
    if base - fastest.planned_seconds(steps) <= result.noise:
        result.kept_original = "no set was faster" if fastest.ok else "no set could be tried"
        return
    before, after = list[float](), list[float]()
    for _ in range(settings.repeats):
        for trial, times in ((original, before), (fastest, after)):
            again = run.measure(trial.label, trial.algorithms, settings.steps)
            if not again.ok:
                result.kept_original = f"{trial.label} failed when it was run again: {again.reason}"
                return
            times.append(again.planned_seconds(steps))
    result.again = {"original": before, "fastest": after}
    result.noise = max(result.noise, max(base, *before) - min(base, *before), max(after) - min(after))
    ours, theirs = statistics.median(after), statistics.median(before)
    if theirs - ours > result.noise:
        result.chosen, result.speedup = fastest, theirs / ours
    else:
        result.kept_original = f"{fastest.label} was not faster by more than the noise when both were run again"


def trial_config(config: Config, algorithms: Algorithms, steps: int, folder: Path) -> Config:
    """The config of a trial: ``steps`` steps in ``folder``, with everything that determines a step's time unchanged."""
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
            eval_batches=1,  # Composer evaluates at the end of every run
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
    if ended.kind != "ok":
        late = "tune.budget_seconds was used up while it ran; increase it"  # what is left of it is the time limit
        return Trial(label, algorithms, ended.kind, late if ended.kind == "time" else ended.reason)
    report = json.loads((folder / "report.json").read_text())
    throughput, training = report["throughput"], report["training"]
    if not throughput.get("steady_batches"):
        reason = f"none of its {training['batches']} steps reached the steady state"
        return Trial(label, algorithms, "failed", reason)
    return Trial(
        label,
        algorithms,
        step_seconds=throughput["step_seconds"] + throughput["data_seconds"],
        start_seconds=report["startup"].get("trainer_seconds", 0.0) + throughput["warmup_seconds"],
        start_steps=throughput["other_batches"],
        samples_per_sec=throughput["samples_per_sec"],
        peak_gib=report["memory"].get("peak_gib"),
        tokens_per_step=training["tokens"] / training["batches"],
    )
