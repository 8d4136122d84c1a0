"""runs/<name>/report.json, and the summary table on the console."""

from __future__ import annotations

from typing import Any

import torch
from composer import Trainer
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from composer_speedups.callbacks.checkpoints import callback_of
from composer_speedups.callbacks.evaluations import BestWeights, EarlyStopping
from composer_speedups.callbacks.history import ClassReport, RunHistory, class_rows, note_on_metric
from composer_speedups.callbacks.losses import LossMonitor
from composer_speedups.callbacks.memory import MemoryAnatomy
from composer_speedups.callbacks.run_report import RunReport, describe_evidence, evidence_of
from composer_speedups.callbacks.throughput import ThroughputMonitor, shown_rate
from composer_speedups.core.files import write_json
from composer_speedups.core.processes import process_age
from composer_speedups.core.trainer_state import device_of
from composer_speedups.data.summary import DataSummary
from composer_speedups.distributed.ddp import sums_of
from composer_speedups.tasks.metrics import final_metrics
from composer_speedups.train.config.load import written
from composer_speedups.train.config.schema import Config
from composer_speedups.train.environment import environment
from composer_speedups.train.out_of_memory import MicrobatchHistory
from composer_speedups.train.run_folder import RunFolder
from composer_speedups.train.startup import StartupClock


def write_report(
    trainer: Trainer,
    config: Config,
    folder: RunFolder,
    baseline: dict[str, Any] | None = None,
    data: DataSummary | None = None,
) -> dict[str, Any]:
    """Write report.json and print the summary, on rank 0. Collective: every rank must call it."""
    report = build_report(trainer.state, config, baseline, data)
    if dist.get_global_rank() == 0:
        write_json(folder / "report.json", report)
        print(summary_table(report, str(folder.path)), flush=True)
    return report


def build_report(
    state: State, config: Config, baseline: dict[str, Any] | None = None, data: DataSummary | None = None
) -> dict[str, Any]:
    logged, microbatches = callback_of(state, RunReport), callback_of(state, MicrobatchHistory)
    history = callback_of(state, RunHistory) or RunHistory()
    changes = microbatches.changes if microbatches else []
    chosen = "after running out of memory" if changes else "by the config"
    best, classes = callback_of(state, BestWeights), callback_of(state, ClassReport)
    sums, monitor = sums_of(state.model), callback_of(state, ThroughputMonitor)
    trained = monitor.batches if monitor else []
    return {
        "run_name": config.run_name,
        "throughput": _summary(state, ThroughputMonitor),
        "baseline": baseline,
        "memory": _summary(state, MemoryAnatomy),
        "startup": _summary(state, StartupTimes),
        "metrics": {**history.metrics, **final_metrics(state), **(best.metrics if best else {})},
        "evaluations": history.summary(),
        "data": data.report() if data else {},
        # for the exported weights; empty if an earlier process evaluated them
        "classes": classes.summary(best.batch if best else None) if classes else {},
        "best": _summary(state, BestWeights),
        "early_stopping": _summary(state, EarlyStopping),
        "algorithms": evidence_of(state),
        "numerics": logged.numerics if logged else {},
        "guards": _summary(state, LossMonitor),
        "ddp": sums.summary() if sums else None,
        "training": {
            "batches": state.timestamp.batch.value,
            "samples": state.timestamp.sample.value,
            "tokens": state.timestamp.token.value,
            "last_batch_samples": trained[-1].samples * dist.get_world_size() if trained else None,
            # FSDP leaves each rank with flattened, padded shards, whose number of elements is not the model's.
            "parameters": None if state.fsdp_enabled else sum(p.numel() for p in state.model.parameters()),
            "microbatch_size": state.device_train_microbatch_size,
            "microbatch_chosen": "automatically" if state.auto_microbatching else chosen,
            "microbatch_changes": changes,
            "ranks": dist.get_world_size(),
        },
        "wall_seconds": history.wall_seconds + process_age(),
        "environment": environment(),
        "config": written(config),
        "inputs": history.inputs,
        "resumed": history.resumed,
    }


