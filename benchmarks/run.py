"""python -m benchmarks.run TABLE [key=value ...]: run a table's arms, each in a process of its own; keep the rows.

A table is a YAML file under benchmarks/tables (its name without .yaml will do)::

    base: yamls/bert_imdb_fp32.yaml   # config of every arm
    set: [trainer.max_duration=60ba]  # overrides of every arm
    repeats: 3                        # runs of every arm; arms take turns
    matrix: {data.batch_size: [40, 128]}  # every arm at every value
    cumulative: true                  # an arm keeps the overrides of those above it; peers neither take nor add
    jobs: 4                           # runs at a time; for accuracy: speeds are then left out of the rows
    ahead: 8                          # processes that import at once and then wait for their turn
    fresh: true                       # cold processes instead (but for Python's bytecode), timed from start to end
    losses: true                      # rows keep the loss of every batch of the last run
    like: finetune                    # another table's keys where this one has none; its overrides, then those of set
    published: {where: "a V100", arms: {fp32: "8.86 samples/s"}}  # what others measured, shown beside the rows
    arms:
      fp32: []
      + TF32: ["algorithms.tf32_matmul={}"]
      + TF32, warm: {set: ["algorithms.torch_compile={}"], warm: true}
      2 GPUs: {ranks: 2}
      HF Trainer: {peer: hf_trainer, set: [peer.torch_compile_mode=default]}

``peer`` names a module of benchmarks.peers that runs in train.py's place, with the same base and overrides; an arm with
``ranks`` is started by ``composer -n RANKS``. Every run compiles anew; the runs of an arm with ``warm`` share a compile
cache, which one run that is not counted has filled.

On the command line, repeats=2, jobs=1, ahead=1 and data.batch_size=40 replace the table's own, "arms=[fp32, + TF32]"
runs those only (the first is what the others are compared with), and other overrides come last. Rows are kept in
benchmarks/results/<gpu>/<table>.jsonl, one an arm and point of the matrix, with the median, least and greatest
of its runs; rows of one call have one time in ``call``, and only those compare. A failed run leaves its error, and its
row and the printed table say what kind: out of memory, refused (a config or a missing package) or failed. Beside the
rows, <table>.md and <table>.png show those of the last finished call.

Until a call is finished, each run that ends is kept in <table>.runs.jsonl beside the rows. After a call that was
stopped or killed, the same command with resume=true goes on where it stopped: runs that are there are not run again. It
must be of the same arms, overrides and code; without an unfinished call it begins one, so that it can be given always.
Without resume=true, an unfinished call's runs become rows, and a new call begins.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from benchmarks.call import Call, leave_page
from benchmarks.failures import failure, reason
from benchmarks.printed import markdown
from benchmarks.rows import RESULTS, Row, row_of, spell
from benchmarks.table import Arm, arms_of, read_table
from benchmarks.worker import Workers

__all__ = ["Arm", "arms_of", "markdown", "read_table", "row_of", "run_once", "run_table"]

ROOT = Path(__file__).parent.parent
# A run that does not fit is a result; one with smaller micro-batches would be another arm.
_QUIET = ["trainer.progress_bar=false", "export=false", "plot=false", "trainer.on_out_of_memory=stop"]
_LOSS = re.compile(r"^\[metric\]\[batch=\d+\]: loss/train/total: (\S+)", re.MULTILINE)


def run_table(table: Row, name: str, results: Path = RESULTS) -> list[Row]:
    """Run all arms in turn, ``repeats`` times over, and keep a row for each that ran, also when stopped."""
    arms, repeats, jobs = arms_of(table), table.get("repeats", 1), table.get("jobs", 1)
    call = Call.begin(table, name, arms, results)
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    stopped, caches = threading.Event(), tempfile.TemporaryDirectory()
    bytecode = Path(caches.name) / "bytecode"
    workers = Workers(table.get("ahead", 1), fresh=table.get("fresh", False), bytecode=bytecode)
    waiting = [(repeat, i) for repeat in range(repeats) for i in range(len(arms)) if (i, repeat) not in call.runs]
    total = repeats * len(arms)
    bar = tqdm(total=total, initial=total - len(waiting), desc=name, unit="run", disable=None, dynamic_ncols=True)

    def run(repeat: int, index: int) -> None:
        if stopped.is_set():
            return
        arm = arms[index]
        cache = Path(caches.name) / f"{index}"
        try:
            if arm.warm and not cache.exists():
                run_once(table["base"], arm, workers, cache)
            report = run_once(table["base"], arm, workers, cache if arm.warm else None)
            if stopped.is_set():  # it was ended, which says nothing about the arm
                return
            call.add(index, repeat, report)
        except BaseException:
            stopped.set()
            raise
        done = f"{time.monotonic() - started:5.0f} s  {repeat + 1}/{repeats}"
        tqdm.write(f"{done}  {arm.name} {spell(arm.point)} {_said(report)}")
        sys.stdout.flush()
        bar.update()

    pool = ThreadPoolExecutor(jobs)
    try:
        for future in [pool.submit(run, repeat, i) for repeat, i in waiting]:
            future.result()
    finally:
        whole = not stopped.is_set() and len(call.runs) >= total
        stopped.set()
        workers.close()
        pool.shutdown(cancel_futures=True)
        caches.cleanup()
        bar.close()
        rows = call.end(finished=whole)
    return rows


def _said(report: Row) -> str:
    if "error" in report:
        kind = report.get("error_kind", "failed")
        return kind if kind == "out of memory" else f"{kind}: {reason(report['error'])}"
    throughput, accuracy = report["throughput"], report["metrics"].get("accuracy")
    said = f"accuracy {accuracy:.4f}, " if accuracy is not None else ""
    if "process_seconds" in report:
        said += f"{report['process_seconds']:.1f} s in all, "
    return f"{said}{throughput['samples_per_sec']:,.0f} samples/s, warm-up {throughput['warmup_seconds']:.0f} s"


def run_once(base: str, arm: Arm, workers: Workers, cache: Path | None = None) -> Row:
    """One training process; its report, or ``{"error": …}``.

    Args:
        base: Config, from the repository's root.
        arm: Its overrides, and the peer in train.py's place.
        workers: What starts it.
        cache: Folder of the compile cache; None for an empty one.
    """
    with tempfile.TemporaryDirectory() as runs:
        arguments = ["-f", str(ROOT / base), *arm.overrides, f"runs_folder={runs}", "run_name=arm", *_QUIET]
        program = f"benchmarks.peers.{arm.peer}" if arm.peer else "train"
        compiled = cache or Path(runs)  # inductor's, and what the kernels of fused_layers become
        environment = {"TORCHINDUCTOR_CACHE_DIR": f"{compiled}/inductor", "TRITON_CACHE_DIR": f"{compiled}/triton"}
        status, output, seconds = workers.run(program, arguments, environment, arm.ranks)
        if status != 0:
            return failure(status, output)
        report = json.loads((Path(runs) / "arm" / "report.json").read_text())
        log = Path(runs) / "arm" / "log-rank0.txt"
        if "losses" not in report and log.exists():
            report["losses"] = [float(value) for value in _LOSS.findall(log.read_text())]
        del report["wall_seconds"]  # since the process began, which may have waited for its turn
        return {**report, **seconds}


def main(arguments: Sequence[str]) -> None:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        raise SystemExit(0 if arguments else 2)
    path = Path(arguments[0])
    if not path.suffix:
        path = ROOT / "benchmarks" / "tables" / f"{arguments[0]}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in (ROOT / "benchmarks" / "tables").glob("*.yaml")))
        raise SystemExit(f"{path}: no such table; there are {known}")
    table = read_table(path, arguments[1:])
    rows = run_table(table, path.stem)
    print("\n".join(markdown(rows)))
    from benchmarks.charts import draw_table  # Matplotlib, which the runs do not wait for

    print("written:", *leave_page(table, rows, path.stem, draw_table))


if __name__ == "__main__":
    main(sys.argv[1:])
