"""Mutation testing: which tests run against a module's mutants, and which mutants a sample has."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks import mutants
from composer_speedups.core.errors import ConfigError
from tests.conftest import ROOT


class Mutation(NamedTuple):
    """Cosmic Ray's MutationSpec, as far as the draw reads it."""

    module_path: Path
    operator_name: str
    start_pos: tuple[int, int]
    end_pos: tuple[int, int] = (9, 9)


@pytest.mark.parametrize("package", mutants.PACKAGES)
def test_the_tests_of_every_module_exist(package: str) -> None:
    assert mutants.modules_of(package)
    for pattern in mutants.PACKAGES[package]["tests"]:
        assert any(ROOT.glob(pattern)), pattern


def test_the_tests_named_after_a_module_come_first() -> None:
    tests = mutants.tests_of(Path("composer_speedups/callbacks/throughput.py"), "callbacks")
    assert tests[:2] == ["tests/callbacks/test_throughput.py", "tests/callbacks"]
    assert "tests/algorithms/test_unpadding_mlm_head.py" in mutants.tests_of(Path("a/packing/call.py"), "packing")
    of_folder = mutants.tests_of(Path("composer_speedups/algorithms/lora/functional.py"), "algorithms")
    assert of_folder[0].startswith("tests/algorithms/test_lora")


def test_a_sample_has_one_operator_of_each_location() -> None:
    module = Path("composer_speedups/callbacks/toy.py")
    operators = ["core/ReplaceComparisonOperator_Gt_Lt", "core/ReplaceComparisonOperator_Gt_GtE"]
    every = [Mutation(module, operator, (line, 0)) for line in range(5) for operator in operators]
    every += [Mutation(module, "core/ReplaceBinaryOperator_BitOr_Add", (7, 0))]
    drawn = mutants.draw(every, sample=9, seed=3)
    assert sorted(mutation.start_pos for mutation in drawn) == [(line, 0) for line in range(5)], "no types"
    assert drawn == mutants.draw(every, sample=9, seed=3)
    assert len({tuple(mutants.draw(every, sample=2, seed=seed)) for seed in range(8)}) > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected PACKAGE and then key=value"),
        (["fitting"], "fitting: no such package in mutants.toml; known: kernels, packing"),
        (["callbacks", "samples=3"], "unknown key 'samples'; did you mean 'sample'"),
        (["callbacks", "sample=three"], "sample must be a whole number, not"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mutants.main(arguments)
