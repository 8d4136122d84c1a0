"""python -m benchmarks.run TABLE [key=value ...]: run a table's configurations in separate processes, and keep the
rows.

A table is a YAML file under benchmarks/tables (or its name without .yaml)::

    base: yamls/bert_imdb_fp32.yaml   # config of every configuration
    set: [trainer.max_duration=60ba]  # overrides of every configuration
    repeats: 3                        # runs of every configuration; configurations take turns
    matrix: {data.batch_size: [40, 128]}  # run every configuration with each value
    cumulative: true                  # a configuration includes the overrides of those above it, except peers
    jobs: 4                           # concurrent runs, for accuracy; speeds are not recorded
    ahead: 8                          # processes that import together and then wait for their turn
    warm_jobs: 4                      # concurrent unrecorded runs that fill compile caches
    fresh: true                       # cold processes (except Python's bytecode), timed from start to end
    share_compiled: true              # all runs share a compile cache, so that only first runs compile
    losses: true                      # rows keep the loss of every batch of the last run
    like: finetune                    # inherit the keys of another table; overrides come before those of set
    published: {where: "a V100", configurations: {fp32: "8.86 samples/s"}}  # published figures, shown with the rows
    configurations:
      fp32: []
      + TF32: ["algorithms.tf32_matmul={}"]
      + TF32, warm: {set: ["algorithms.torch_compile={}"], warm: true}
      2 GPUs: {ranks: 2}
      HF Trainer: {peer: hf_trainer, set: [peer.torch_compile_mode=default]}

``peer`` names a module of benchmarks.peers that runs instead of train.py, with the same base and overrides. A
configuration with ``ranks`` is started by ``composer -n RANKS``. Every run starts with empty compile caches; with
``warm``, the runs of a configuration share a compile cache that an additional, unrecorded run has filled; its runs with
other seeds use the same. All caches are filled before the first recorded run.

On the command line, repeats=2, jobs=1, ahead=1, warm_jobs=1 and data.batch_size=40 replace the table's values.
"configurations=[fp32, + TF32]" selects configurations; the first one is the one to compare with. Other overrides come
last. Rows are written to benchmarks/results/<gpu>/<table>.jsonl, one per configuration and point of the matrix, with
the median, minimum and maximum of its runs. Rows of one call have the same time in ``call``, and only those are
compared. A failed run leaves its error, and its row and the printed table state the kind: out of memory, refused (an
invalid config or a missing package) or failed. <table>.md and <table>.png show the last finished call.

Each finished run is written to its row immediately. After a call was stopped or killed, the same command with
resume=true continues it, with the same configurations, overrides and code. Without an unfinished call it starts a new
one, so it can always be given.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tqdm import tqdm

from benchmarks.rows import RESULTS, Call, Row, call_time, describe_error, empty_row, error_report, folder_of, spell
from benchmarks.table_file import Configuration, Table, configurations_of, read_table
from benchmarks.tables import markdown, page
from benchmarks.worker import Workers
from composer_speedups.core.files import write_atomically
from composer_speedups.core.subprocesses import command_output
from composer_speedups.train.child_process import TRAIN

ROOT = Path(__file__).parent.parent
_TABLES = ROOT / "benchmarks" / "tables"
# A run that does not fit is a result; smaller micro-batches would be another configuration.
_QUIET = ["trainer.progress_bar=false", "baseline=null", "export=false", "plot=false", "trainer.on_out_of_memory=stop"]
_LOSS = re.compile(r"^\[metric\]\[batch=\d+\]: loss/train/total: (\S+)", re.MULTILINE)


def rows_file(configurations: Sequence[Configuration], name: str, results: Path = RESULTS) -> Path:
    """The path ``<results>/<gpu>/<name>.jsonl``, for the GPU of this machine unless every configuration trains on the
    CPU.

    The GPU's name is determined without torch, which would allocate memory on it.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    said = None
    if not hidden and not all("trainer.device=cpu" in configuration.overrides for configuration in configurations):
        said = command_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader", timeout=60)
    return folder_of((said or "").split("\n")[0] or None, results) / f"{name}.jsonl"


