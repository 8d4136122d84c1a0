"""python -m benchmarks.mutants PACKAGE [sample=40] [seed=1] [jobs=2]: mutation testing of one package.

A mutant is a module with one change by an operator of Cosmic Ray: another comparison, number, arithmetic or boolean
operator, a loop without iterations, a removed decorator. The tests of the module run against each mutant of a random
sample, in a copy of the repository. Cosmic Ray is not a development dependency:

    uv run --with "cosmic-ray>=8.7,<9" python -m benchmarks.mutants callbacks

Each mutant's tests run in a process forked from one that has imported torch, Composer and transformers, but nothing of
this package, so that a mutant takes only as long as its tests. Tests marked ``gpu`` or ``long`` are not run.

The outcomes are ``killed`` (a test failed), ``timed_out`` (after three times the duration with the unchanged module
plus 20 s), ``survived`` (all tests passed) and ``not_run`` (all passed, and none of them runs the changed line on a
CPU). A row in ``results/cpu/mutants.jsonl`` has the counts and the mutants that survived or were not run.
``again=true`` repeats those of the package's last row with the current code and tests.

PACKAGE is ``kernels``, ``algorithms``, ``checkpoints`` or ``callbacks``. Sampling draws a location first and then one
of its operators, because Cosmic Ray has eleven operators for each arithmetic operation. Annotations are not mutated.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "kernels": "composer_speedups/kernels",
    "algorithms": "composer_speedups/algorithms",
    "checkpoints": "composer_speedups/train/checkpoints",
    "callbacks": "composer_speedups/callbacks",
}
_TESTS = {  # in addition to files named after the module or its folder
    "kernels/compile_ahead": ["kernels/test_fused_compile.py"],
    "kernels/disentangled_attention": ["kernels/test_kernels.py"],
    "kernels/": ["kernels/test_kernels.py"],
    "callbacks/guarded_logger": ["train/test_recording.py"],
    "train/checkpoints/": [
        "train/test_checkpoint_structure.py",
        "train/test_malformed_checkpoints.py",
        "train/test_checkpoint_attacks.py",
        "train/test_autoresume.py",
        "core/test_guards_and_resume.py",
    ],
    "algorithms/foreach_optimizer/": ["core/test_optimizer_flags.py"],
    "algorithms/fused_optimizer/": ["core/test_optimizer_flags.py"],
    "algorithms/torch_compile/": ["algorithms/test_compile_cache.py"],
    "algorithms/fused_layers/layer": ["kernels/test_kernels.py"],
    "algorithms/fused_layers/": ["algorithms/test_compile_with_techniques.py", "algorithms/test_fused_dropout.py"],
    "algorithms/cuda_graphs/": ["kernels/test_capture.py"],
    "callbacks/divergence": ["callbacks/test_finite_loss.py", "core/test_guards_and_resume.py"],
    "callbacks/finite_loss": ["core/test_guards_and_resume.py"],
    "callbacks/nonfinite": ["callbacks/test_finite_loss.py"],
    "callbacks/checkpoint_veto": ["callbacks/test_finite_loss.py", "core/test_guards_and_resume.py"],
    "callbacks/throughput": ["callbacks/test_steady_state.py"],
    "callbacks/peaks": ["callbacks/test_throughput.py", "algorithms/test_kahan_optimizer.py"],
    "callbacks/engagement": ["core/test_late_failures.py", "core/test_technique.py"],
    "callbacks/run_history": ["core/test_resume_guard.py", "train/test_malformed_checkpoints.py"],
    "callbacks/wandb_axes": ["train/test_loggers.py"],
    "callbacks/learning_curves": ["train/test_console.py"],
    "callbacks/optimizer_monitor": ["train/test_console.py"],
}
_PRELOADED = "torch torch._dynamo transformers composer composer.loggers triton numpy pytest torchmetrics datasets"
# its name, its module, the module's code, its tests, timeout in seconds
Job = tuple[Any, str, str, Sequence[str], float]


@dataclass(frozen=True)
class Mutant:
    """One change of a module. ``changed`` lists the lines that differ, in the format of ``diff``."""

    module: str
    line: int
    operator: str
    changed: str


class Tree:
    """A copy of the repository in which one module at a time is replaced."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._written = folder, int(time.time())
        for name in subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split("\n"):
            if name and not name.startswith("benchmarks/results/") and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def write(self, module: str, code: str) -> None:
        path = self.folder / module
        path.write_text(code)
        self._written += 2  # bytecode is invalidated by modification times in whole seconds
        os.utime(path, (self._written, self._written))


