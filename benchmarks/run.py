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

Each run that ends is in its row at once. After a call that was stopped or killed, the same command with resume=true
goes on where it stopped: runs that are there are not run again. It must be of the same arms, overrides and code;
without an unfinished call it begins one, so that it can be given always.
"""

from __future__ import annotations

import hashlib
import itertools
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
from typing import Any, NamedTuple

import yaml
from tqdm import tqdm

from benchmarks.rows import RESULTS, Call, Row, call_time, describe_error, empty_row, error_report, folder_of, spell
from benchmarks.tables import markdown, page
from benchmarks.worker import TRAIN, Workers
from composer_speedups.core.files import write_atomically
from composer_speedups.core.subprocesses import command_output

ROOT = Path(__file__).parent.parent
_TABLES, _PEERS = ROOT / "benchmarks" / "tables", ROOT / "benchmarks" / "peers"
_KEYS = {"base", "set", "repeats", "matrix", "cumulative", "jobs", "ahead", "fresh", "losses", "published", "arms"}
_ON_SEVERAL_GPUS = "own_trainer"  # the peer that trains on them
_ARM_KEYS = {"peer", "ranks", "set", "warm"}
# A run that does not fit is a result; one with smaller micro-batches would be another arm.
_QUIET = ["trainer.progress_bar=false", "baseline=null", "export=false", "plot=false", "trainer.on_out_of_memory=stop"]
_LOSS = re.compile(r"^\[metric\]\[batch=\d+\]: loss/train/total: (\S+)", re.MULTILINE)


class Arm(NamedTuple):
    name: str
    point: dict[str, Any]  # its place in the matrix
    overrides: list[str]
    peer: str | None = None  # a module of benchmarks.peers in train.py's place
    warm: bool = False  # its runs find a filled compile cache
    ranks: int = 1  # processes, a GPU each, that train together


def arms_of(table: Row) -> list[Arm]:
    """Every arm at every point of the matrix."""
    matrix = table.get("matrix", {})
    arms = []
    for values in itertools.product(*matrix.values()):
        point = dict(zip(matrix, values, strict=True))
        kept: list[str] = []
        for name, given in table["arms"].items():
            arm = given if isinstance(given, dict) else {"set": given}
            own = list(arm.get("set", []))
            if table.get("cumulative") and "peer" not in arm:
                own = kept = kept + own
            placed = [f"{key}={json.dumps(value)}" for key, value in point.items()]
            logged = ["loggers.file={}"] if table.get("losses") else []
            if name in (table.get("only") or table["arms"]):
                overrides = [*table.get("set", []), *placed, *own, *logged, *table.get("last", [])]
                arms.append(Arm(name, point, overrides, **{key: arm[key] for key in arm if key != "set"}))
    return arms


def read_table(path: Path, overrides: Sequence[str] = ()) -> Row:
    """The table; overrides replace ``repeats`` and axes of the matrix, pick arms, and others go to every arm.

    Raises:
        SystemExit: A key that tables or arms do not have, an arm that is not there, an override that is no key=value.
    """
    table = yaml.safe_load(path.read_text())
    if "like" in table:
        table = _like(path.with_name(f"{table.pop('like')}.yaml"), table)
    if set(table) - _KEYS or not {"base", "arms"} <= set(table):
        raise SystemExit(f"{path}: needs base and arms; may have {', '.join(sorted(_KEYS))}")
    for name, arm in table["arms"].items():
        _check_arm(f"{path}: arm {name!r}", arm)
    published = table.get("published", {"where": "", "arms": {}})
    if set(published) != {"where", "arms"} or not set(published["arms"]) <= set(table["arms"]):
        raise SystemExit(f"{path}: published must have where (a text) and arms (those of the table, each with a text)")
    table["last"] = []
    table["given"] = [override for override in overrides if not override.startswith("resume=")]
    for override in overrides:
        key, sign, value = override.partition("=")
        if not sign:
            raise SystemExit(f"{override}: must be key=value, like repeats=2")
        if key in ("repeats", "jobs", "ahead"):
            if not value.isdecimal() or int(value) < 1:
                raise SystemExit(f"{override}: must be a whole number of at least 1")
            table[key] = int(value)
        elif key == "resume":
            if value not in ("true", "false"):
                raise SystemExit(f"{override}: must be true or false")
            table[key] = value == "true"
        elif key == "arms":
            table["only"] = yaml.safe_load(value)
            if not isinstance(table["only"], list) or not set(table["only"]) <= set(table["arms"]):
                raise SystemExit(f"arms={value}: must be a list of {', '.join(table['arms'])}")
        elif key in table.get("matrix", {}):
            table["matrix"][key] = [yaml.safe_load(value)]
        else:
            table["last"].append(override)
    return table


def _like(other: Path, own: Row) -> Row:
    """Another table with this one's keys in place of its own, its overrides after those, and nothing published."""
    if not other.is_file():
        raise SystemExit(f"{other}: no such table, which another is to be like")
    found = yaml.safe_load(other.read_text())
    found.pop("published", None)
    return {**found, **own, "set": [*found.get("set", []), *own.get("set", [])]}