def summary_table(report: dict[str, Any], folder: str) -> str:
    """Format the report as a table for the console. Evidence is cut at 160 columns, with "…"."""
    speed, memory, training = report["throughput"], report["memory"], report["training"]
    startup, ddp, classes = report["startup"], report["ddp"] or {}, report["classes"].get("classes", {})
    best, stopping, peak = report["best"], report["early_stopping"], speed.get("peak")
    last = training["last_batch_samples"]
    ranks = f" on {training['ranks']} ranks" if training["ranks"] > 1 else ""
    bound = report["config"]["trainer"]["microbatch_tokens"]
    overlapped = f"; {ddp['overlapped_steps']} steps overlap" if ddp.get("overlapped_steps") else ""
    tokens = "" if bound is None else f"with at most {bound:,} real tokens, "
    resumed = ", ".join(str(entry["batch"]) for entry in report["resumed"] or ())
    before = resumed and f"and of those before it: resumed after batch {resumed}"
    rows = [
        ("samples/s", speed.get("samples_per_sec"), f"steady state, data wait included{ranks}"),
        ("tokens/s", speed.get("tokens_per_sec"), "without padding"),
        ("padding", speed.get("padding_fraction"), "of all positions"),
        ("MFU", speed.get("mfu"), peak and f"of {peak['flops_per_sec'] / 1e12:.3g} TFLOP/s ({peak['precision']})"),
        ("step", speed.get("step_seconds"), "s, mean"),
        ("data wait", speed.get("data_seconds"), "s per batch, mean"),
        ("between batches", speed.get("between_batches_seconds"), "s per batch, mean, on the host"),
        ("warm-up", speed.get("warmup_seconds"), "s, compilation included"),
        ("evaluation", speed.get("eval_seconds"), "s in all"),
        ("checkpoints", speed.get("checkpoint_seconds"), "s in all"),
        ("peak memory", memory.get("peak_gib"), f"GiB {'of the GPU' if report['environment']['gpu'] else 'resident'}"),
        *((name.replace("_", " "), x, note_on_metric(name, classes, last)) for name, x in report["metrics"].items()),
        *class_rows(classes),
        ("best", best.get("batch"), best and f"batches trained; {best['metric']} was {_number(best['value'])}"),
        ("stopped early", training["batches"] if stopping.get("stopped") else None, "batches trained"),
        ("gradients", ddp.get("mib_a_step"), f"MiB reduced per step{overlapped}"),
        (
            "microbatch",
            training["microbatch_size"],
            f"samples per forward pass and device, {tokens}chosen {training['microbatch_chosen']}",
        ),
        ("start-up", startup.get("to_first_step_seconds"), f"s to the end of the first step: {_phases(startup)}"),
        ("wall time", report["wall_seconds"], f"s, from the start of the process{before and f', {before}'}"),
    ]
    lines = ["", f"{report['run_name']}: {folder}/report.json"]
    shown = [(name, value, note) for name, value, note in rows if value is not None]
    width = max(15, *(len(name) for name, _, _ in shown))
    lines += [f"  {name:<{width}} {_number(value):>10}  {note or ''}".rstrip() for name, value, note in shown]
    for name, entry in report["algorithms"].items():
        mark = "engaged" if entry["engaged"] else "NOT engaged"
        line = f"  {name:<18} {mark}: {describe_evidence(entry['evidence'])}"
        lines.append(f"{line[:159]}…" if entry["engaged"] and len(line) > 160 else line)
    if report["baseline"]:
        lines += ["", _against_baseline(report)]
    return "\n".join(lines)


def _against_baseline(report: dict[str, Any]) -> str:
    before = report["baseline"]
    theirs, ours = before["samples_per_sec"], before["run_samples_per_sec"]
    engaged = [name for name, entry in report["algorithms"].items() if entry["engaged"]]
    change = ", ".join(name for name in engaged if name not in before["algorithms"]) or "this run"
    if removed := [name for name in before["algorithms"] if name not in engaged]:
        change += f" in place of {', '.join(removed)}"
    turns = before["turn_ratios"]
    spread = f"; {min(turns):.2f} to {max(turns):.2f} times in single turns" if turns else ""
    disagree = turns and min(turns) <= 1 <= max(turns)
    undecided = "the turns do not tell which is faster; over all of them, " if disagree else ""
    rates = (
        f"{shown_rate(ours)} and {shown_rate(theirs)} samples/s, {before['batches']} batches each, in turns before the "
        f"run{spread}"
    )
    return f"{change}: {undecided}{ours / theirs:.2f} times as fast on this machine ({rates})"


def _phases(startup: dict[str, float]) -> str:
    parts = {name.removesuffix("_seconds"): s for name, s in startup.items() if name != "to_first_step_seconds"}
    largest = sorted(parts, key=parts.__getitem__, reverse=True)[:4]
    return ", ".join(f"{name} {parts[name]:.1f}" for name in largest)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"


def _summary(state: State, kind: type[Any]) -> dict[str, Any]:
    callback = callback_of(state, kind)
    return callback.summary() if callback else {}


class StartupTimes(Callback):
    """Logs ``startup/<phase>_seconds`` and ``startup/to_first_step_seconds`` after the first trained batch."""

    def __init__(self, clock: StartupClock) -> None:
        self.clock = clock

    def init(self, state: State, logger: Logger) -> None:
        self.batch_end = self._end_first_batch  # type: ignore[method-assign]

    def _end_first_batch(self, state: State, logger: Logger) -> None:
        del self.batch_end  # type: ignore[method-assign]  # later batches do not concern it
        if device_of(state).type == "cuda":
            torch.cuda.synchronize(device_of(state))
        self.clock.lap("first_step")
        logger.log_metrics({f"startup/{name}": seconds for name, seconds in self.summary().items()})

    def summary(self) -> dict[str, float]:
        """The ``startup`` section of report.json; empty before the first batch."""
        return self.clock.summary() if "first_step" in self.clock.seconds else {}
