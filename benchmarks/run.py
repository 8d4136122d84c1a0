"""python -m benchmarks.run TABLE [key=value ...]: run a table's configurations in separate processes, and keep the
rows.

A table is a YAML file under benchmarks/tables (or its name without .yaml)::

    like: fast                        # table with the keys that are missing here; its overrides come first
    base: yamls/bert_imdb_fp32.yaml   # config of every configuration
    set: [trainer.max_duration=60ba]  # overrides of every configuration
    repeats: 3                        # runs of every configuration; configurations take turns
    matrix: {data.batch_size: [40, 128]}  # run every configuration with each value
    cumulative: true                  # a configuration includes the overrides of those above it, except peers
    jobs: 4                           # concurrent runs, for accuracy; speeds are not recorded
    warm_jobs: 4                      # concurrent unrecorded runs that fill compile caches
    fresh: true                       # cold processes (except Python's bytecode), timed from start to end
    share_compiled: true              # all runs share a compile cache, so that only first runs compile
    losses: true                      # rows keep the loss of every batch of the last run
    configurations:
      fp32: []
      + TF32: ["algorithms.tf32_matmul={}"]
      + TF32, warm: {set: ["algorithms.torch_compile={}"], warm: true}
      2 GPUs: {ranks: 2, published: "8.86 samples/s"}  # a figure to show beside the row
      HF Trainer: {peer: hf_trainer, set: [peer.torch_compile_mode=default]}

``peer`` names a module of benchmarks.peers that runs instead of train.py, with the same base and overrides. A
configuration with ``ranks`` is started by ``composer -n RANKS``. Every run starts with empty compile caches; with
``warm``, the runs of a configuration share a compile cache that an additional, unrecorded run has filled; its runs with
other seeds use the same. All caches are filled before the first recorded run.

On the command line, repeats=2, jobs=1, warm_jobs=1 and data.batch_size=40, or [40,128], replace the table's values.
"configurations=[fp32, + TF32]" selects configurations; the first one is the one to compare with. Other overrides come
last. Rows are written to benchmarks/results/<gpu>/<table>.jsonl, one per configuration and point of the matrix, with
the median, minimum and maximum of its runs. Rows of one call have the same time in ``call``, and only those are
compared. A failed run leaves its error, and its row and the printed table state the kind: out of memory, refused (an
invalid config or a missing package) or failed.

Each finished run is written to its row immediately. After a call was stopped or killed, the same command with
resume=true continues it, with the same configurations, overrides and code. Without an unfinished call it starts a new
one, so it can always be given.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.rows import (
    RESULTS,
    Call,
    Row,
    call_time,
    describe_error,
    empty_row,
    error_report,
    folder_of,
    lock_table,
    spell,
)
from benchmarks.table_file import Configuration, Table, configurations_of, read_table
from benchmarks.tables import markdown, where_of
from composer_speedups.core.processes import command_output
from composer_speedups.sweep.processes import TRAIN, Ended, Job, run_all

ROOT = Path(__file__).parent.parent
_TABLES = ROOT / "benchmarks" / "tables"
# A run that does not fit is a result; smaller micro-batches would be another configuration.
_QUIET = ["trainer.progress_bar=false", "baseline=null", "export=false", "plot=false", "trainer.on_out_of_memory=stop"]
_LOSS = re.compile(r"^\[metric\]\[batch=\d+\]: loss/train/total: (\S+)", re.MULTILINE)


def rows_file(configurations: Sequence[Configuration], name: str, results: Path = RESULTS) -> Path:
    """The file of a table's rows on this machine; torch would take memory of the GPU to know its name."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    said = None
    if not hidden and not all("trainer.device=cpu" in configuration.overrides for configuration in configurations):
        said = command_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader", timeout=60)
    return folder_of((said or "").split("\n")[0] or None, results) / f"{name}.jsonl"


