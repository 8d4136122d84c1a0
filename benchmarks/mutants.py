"""python -m benchmarks.mutants PACKAGE [key=value ...]: mutation testing of one package.

A mutant is a module with one change by an operator of Cosmic Ray: another comparison, number, arithmetic or boolean
operator, a loop without iterations, a removed decorator. The script draws a sample of them and runs tests against each,
in a copy of the working tree: first the quick tests that are named after the module, then, if these pass, the tests
that ``mutants.toml`` lists for the package. Cosmic Ray is not a development dependency:

    uv run --with "cosmic-ray>=8.7,<9" python -m benchmarks.mutants callbacks

Keys are ``sample``, the number of mutants (20), ``seed`` of the draw (1), the number of ``jobs`` (2), and
``exhaustive``: false runs only those of the tests that plain ``pytest`` runs; true, the default, all without a GPU.

A mutant is ``killed`` if a test fails, ``timed_out`` after the time that the file allows, and ``survived`` if all tests
pass. Survivors that someone has read and listed in ``mutants.toml`` are ``equivalent``, if the changed code computes
the same, or ``not_run``, if no test can run the line without a GPU. The tests that failed run once more in an
unchanged copy, where they must pass.

A row in ``results/cpu/mutants.jsonl`` has the counts, the survivors, and which test killed which mutant. A location is
drawn first and then one of its operators, because Cosmic Ray has eleven operators for each arithmetic operation. A
change that is no valid Python is not drawn.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import Field

from benchmarks.rows import append_row, call_time
from composer_speedups.core.command_line import parse_command_line, read_settings
from composer_speedups.core.errors import ConfigError, did_you_mean
from composer_speedups.core.settings import Settings
from composer_speedups.train.cli import exit_codes
from composer_speedups.train.environment import environment

ROOT = Path(__file__).parent.parent
CONFIG = tomllib.loads((ROOT / "benchmarks" / "mutants.toml").read_text())
PACKAGES: dict[str, Any] = CONFIG["packages"]
_LEFT = ("survived", "timed_out")
_NOT_COPIED = shutil.ignore_patterns(".*", "runs", "site", "__pycache__")  # results are copied, as tests read them


class Sample(Settings):
    """The keys of the command line."""

    sample: int = Field(20, ge=1)
    seed: int = Field(1)
    jobs: int = Field(2, ge=1)
    exhaustive: bool = Field(True)


def modules_of(package: str) -> list[Path]:
    """The modules of a package, relative to the repository."""
    return sorted(path.relative_to(ROOT) for path in (ROOT / PACKAGES[package]["modules"]).rglob("*.py"))


def _existing(patterns: Sequence[str]) -> list[str]:
    """The paths that match, relative to the repository, in the order of the patterns."""
    paths = [str(path.relative_to(ROOT)) for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return list(dict.fromkeys(paths))


def tests_named_after(module: Path) -> list[str]:
    """The test files named after a module, then those named after its folder within the package."""
    area, *folders = module.parts[1:-1]
    return _existing([f"tests/{area}/test_{name}*.py" for name in (module.stem, *folders[:1])])


def is_python(mutation: Any) -> bool:
    """Whether the changed module can be compiled; Cosmic Ray also takes the ``*`` of a signature for a product."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    operator = get_operator(mutation.operator_name)(**mutation.operator_args)
    try:
        compile(mutate_code((ROOT / mutation.module_path).read_text(), operator, mutation.occurrence), "mutant", "exec")
    except SyntaxError:
        return False
    return True


def draw(mutations: Sequence[Any], sample: int, seed: int, allowed: Callable[[Any], bool]) -> list[Any]:
    """Draw mutations at different locations, one operator each, without those that ``mutants.toml`` excludes."""
    excluded = re.compile("|".join(CONFIG["cosmic-ray"]["filters"]["operators-filter"]["exclude-operators"]))
    locations: dict[Any, list[Any]] = {}
    for mutation in mutations:
        if not excluded.match(mutation.operator_name):
            at = (str(mutation.module_path), mutation.start_pos, mutation.end_pos)
            locations.setdefault(at, []).append(mutation)
    chance = random.Random(seed)
    order = chance.sample(sorted(locations), len(locations))
    return list(islice(filter(allowed, (chance.choice(sorted(locations[at], key=repr)) for at in order)), sample))


def every_mutation(package: str) -> list[Any]:
    """Cosmic Ray's ``MutationSpec`` of every possible change of a package."""
    from cosmic_ray.commands import init
    from cosmic_ray.work_db import WorkDB, use_db

    with tempfile.TemporaryDirectory() as folder, use_db(f"{folder}/session.sqlite", WorkDB.Mode.create) as session:
        init(modules_of(package), session, {})
        return [item.mutations[0] for item in session.pending_work_items]


def enter_copy(folder: str) -> None:
    """Copy the working tree for one process, and let it and its tests run there."""
    copy = Path(tempfile.mkdtemp(dir=folder)) / "tree"
    shutil.copytree(ROOT, copy, ignore=_NOT_COPIED)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH")])])