def modules_of(package: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / PACKAGES[package]).rglob("*.py"))


def tests_of(module: str) -> list[str]:
    """The test files of a module: those named after it or its folder, and those in ``_TESTS``."""
    within = module.removeprefix("composer_speedups/").removesuffix(".py")
    area, *_, stem = within.split("/")
    name = within.split("/")[1] if area == "algorithms" else stem
    named = [path for path in (ROOT / "tests" / area).glob("test_*.py") if path.stem.startswith(f"test_{name}")]
    listed = [ROOT / "tests" / test for key, tests in _TESTS.items() if within.startswith(key) for test in tests]
    return sorted({str(path.relative_to(ROOT)) for path in (*named, *listed)})


def locations(code: str) -> dict[tuple[Any, Any], list[tuple[str, int]]]:
    """The locations that Cosmic Ray can change: (start, end) → operators by name, and the indices of their
    occurrences."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    left_alone = list(_annotations(ast.parse(code)))
    tree = get_ast(code)
    found: dict[tuple[Any, Any], list[tuple[str, int]]] = {}
    for name in operator_names():
        operator = get_operator(name)
        if operator.arguments():
            continue
        positions = (position for node in ast_nodes(tree) for position in operator().mutation_positions(node))
        for occurrence, (start, end) in enumerate(positions):
            if not any(first <= start and end <= last for first, last in left_alone):
                found.setdefault((start, end), []).append((name, occurrence))
    return found


def _annotations(tree: ast.AST) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            given = getattr(node, name, None)
            if given is not None:
                yield (given.lineno, given.col_offset), (given.end_lineno, given.end_col_offset)


def drawn(package: str, sample: int, seed: int) -> list[tuple[Mutant, str]]:
    """Draw a sample of a package's mutants, with the module's code for each."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    codes = {module: (ROOT / module).read_text() for module in modules_of(package)}
    everywhere = [(module, at, changes) for module, code in codes.items() for at, changes in locations(code).items()]
    chance = random.Random(seed)
    chance.shuffle(everywhere)
    found: list[tuple[Mutant, str]] = []
    for module, ((line, _), _), changes in everywhere:
        operator, occurrence = chance.choice(changes)
        if len(found) == sample:
            break
        try:
            mutated = mutate_code(codes[module], get_operator(operator)(), occurrence)
        except AttributeError:  # Cosmic Ray's exception replacer does not support dotted names
            continue
        if mutated is None or not _compiles(mutated):
            continue
        found.append((Mutant(module, line, operator.removeprefix("core/"), _changed(codes[module], mutated)), mutated))
    return found


