"""Mutation testing: which tests run against a module's mutants, and which mutants a sample has."""

from __future__ import annotations

import difflib
import re
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
    throughput = Mutation(Path("composer_speedups/callbacks/throughput.py"))
    quick, every = mutants.commands_for(throughput, "callbacks", exhaustive=True)
    assert quick.endswith("not exhaustive and not slow' tests/callbacks/test_throughput.py")
    assert "not long' tests/callbacks/test_throughput.py tests/callbacks " in every
    encoder = Mutation(Path("composer_speedups/packing/encoder.py"))
    (only,) = mutants.commands_for(encoder, "packing", exhaustive=True)
    assert "tests/algorithms/test_unpadding" in only
    config = Path("composer_speedups/train/config/load.py")
    assert mutants.tests_named_after(config) == ["tests/train/test_config.py"]
    step = Path("composer_speedups/algorithms/cuda_graphs/optimizer_step.py")
    first, second, *_ = mutants.tests_named_after(step)
    assert (first, second) == ("tests/algorithms/test_optimizer_step.py", "tests/algorithms/test_cuda_graphs.py")


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


@pytest.mark.parametrize("entry", mutants.CONFIG["judged"], ids=lambda entry: entry["changed"])
def test_a_survivor_that_someone_has_read_has_the_outcome_and_reason_of_the_file(entry: dict[str, str]) -> None:
    source = [line.strip() for line in (ROOT / entry["module"]).read_text().splitlines()]
    changed = entry["changed"].removeprefix("+ ")
    assert changed not in source
    assert difflib.get_close_matches(changed, source, cutoff=0.8), "the line that was changed is gone"
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert all(f"def {name}(" in tests for name in re.findall(r"\btest_\w+", entry["why"]))
    assert entry["outcome"] in ("equivalent", "not_run")
    mutant = {"module": entry["module"], "outcome": "survived", "changed": f"- before\n{entry['changed']}"}
    assert mutants.judged_by_reading(mutant) == {**mutant, "outcome": entry["outcome"], "why": entry["why"]}
    for other in ({"outcome": "killed"}, {"changed": "- before\n+ after"}, {"module": "another.py"}):
        assert mutants.judged_by_reading({**mutant, **other}) == {**mutant, **other}


def test_an_unknown_package_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fingers: no such package in mutants.toml; known: kernels, packing"):
        mutants.main(["fingers"])
