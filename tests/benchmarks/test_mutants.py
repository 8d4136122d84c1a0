"""Mutation testing: which tests run against a module's mutants, and which mutants a sample has."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks import mutants
from composer_speedups.core.errors import ConfigError
from tests.conftest import ROOT


class Mutation(NamedTuple):
    """Cosmic Ray's MutationSpec, as far as the draw reads it."""

    module_path: Path
    operator_name: str = "core/AddNot"
    start_pos: tuple[int, int] = (1, 0)
    end_pos: tuple[int, int] = (9, 9)


@pytest.mark.parametrize("package", mutants.PACKAGES)
def test_the_tests_of_every_module_exist(package: str) -> None:
    assert mutants.modules_of(package)
    for pattern in mutants.PACKAGES[package]["tests"]:
        assert any(ROOT.glob(pattern)), pattern


def test_the_tests_named_after_a_module_come_first() -> None:
    settings = mutants.Sample()
    quick, every = mutants.commands_for(
        Mutation(Path("composer_speedups/callbacks/throughput.py")), "callbacks", settings
    )
    assert quick.endswith("not exhaustive and not slow' tests/callbacks/test_throughput.py")
    assert "not long' tests/callbacks/test_throughput.py tests/callbacks " in every
    (only,) = mutants.commands_for(Mutation(Path("composer_speedups/packing/encoder.py")), "packing", settings)
    assert "tests/algorithms/test_unpadding_mlm_head.py" in only
    assert mutants.tests_named_after(Path("composer_speedups/algorithms/lora/functional.py")) == [
        "tests/algorithms/test_lora.py"
    ]
    assert mutants.tests_named_after(Path("composer_speedups/train/config/load.py")) == ["tests/train/test_config.py"]


def test_a_sample_has_one_operator_of_each_location() -> None:
    module = Path("composer_speedups/callbacks/toy.py")
    operators = ["core/ReplaceComparisonOperator_Gt_Lt", "core/ReplaceComparisonOperator_Gt_GtE"]
    every = [Mutation(module, operator, (line, 0)) for line in range(5) for operator in operators]
    every += [Mutation(module, "core/ReplaceBinaryOperator_BitOr_Add", (7, 0))]
    drawn = mutants.draw(every, sample=9, seed=3, allowed=bool)
    assert sorted(mutation.start_pos for mutation in drawn) == [(line, 0) for line in range(5)], "no types"
    assert drawn == mutants.draw(every, sample=9, seed=3, allowed=bool)
    assert len({tuple(mutants.draw(every, sample=2, seed=seed, allowed=bool)) for seed in range(8)}) > 1
    not_first = mutants.draw(every, sample=9, seed=3, allowed=lambda mutation: mutation.start_pos[0] > 0)
    assert not_first == [mutation for mutation in drawn if mutation.start_pos[0] > 0], "another is drawn instead"


def test_the_tests_that_execute_a_line_are_those_of_its_statement(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Path("composer_speedups/kernels/casts.py")
    source = (ROOT / module).read_text().splitlines()
    first = next(number for number, line in enumerate(source, 1) if line.endswith("("))  # the statement goes on below
    tests = ["tests/kernels/test_kernels.py::test_a[x y] (call)", "tests/kernels/test_kernels.py::test_a[z] (call)"]
    tests += [
        "tests/kernels/test_kernels.py::test_b|run",
        "tests/test_docs.py::test_c|run",
        "tests/gone.py::test_d|run",
    ]
    executed = {line: tests[: len(tests) - line] for line in range(len(tests))}  # the first test executes most
    recorded = {f"/copy/{module}": {first: ["", *tests]}, "/copy/other.py": executed}
    monkeypatch.setattr(mutants, "_recorded", lambda contexts: recorded)
    assert mutants.tests_executing(module, first + 1, "data") == [
        "tests/test_docs.py::test_c",
        "tests/kernels/test_kernels.py::test_b",
        "tests/kernels/test_kernels.py::test_a[z]",
        "tests/kernels/test_kernels.py::test_a[x y]",
    ]
    elsewhere = next(number for number, line in enumerate(source, 1) if line.startswith("    numbers = "))
    assert mutants.tests_executing(module, elsewhere, "data") == []


def test_a_default_is_executed_with_its_function_class_or_module() -> None:
    tree = ast.parse(
        "class A:\n  x: int = 0\n  def f(\n    self, y=1,\n  ):\n    a = 1\n    return (a,\n      y)\n\nB = 3\n"
    )
    lines = {line: list(mutants._executed_with(tree, line)) for line in (2, 4, 6, 8, 10)}
    assert lines == {2: [*range(1, 9)], 4: [*range(3, 9)], 6: [6], 8: [7, 8], 10: [*range(1, 11)]}


@pytest.mark.parametrize("entry", mutants.CONFIG["judged"], ids=lambda entry: entry["changed"])
def test_a_survivor_that_someone_has_read_has_the_outcome_and_reason_of_the_file(entry: dict[str, str]) -> None:
    assert (ROOT / entry["module"]).is_file()
    assert entry["outcome"] in ("equivalent", "not_run")
    mutant = {"module": entry["module"], "outcome": "survived", "changed": f"- before\n{entry['changed']}"}
    assert mutants.judged_by_reading(mutant) == {**mutant, "outcome": entry["outcome"], "why": entry["why"]}
    for other in ({"outcome": "killed"}, {"changed": "- before\n+ after"}, {"module": "another.py"}):
        assert mutants.judged_by_reading({**mutant, **other}) == {**mutant, **other}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected PACKAGE and then key=value"),
        (["fingers"], "fingers: no such package in mutants.toml; known: kernels, packing"),
        (["callbacks", "samples=3"], "unknown key 'samples'; did you mean 'sample'"),
        (["callbacks", "sample=three"], "sample must be an integer, not"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mutants.main(arguments)