def try_mutation(mutation: Any, commands: Sequence[str]) -> dict[str, str]:
    """The outcome, the changed lines, and for a killed mutant the test that failed or the end of the output."""
    from cosmic_ray.mutating import mutate_and_test
    from cosmic_ray.work_item import TestOutcome

    outcomes = {TestOutcome.KILLED: "killed", TestOutcome.SURVIVED: "survived", TestOutcome.INCOMPETENT: "not_possible"}
    for command in commands or ["true"]:
        result = mutate_and_test([mutation], command, CONFIG["cosmic-ray"]["timeout"])
        outcome = "timed_out" if result.output == "timeout" else outcomes[result.test_outcome]
        if outcome == "killed" and re.search(r"^(\d+ deselected|no tests ran) in ", result.output or "", re.MULTILINE):
            outcome = "survived"
        if outcome != "survived":
            break
    lines = [line for line in (result.diff or "").splitlines() if re.match(r"[+-](?![+-]{2} )", line)]
    changed = "\n".join(f"{line[0]} {line[1:].strip()}" for line in lines)
    tried = {"outcome": outcome, "changed": changed}
    if outcome == "killed":
        output = result.output or ""
        failed = re.search(r"^(?:FAILED|ERROR) (\S+\.py(?:::.+?)?)(?: - |$)", output, re.MULTILINE)
        tried["by"] = failed[1] if failed else output[-500:]
    return tried


def judged_by_reading(mutant: dict[str, Any]) -> dict[str, Any]:
    """A mutant with the outcome that ``mutants.toml`` gives to it, and the reason, if it was not killed."""
    if mutant["outcome"] in _LEFT:
        for entry in CONFIG["judged"]:
            if entry["module"] == mutant["module"] and entry["changed"] in mutant["changed"].splitlines():
                return {**mutant, "outcome": entry["outcome"], "why": entry["why"]}
    return mutant


def _command(*, exhaustive: bool, quick: bool = False) -> str:
    """Pytest's command for tests that need no GPU; ``quick`` leaves out those that start a training process."""
    unwanted = ["gpu", "long", *["exhaustive"] * (not exhaustive), *["slow"] * quick]
    return f"{CONFIG['cosmic-ray']['test-command']} -m '{' and '.join(f'not {marker}' for marker in unwanted)}'"


def commands_for(mutation: Any, package: str, *, exhaustive: bool) -> list[str]:
    """The commands that test a mutation, the quickest first."""
    named = tests_named_after(mutation.module_path)
    every = list(dict.fromkeys([*named, *_existing(PACKAGES[package]["tests"])]))
    quick = [f"{_command(exhaustive=False, quick=True)} {shlex.join(named)}"] if named else []
    return [*quick, f"{_command(exhaustive=exhaustive)} {shlex.join(every)}"]


def main(arguments: Sequence[str]) -> None:
    line = parse_command_line(arguments, "PACKAGE", help=lambda: str(__doc__))
    (package,) = line.words
    if package not in PACKAGES:
        raise ConfigError(f"{package}: no such package in mutants.toml{did_you_mean(package, PACKAGES)}")
    settings, _ = read_settings(Sample, line.overrides)
    os.chdir(ROOT)
    began, call = time.monotonic(), call_time()
    where = {**environment(), "gpu": None}  # with the commit, while the files are those that are copied
    drawn = draw(every_mutation(package), settings.sample, settings.seed, is_python)
    tried: list[dict[str, Any]] = []
    commands = [commands_for(mutation, package, exhaustive=settings.exhaustive) for mutation in drawn]
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(settings.jobs, initializer=enter_copy, initargs=(folder,)) as pool,
    ):
        for mutation, result in zip(drawn, pool.map(try_mutation, drawn, commands), strict=True):
            place = {"module": str(mutation.module_path), "line": mutation.start_pos[0]}
            tried.append(judged_by_reading({**place, "operator": mutation.operator_name, **result}))
            print(tried[-1], flush=True)
        killers = sorted({mutant["by"] for mutant in tried if ".py" in mutant.get("by", "").split("::")[0]})
        if killers:
            enter_copy(folder)
            command = [*shlex.split(_command(exhaustive=True)), *killers]
            checked = subprocess.run(command, capture_output=True, text=True)
            os.chdir(ROOT)
            if checked.returncode:
                raise SystemExit(f"{checked.stdout}\nthese tests do not pass without a mutant: {shlex.join(killers)}")
    tried = [mutant for mutant in tried if mutant["outcome"] != "not_possible"]
    counts = Counter(mutant["outcome"] for mutant in tried)
    row = {
        "table": "mutants",
        "call": call,
        "package": package,
        "seed": settings.seed,
        "exhaustive": settings.exhaustive,
        "mutants": counts.total(),
        **{outcome: counts[outcome] for outcome in ("killed", "timed_out", "survived", "equivalent", "not_run")},
        "seconds": round(time.monotonic() - began),
        "left": [mutant for mutant in tried if mutant["outcome"] in _LEFT],
        "gone": [mutant for mutant in tried if mutant["outcome"] not in _LEFT],
        "environment": where,
    }
    append_row(row, "mutants")
    print({key: value for key, value in row.items() if key not in ("left", "gone", "environment")})


if __name__ == "__main__":
    with exit_codes("benchmarks.mutants"):
        main(sys.argv[1:])
