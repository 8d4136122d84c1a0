"""python -m benchmarks.mutants PACKAGE [key=value ...]: mutation testing of one package.

A mutant is a module with one change by an operator of Cosmic Ray: another comparison, number, arithmetic or boolean
operator, a loop without iterations, a removed decorator. The script draws a sample of them and runs tests against each,
in a copy of the working tree: first the tests that are named after the module, then those that ``mutants.toml`` lists
for the package. Cosmic Ray is not a development dependency:

    uv run --with "cosmic-ray>=8.7,<9" python -m benchmarks.mutants callbacks

Keys are ``sample``, the number of mutants (20), ``seed`` of the draw (1), the number of ``jobs`` (2), and
``exhaustive``: false runs only those of the tests that plain ``pytest`` runs, true (the default) all that need no GPU.

A mutant is ``killed`` if a test fails, ``timed_out`` after the time that the file allows, and ``survived`` if all tests
pass, also where no test runs the line on a CPU. A row in ``results/cpu/mutants.jsonl`` has the counts and the
survivors. A location is drawn first and then one of its operators, because Cosmic Ray has eleven operators for each
arithmetic operation.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
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
_NOT_COPIED = shutil.ignore_patterns(".*", "results", "runs", "site", "__pycache__")


class Sample(Settings):
    """The keys of the command line."""

    sample: int = Field(20, ge=1)
    seed: int = Field(1)
    jobs: int = Field(2, ge=1)
    exhaustive: bool = Field(True)


def modules_of(package: str) -> list[Path]:
    """The modules of a package, relative to the repository."""
    return sorted(path.relative_to(ROOT) for path in (ROOT / PACKAGES[package]["modules"]).rglob("*.py"))


def tests_of(module: Path, package: str) -> list[str]:
    """The test files named after a module or its technique's folder, and then the package's tests."""
    area = module.parts[1]
    name = module.parts[2] if area == "algorithms" else module.stem
    patterns = [f"tests/{area}/test_{name}*.py", *PACKAGES[package]["tests"]]
    paths = [str(path.relative_to(ROOT)) for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return list(dict.fromkeys(paths))


def draw(mutations: Sequence[Any], sample: int, seed: int) -> list[Any]:
    """Draw mutations at different locations, one operator each, without the operators that ``mutants.toml`` excludes.

    Args:
        mutations: Cosmic Ray's ``MutationSpec`` of every possible change.
        sample: How many to draw; fewer if there are fewer locations.
        seed: Of the draw.
    """
    excluded = re.compile("|".join(CONFIG["cosmic-ray"]["filters"]["operators-filter"]["exclude-operators"]))
    locations: dict[Any, list[Any]] = {}
    for mutation in mutations:
        if not excluded.match(mutation.operator_name):
            at = (str(mutation.module_path), mutation.start_pos, mutation.end_pos)
            locations.setdefault(at, []).append(mutation)
    chance = random.Random(seed)
    return [chance.choice(locations[at]) for at in chance.sample(sorted(locations), min(sample, len(locations)))]


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


def try_mutation(mutation: Any, command: str) -> dict[str, str]:
    """Test one mutation, or the unchanged code, in the working directory; return outcome, changed lines and output."""
    from cosmic_ray.mutating import mutate_and_test
    from cosmic_ray.work_item import TestOutcome

    result = mutate_and_test([mutation] if mutation else [], command, CONFIG["cosmic-ray"]["timeout"])
    outcomes = {TestOutcome.KILLED: "killed", TestOutcome.SURVIVED: "survived", TestOutcome.INCOMPETENT: "not_possible"}
    outcome = "timed_out" if result.output == "timeout" else outcomes[result.test_outcome]
    lines = [line for line in (result.diff or "").splitlines() if re.match(r"[+-](?![+-]{2} )", line)]
    changed = "\n".join(f"{line[0]} {line[1:].strip()}" for line in lines)
    return {"outcome": outcome, "changed": changed, "output": result.output or ""}


def main(arguments: Sequence[str]) -> None:
    line = parse_command_line(arguments, "PACKAGE")
    if line.help:
        print(__doc__)
        return
    (package,) = line.words
    if package not in PACKAGES:
        raise ConfigError(f"{package}: no such package in mutants.toml{did_you_mean(package, PACKAGES)}")
    settings, _ = read_settings(Sample, line.overrides)
    command = CONFIG["cosmic-ray"]["test-command"] + " -m 'not gpu and not long'" * settings.exhaustive
    os.chdir(ROOT)
    began, call = time.monotonic(), call_time()
    where = {**environment(), "gpu": None}  # with the commit, while the files are those that are copied
    drawn = draw(every_mutation(package), settings.sample, settings.seed)
    tests = [tests_of(mutation.module_path, package) for mutation in drawn]
    tried: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(settings.jobs, initializer=enter_copy, initargs=(folder,)) as pool,
    ):
        every_test = list(dict.fromkeys(test for selected in tests for test in selected))
        unchanged = pool.submit(try_mutation, None, f"{command} {shlex.join(every_test)}").result()
        if unchanged["outcome"] != "survived":
            raise SystemExit(f"{unchanged['output']}\nthe tests do not pass without a mutant: {shlex.join(every_test)}")
        commands = [f"{command} {shlex.join(selected)}" for selected in tests]
        for mutation, result in zip(drawn, pool.map(try_mutation, drawn, commands), strict=True):
            module, number, operator = str(mutation.module_path), mutation.start_pos[0], mutation.operator_name
            del result["output"]
            tried.append({"module": module, "line": number, "operator": operator, **result})
            print(f"{result['outcome']}: {module}:{number} {operator}", flush=True)
    counts = Counter(mutant["outcome"] for mutant in tried if mutant["outcome"] != "not_possible")
    row = {
        "table": "mutants",
        "call": call,
        "package": package,
        "seed": settings.seed,
        "exhaustive": settings.exhaustive,
        "mutants": counts.total(),
        **{outcome: counts[outcome] for outcome in ("killed", "timed_out", "survived")},
        "seconds": round(time.monotonic() - began),
        "left": [mutant for mutant in tried if mutant["outcome"] == "survived"],
        "environment": where,
    }
    append_row(row, "mutants")
    print({key: value for key, value in row.items() if key not in ("left", "environment")})


if __name__ == "__main__":
    with exit_codes("benchmarks.mutants"):
        main(sys.argv[1:])