def _compiles(code: str) -> bool:
    try:
        compile(code, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _changed(code: str, mutated: str) -> str:
    lines = list(difflib.unified_diff(code.splitlines(), mutated.splitlines(), n=0, lineterm=""))[3:]
    return "\n".join(line[0] + " " + line[1:].strip() for line in lines)


def anew(mutants: Sequence[dict[str, Any]]) -> list[tuple[Mutant, str]]:
    """Earlier mutants applied to the current code; those whose line has changed since are left out and named."""
    found = []
    for each in mutants:
        code = (ROOT / each["module"]).read_text().splitlines()
        old = [line[2:] for line in each["changed"].splitlines() if line.startswith("- ")]
        new = [line[2:] for line in each["changed"].splitlines() if line.startswith("+ ")]
        at = [i for i in range(len(code)) if [line.strip() for line in code[i : i + len(old)]] == old]
        if not at:
            print(f"left out, because its line has changed: {each['module']}:{each['line']}", flush=True)
            continue
        first = min(at, key=lambda i: abs(i + 1 - each["line"]))
        spaces = code[first][: len(code[first]) - len(code[first].lstrip())]
        mutated = "\n".join([*code[:first], *(spaces + line for line in new), *code[first + len(old) :], ""])
        found.append((Mutant(each["module"], first + 1, each["operator"], each["changed"]), mutated))
    return found


def reaching(code: str, line: int) -> str | None:
    """The code with an error raised before the statement at a line; None outside functions, which every import runs."""
    best: ast.stmt | None = None
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef):
            for each in ast.walk(node):
                if isinstance(each, ast.stmt) and each is not node and each.lineno <= line <= (each.end_lineno or 0):
                    best = each if best is None or each.lineno >= best.lineno else best
    if best is None:
        return None
    lines = code.splitlines(keepends=True)
    lines.insert(best.lineno - 1, " " * best.col_offset + 'raise RuntimeError("reached")\n')
    return "".join(lines)


