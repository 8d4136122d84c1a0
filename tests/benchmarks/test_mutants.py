"""Mutation testing: which tests a module has, which lines they run, and what becomes of mutants of a toy package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import mutants
from tests.conftest import ROOT

MODULE = "composer_speedups/callbacks/toy.py"
CODE = """def largest(values, floor=0):
    if floor is None:
        return max(values)
    best = floor
    for value in values:
        if value > best:
            best = value
    return best
"""
TESTS = """from composer_speedups.callbacks.toy import largest

def test_largest():
    assert largest([1, 3, 2]) == 3
"""
PROGRAM = """
import json, sys
from pathlib import Path
from benchmarks import mutants

mutants.ROOT = Path(sys.argv[1])
given = json.loads(sys.argv[2])
found = mutants.measure(mutants.anew(given), jobs=2)
print(json.dumps({mutant.operator: outcome for mutant, outcome in found}))
"""


@pytest.mark.parametrize("package", mutants.PACKAGES)
def test_the_tests_of_every_module_exist(package: str) -> None:
    modules = [module for module in mutants.modules_of(package) if not module.endswith("__init__.py")]
    assert modules
    for module in modules:
        tests = mutants.tests_of(module)
        assert tests, module
        assert all((ROOT / test).is_file() for test in tests), tests


def test_an_error_is_put_before_the_statement_of_a_line() -> None:
    code = mutants.reaching(CODE, 6)
    assert code is not None
    assert code.splitlines()[5:7] == ['        raise RuntimeError("reached")', "        if value > best:"]
    assert mutants.reaching("x = 1\n", 1) is None


def test_outcomes_of_a_toy_packages_mutants(tmp_path: Path) -> None:
    for name, text in {MODULE: CODE, "tests/callbacks/test_toy.py": TESTS}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    for folder in ("composer_speedups", "composer_speedups/callbacks"):
        (tmp_path / folder / "__init__.py").touch()  # or it would be the real package
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "add", "."], check=True)
    given = [
        {"module": MODULE, "line": line, "operator": expected, "changed": changed}
        for line, expected, changed in [
            (9, "killed", "- if value > best:\n+ if value < best:"),  # a line further by now
            (6, "survived", "- if value > best:\n+ if value >= best:"),
            (3, "not_run", "- return max(values)\n+ return min(values)"),
            (1, "left out", "- if value > worst:\n+ if value < worst:"),
        ]
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), json.dumps(given)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert outcomes == {kind: kind for kind in ("killed", "survived", "not_run")}
    assert "left out, because its line has changed: composer_speedups/callbacks/toy.py:1" in done.stdout