def run_table(table: Table, name: str, results: Path = RESULTS) -> list[Row]:
    """Run all configurations in turn, ``repeats`` times, and update the row after each run."""
    configurations, repeats = configurations_of(table), table.repeats
    path, when, published = rows_file(configurations, name, results), call_time(), table.published.configurations
    rows = [
        empty_row(name, when, configuration, table.jobs, published.get(configuration.name))
        for configuration in configurations
    ]
    call = Call(path, rows, _identity(table, configurations), resume=table.resume)
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    stopped, caches = threading.Event(), tempfile.TemporaryDirectory()
    compiled = [(c.name, {key: value for key, value in c.point.items() if key != "seed"}) for c in configurations]
    workers = Workers(table.ahead, fresh=table.fresh)
    waiting = [(repeat, i) for repeat in range(repeats) for i, row in enumerate(call.rows) if repeat >= row["repeats"]]
    total = repeats * len(configurations)
    bar = tqdm(total=total, initial=total - len(waiting), desc=name, unit="run", disable=None, dynamic_ncols=True)

    def cache_of(index: int) -> Path | None:
        if configurations[index].warm:
            return Path(caches.name) / f"{compiled.index(compiled[index])}"
        return Path(caches.name) / "shared" if table.share_compiled else None

    def fill(index: int) -> None:
        if not stopped.is_set():
            run_once(table.base, configurations[index], workers, cache_of(index))

    def run(repeat: int, index: int) -> None:
        if stopped.is_set():
            return
        configuration = configurations[index]
        try:
            report = run_once(table.base, configuration, workers, cache_of(index))
            if stopped.is_set():  # it was stopped, which does not count as a failure
                return
            call.add(index, report)
        except BaseException:
            stopped.set()
            raise
        done = f"{time.monotonic() - started:5.0f} s  {repeat + 1}/{repeats}"
        tqdm.write(f"{done}  {configuration.name} {spell(configuration.point)} {_said(report)}")
        sys.stdout.flush()
        bar.update()

    fillers, pool, finished = ThreadPoolExecutor(table.warm_jobs), ThreadPoolExecutor(table.jobs), False
    to_fill = {compiled.index(compiled[i]) for _, i in waiting if configurations[i].warm}
    try:
        for future in [fillers.submit(fill, i) for i in sorted(to_fill)]:
            future.result()
        for future in [pool.submit(run, repeat, i) for repeat, i in waiting]:
            future.result()
        finished = not stopped.is_set()
    finally:
        stopped.set()
        workers.close()
        fillers.shutdown(cancel_futures=True)
        pool.shutdown(cancel_futures=True)
        caches.cleanup()
        bar.close()
        rows = call.end(finished=finished)
        if not finished:
            print(f"stopped; resume=true continues from {path}", file=sys.stderr, flush=True)
    return rows


def _identity(table: Table, configurations: Sequence[Configuration]) -> Row:
    """What identifies a call: a call can only be resumed by one with the same identity."""
    return {
        "base": table.base,
        "jobs": table.jobs,
        "fresh": table.fresh,
        "commit (or uncommitted changes)": code_version(ROOT),
        "configurations": hashlib.sha256(json.dumps(configurations).encode()).hexdigest()[:12],
    }


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


def run_once(base: str, configuration: Configuration, workers: Workers, cache: Path | None = None) -> Row:
    """Run one training process, and return its report or ``{"error": …}``. Without a ``cache``, compile caches are
    empty."""
    with tempfile.TemporaryDirectory() as runs:
        arguments = [
            "-f",
            str(ROOT / base),
            *configuration.overrides,
            f"runs_folder={runs}",
            "run_name=configuration",
            *_QUIET,
        ]
        program = f"benchmarks.peers.{configuration.peer}" if configuration.peer else TRAIN
        compiled = cache or Path(runs)  # inductor's cache, and that of the kernels of fused_layers
        environment = {"TORCHINDUCTOR_CACHE_DIR": f"{compiled}/inductor", "TRITON_CACHE_DIR": f"{compiled}/triton"}
        status, output, seconds = workers.run(program, arguments, environment, configuration.ranks)
        if status != 0:
            return error_report(status, output)
        report = json.loads((Path(runs) / "configuration" / "report.json").read_text())
        log = Path(runs) / "configuration" / "log-rank0.txt"
        if "losses" not in report and log.exists():
            report["losses"] = [float(value) for value in _LOSS.findall(log.read_text())]
        del report["wall_seconds"]  # the process may have waited for its turn
        return {**report, **seconds}


def leave_page(table: Table, rows: Sequence[Row], path: Path) -> list[Path]:
    """Write the page of a finished call and, if there is something to draw, its chart, next to the file of the rows."""
    from benchmarks.charts import draw_table  # imports Matplotlib, which the runs do not need

    text, chart = path.with_suffix(".md"), path.with_suffix(".png")
    drawn = draw_table(table, rows, chart)
    write_atomically(text, page(rows, path.stem, table.given, table.published.where, chart.name if drawn else ""))
    return [text, chart] if drawn else [text]


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
    print("\n".join(markdown(rows)))
    print("written:", *leave_page(table, rows, rows_file(configurations_of(table), path.stem, results)))


if __name__ == "__main__":
    main(sys.argv[1:])