def run_table(table: Table, name: str, results: Path = RESULTS) -> list[Row]:
    """Run all configurations in turn, ``repeats`` times, and update the row after each run."""
    configurations, when, started = configurations_of(table), call_time(), time.monotonic()
    path = rows_file(configurations, name, results)
    rows = [empty_row(name, when, configuration, table.jobs) for configuration in configurations]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    compiled = [(c.name, {key: value for key, value in c.point.items() if key != "seed"}) for c in configurations]
    with lock_table(path), tempfile.TemporaryDirectory() as scratch:
        call = Call(path, rows, _identity(table, configurations), resume=table.resume)
        waiting = [
            (repeat, i)
            for repeat in range(table.repeats)
            for i, row in enumerate(call.rows)
            if repeat >= row["repeats"]
        ]

        def job(index: int, folder: str) -> Job:
            cache = folder
            if configurations[index].warm:
                cache = f"cache{compiled.index(compiled[index])}"
            elif table.share_compiled:
                cache = "cache"
            return job_of(table, configurations[index], Path(scratch, folder), Path(scratch, cache))

        def add(done: Job, ended: Ended) -> None:
            repeat, index = runs[done.log]
            report = report_of(done, ended, table.fresh)
            shutil.rmtree(done.log.with_suffix(""), ignore_errors=True)
            call.add(index, report)
            shown = f"{configurations[index].name} {spell(configurations[index].point)} {_said(report)}"
            print(f"{time.monotonic() - started:5.0f} s  {repeat + 1}/{table.repeats}  {shown}", flush=True)

        jobs = [job(i, f"run{repeat}-{i}") for repeat, i in waiting]
        runs = dict(zip((job.log for job in jobs), waiting, strict=True))
        to_fill = {compiled.index(compiled[i]) for _, i in waiting if configurations[i].warm}
        try:
            if table.fresh:
                compile_bytecode({job.program for job in jobs})
            run_all([job(i, f"fill{i}") for i in sorted(to_fill)], table.warm_jobs, lambda *_: None)
            run_all(jobs, table.jobs, add)
        except BaseException:
            print(f"stopped; resume=true continues from {path}", file=sys.stderr, flush=True)
            raise
        return call.finish()


def _identity(table: Table, configurations: Sequence[Configuration]) -> str:
    """A digest of what must be the same to resume a call."""
    same = [table.base, table.jobs, table.fresh, code_version(ROOT), configurations]
    return hashlib.sha256(json.dumps(same).encode()).hexdigest()[:12]


def code_version(root: Path) -> str | None:
    """The commit, with a digest of uncommitted changes to tracked code; None outside a git checkout."""
    if named := os.environ.get("COMPOSER_SPEEDUPS_COMMIT"):
        return named
    git = partial(command_output, "git", "-C", str(root), timeout=None)
    commit, changes = git("rev-parse", "HEAD"), git("diff", "HEAD", "--", ".", ":(exclude)benchmarks/results")
    return f"{commit}+{hashlib.sha256(changes.encode()).hexdigest()[:12]}" if commit and changes else commit


def _said(report: Row) -> str:
    if "error" in report:
        return describe_error(**report)
    throughput, accuracy = report["throughput"], report["metrics"].get("accuracy")
    said = f"accuracy {accuracy:.4f}, " if accuracy is not None else ""
    if "process_seconds" in report:
        said += f"{report['process_seconds']:.1f} s in all, "
    return f"{said}{throughput['samples_per_sec']:,.0f} samples/s, warm-up {throughput['warmup_seconds']:.0f} s"


def compile_bytecode(programs: set[str]) -> None:
    """Import programs, and what they import, in another process, so that their bytecode is there."""
    for program in sorted(programs):
        code = f"import {program}; from composer_speedups.sweep.forks import import_all; import_all()"
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""}, check=True)


def job_of(table: Table, configuration: Configuration, folder: Path, cache: Path) -> Job:
    """A training run in a folder of its own, with compile caches in another."""
    settings = [*configuration.overrides, f"runs_folder={folder}", "run_name=configuration", *_QUIET]
    # inductor's cache, and that of the kernels of fused_layers
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton"}
    program = f"benchmarks.peers.{configuration.peer}" if configuration.peer else TRAIN
    arguments = ["-f", str(ROOT / table.base), *settings]
    return Job(arguments, folder.with_suffix(".log"), caches, program, configuration.ranks, table.fresh)


def report_of(job: Job, ended: Ended, fresh: bool) -> Row:
    """The report of a run, or ``{"error": …}``, with ``process_seconds`` of a fresh process, or else ``run_seconds`` if
    it had imported before."""
    if ended.status != 0:
        return error_report(ended)
    folder = job.log.with_suffix("") / "configuration"
    report = json.loads((folder / "report.json").read_text())
    log = folder / "log-rank0.txt"
    if "losses" not in report and log.exists():
        report["losses"] = [float(value) for value in _LOSS.findall(log.read_text())]
    del report["wall_seconds"]  # the process may have waited for its turn
    if fresh or job.ranks == 1:
        report["process_seconds" if fresh else "run_seconds"] = ended.seconds
    return report


def main(arguments: Sequence[str], results: Path = RESULTS) -> None:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        raise SystemExit(0 if arguments else 2)
    path = Path(arguments[0])
    if not path.suffix:
        path = _TABLES / f"{arguments[0]}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in _TABLES.glob("*.yaml")))
        raise SystemExit(f"{path}: no such table; there are {known}")
    table = read_table(path, arguments[1:])
    rows = run_table(table, path.stem, results)
    print("\n".join([*markdown(rows), "", where_of([row for row in rows if row["environment"]])]))


if __name__ == "__main__":
    main(sys.argv[1:])