def _check_arm(where: str, arm: Any) -> None:
    arm = arm if isinstance(arm, dict) else {"set": arm}
    given, ranks = arm.get("set", []), arm.get("ranks", 1)
    if set(arm) - _ARM_KEYS or not isinstance(given, list) or not all(isinstance(override, str) for override in given):
        raise SystemExit(
            f"{where} must be a list of overrides, each a string (in quotes where it has a colon), "
            f"or have {', '.join(sorted(_ARM_KEYS))}"
        )
    peers = sorted(p.stem for p in _PEERS.glob("*.py") if "def main(" in p.read_text())
    if arm.get("peer") not in (None, *peers):
        raise SystemExit(f"{where} names no peer; there are {', '.join(peers)}")
    if not isinstance(ranks, int) or ranks < 1:
        raise SystemExit(f"{where} has ranks {ranks!r}; it must be a whole number of at least 1")
    if ranks > 1 and arm.get("peer", _ON_SEVERAL_GPUS) != _ON_SEVERAL_GPUS:
        raise SystemExit(f"{where} is a peer that trains in one process; leave out ranks, or take {_ON_SEVERAL_GPUS}")


def rows_file(arms: Sequence[Arm], name: str, results: Path = RESULTS) -> Path:
    """``<results>/<gpu>/<name>.jsonl``, of the GPU that is there unless every arm trains on the CPU.

    The GPU was requested without torch, which would take memory on it.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    said = None
    if not hidden and not all("trainer.device=cpu" in arm.overrides for arm in arms):
        said = command_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader", timeout=60)
    return folder_of((said or "").split("\n")[0] or None, results) / f"{name}.jsonl"


def run_table(table: Row, name: str, results: Path = RESULTS) -> list[Row]:
    """Run all arms in turn, ``repeats`` times over, and keep the row of each with every run that ends."""
    arms, repeats, jobs = arms_of(table), table.get("repeats", 1), table.get("jobs", 1)
    path, when, published = rows_file(arms, name, results), call_time(), table.get("published", {}).get("arms", {})
    rows = [empty_row(name, when, arm, jobs, published.get(arm.name)) for arm in arms]
    call = Call(path, rows, _identity(table, arms), resume=table.get("resume", False))
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    stopped, caches = threading.Event(), tempfile.TemporaryDirectory()
    bytecode = Path(caches.name) / "bytecode"
    workers = Workers(table.get("ahead", 1), fresh=table.get("fresh", False), bytecode=bytecode)
    waiting = [(repeat, i) for repeat in range(repeats) for i, row in enumerate(call.rows) if repeat >= row["repeats"]]
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
            call.add(index, report)
        except BaseException:
            stopped.set()
            raise
        done = f"{time.monotonic() - started:5.0f} s  {repeat + 1}/{repeats}"
        tqdm.write(f"{done}  {arm.name} {spell(arm.point)} {_said(report)}")
        sys.stdout.flush()
        bar.update()

    pool, finished = ThreadPoolExecutor(jobs), False
    try:
        for future in [pool.submit(run, repeat, i) for repeat, i in waiting]:
            future.result()
        finished = not stopped.is_set()
    finally:
        stopped.set()
        workers.close()
        pool.shutdown(cancel_futures=True)
        caches.cleanup()
        bar.close()
        rows = call.end(finished=finished)
        if not finished:
            print(f"stopped; resume=true continues from {path}", file=sys.stderr, flush=True)
    return rows


def _identity(table: Row, arms: Sequence[Arm]) -> Row:
    """What a call is of; only a call of the same can go on with its runs."""
    return {
        "base": table["base"],
        "jobs": table.get("jobs", 1),
        "fresh": table.get("fresh", False),
        "commit (or uncommitted changes)": code_version(ROOT),
        "arms": hashlib.sha256(json.dumps(arms).encode()).hexdigest()[:12],
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


def run_once(base: str, arm: Arm, workers: Workers, cache: Path | None = None) -> Row:
    """One training process; its report, or ``{"error": …}``. Without a ``cache`` it compiles everything anew."""
    with tempfile.TemporaryDirectory() as runs:
        arguments = ["-f", str(ROOT / base), *arm.overrides, f"runs_folder={runs}", "run_name=arm", *_QUIET]
        program = f"benchmarks.peers.{arm.peer}" if arm.peer else TRAIN
        compiled = cache or Path(runs)  # inductor's, and what the kernels of fused_layers become
        environment = {"TORCHINDUCTOR_CACHE_DIR": f"{compiled}/inductor", "TRITON_CACHE_DIR": f"{compiled}/triton"}
        status, output, seconds = workers.run(program, arguments, environment, arm.ranks)
        if status != 0:
            return error_report(status, output)
        report = json.loads((Path(runs) / "arm" / "report.json").read_text())
        log = Path(runs) / "arm" / "log-rank0.txt"
        if "losses" not in report and log.exists():
            report["losses"] = [float(value) for value in _LOSS.findall(log.read_text())]
        del report["wall_seconds"]  # since the process began, which may have waited for its turn
        return {**report, **seconds}


def leave_page(table: Row, rows: Sequence[Row], path: Path) -> list[Path]:
    """Write a finished call's page and, where there is something to draw, its chart beside the file of the rows."""
    from benchmarks.charts import draw_table  # Matplotlib, which the runs do not wait for

    text, chart = path.with_suffix(".md"), path.with_suffix(".png")
    drawn = draw_table(table, rows, chart)
    where = table.get("published", {"where": ""})["where"]
    write_atomically(text, page(rows, path.stem, table.get("given", []), where, chart.name if drawn else ""))
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
    print("written:", *leave_page(table, rows, rows_file(arms_of(table), path.stem, results)))


if __name__ == "__main__":
    main(sys.argv[1:])