class Lane:
    """A tree, and the process that runs tests in it, forked from this one."""

    def __init__(self, folder: Path) -> None:
        self.tree, self._pid, self._until, self._began = Tree(folder), 0, 0.0, 0.0
        self.job: Any = None

    def start(self, job: Any, module: str, code: str, tests: Sequence[str], limit: float) -> None:
        self.tree.write(module, code)
        self.job, self._module, self._began = job, module, time.monotonic()
        self._until = self._began + limit
        self._pid = os.fork()
        if not self._pid:
            self._child(tests)

    def _child(self, tests: Sequence[str]) -> None:
        status = 70
        try:
            os.setsid()
            os.chdir(self.tree.folder)
            log = os.open("mutant.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.path[:] = [str(self.tree.folder), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
            os.environ["PYTHONPATH"] = str(self.tree.folder)
            import pytest

            options = ["-x", "-q", "-m", "not gpu and not long", "-p", "no:cacheprovider", "-p", "no:xdist"]
            preloaded = "ignore::pytest.PytestAssertRewriteWarning"  # including modules of plugins
            status = int(pytest.main([*options, "-W", preloaded, *tests]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def ended(self) -> tuple[str, float] | None:
        """``passed``, ``failed`` or ``timed_out`` with its duration; None while the tests run."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        late = time.monotonic() > self._until
        if not pid and not late:
            return None
        if not pid:
            os.killpg(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self.tree.write(self._module, (ROOT / self._module).read_text())
        code = os.waitstatus_to_exitcode(status)
        if not late and code in (4, 5, 70):
            raise SystemExit(f"pytest could not run: {(self.tree.folder / 'mutant.log').read_text()[-2000:]}")
        return "timed_out" if late else "passed" if code == 0 else "failed", time.monotonic() - self._began


def run_all(jobs: Sequence[Job], lanes: Sequence[Lane]) -> Iterator[tuple[Any, str, float]]:
    """Yield each job with the result and duration of its tests; runs as many at a time as there are lanes."""
    waiting, free = list(reversed(jobs)), list(lanes)
    busy: list[Lane] = []
    while waiting or busy:
        while waiting and free:
            lane = free.pop()
            lane.start(*waiting.pop())
            busy.append(lane)
        time.sleep(0.05)
        for lane in list(busy):
            if (ended := lane.ended()) is not None:
                busy.remove(lane)
                free.append(lane)
                yield lane.job, *ended


def measure(mutants: Sequence[tuple[Mutant, str]], jobs: int) -> list[tuple[Mutant, str]]:
    """Each mutant with its outcome: ``killed``, ``timed_out``, ``survived`` or ``not_run``."""
    results: list[tuple[Mutant, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        lanes = [Lane(Path(folder) / str(number)) for number in range(jobs)]
        selections = {tuple(tests_of(mutant.module)): mutant.module for mutant, _ in mutants}
        plain = [(tests, module, (ROOT / module).read_text(), tests, 900.0) for tests, module in selections.items()]
        seconds: dict[Any, float] = {}
        for tests, outcome, took in run_all(plain, lanes):
            if outcome != "passed":
                logs = [log.read_text()[-3000:] for lane in lanes if (log := lane.tree.folder / "mutant.log").exists()]
                raise SystemExit(f"without a mutant {outcome}: {' '.join(tests)}\n" + "\n".join(logs))
            seconds[tests] = took
            print(f"{took:6.1f} s unchanged: {' '.join(tests)}", flush=True)

        def job(mutant: Mutant, code: str) -> Job:
            tests = tuple(tests_of(mutant.module))
            return mutant, mutant.module, code, tests, 3 * seconds[tests] + 20

        left = []
        for mutant, outcome, took in run_all([job(*each) for each in mutants], lanes):
            print(f"{took:6.1f} s {outcome}: {mutant.module}:{mutant.line} {mutant.operator}", flush=True)
            if outcome == "passed":
                left.append(mutant)
            else:
                results.append((mutant, "killed" if outcome == "failed" else outcome))
        code_of = {mutant.module: (ROOT / mutant.module).read_text() for mutant in left}
        raising = {mutant: reaching(code_of[mutant.module], mutant.line) for mutant in left}
        checks = [job(mutant, code) for mutant, code in raising.items() if code is not None]
        reached = {mutant: outcome != "passed" for mutant, outcome, _ in run_all(checks, lanes)}
    return results + [(mutant, "survived" if reached.get(mutant, True) else "not_run") for mutant in left]


def main(arguments: Sequence[str]) -> None:
    package, *given = arguments or [""]
    settings = {"sample": "40", "seed": "1", "jobs": "2", "again": "false"}
    unknown = [each for each in given if each.partition("=")[0] not in settings]
    if package not in PACKAGES or unknown:
        raise SystemExit(
            f"python -m benchmarks.mutants {'|'.join(PACKAGES)} [{'] ['.join(f'{k}={v}' for k, v in settings.items())}]"
        )
    settings |= dict(each.split("=", 1) for each in given)
    for variable, value in {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}.items():
        os.environ.setdefault(variable, value)
    again = settings["again"] == "true"
    rows = ROOT / "benchmarks/results/cpu/mutants.jsonl"
    last: dict[str, Any] = {}
    if again:
        last = [row for row in map(json.loads, rows.read_text().splitlines()) if row["package"] == package][-1]
        mutants = anew(last["left"])
    else:
        mutants = drawn(package, int(settings["sample"]), int(settings["seed"]))
    for name in _PRELOADED.split():
        __import__(name)
    began = time.monotonic()
    results = measure(mutants, int(settings["jobs"]))
    seconds = round(time.monotonic() - began)

    from benchmarks.rows import append_row, call_time  # after the last fork, because it imports this package
    from composer_speedups.train.environment import environment

    counts = Counter(outcome for _, outcome in results)
    row = {
        "table": "mutants",
        "call": call_time(),
        "package": package,
        "seed": last.get("seed", int(settings["seed"])),
        "again": last.get("call"),
        "mutants": len(results),
        **{kind: counts[kind] for kind in ("killed", "timed_out", "survived", "not_run")},
        "seconds": seconds,
        "left": [{**asdict(mutant), "outcome": kind} for mutant, kind in results if kind in ("survived", "not_run")],
        "environment": {**environment(), "gpu": None},
    }
    append_row(row, "mutants")
    print(json.dumps({key: value for key, value in row.items() if key not in ("left", "environment")}))


if __name__ == "__main__":
    main(sys.argv[1:])
