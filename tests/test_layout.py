"""The layout that docs/design.md asks for: few modules at the top, no cycle of imports, and no long chain of them."""

from __future__ import annotations

import graphlib
import re
from functools import cache

import pytest

from composer_speedups.core.catalogue import technique_names
from tests.conftest import ROOT

grimp = pytest.importorskip("grimp", reason="needs import-linter, of the dev group")
PACKAGE = ROOT / "composer_speedups"
LONGEST = 7


@cache
def imported_by(*, at_import: bool) -> dict[str, set[str]]:
    """Module → the modules of the package that it imports; with ``at_import``, without those inside functions."""
    graph = grimp.build_graph("composer_speedups", exclude_type_checking_imports=True, cache_dir=None)
    found: dict[str, set[str]] = {}
    for module in graph.modules:
        found[module] = set()
        for other in graph.find_modules_directly_imported_by(module):
            lines = [detail["line_number"] for detail in graph.get_import_details(importer=module, imported=other)]
            if not at_import or any(not source_of(module)[line - 1].startswith(" ") for line in lines):
                found[module].add(other)
    return found


@cache
def source_of(module: str) -> list[str]:
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.read_text().splitlines()


def longest_chain(imports: dict[str, set[str]]) -> list[str]:
    chains: dict[str, list[str]] = {}
    for module in graphlib.TopologicalSorter(imports).static_order():
        below = max((chains[other] for other in sorted(imports[module])), key=len, default=[])
        chains[module] = [module, *below]
    return max(chains.values(), key=len)


def test_at_most_six_modules_lie_directly_in_the_package() -> None:
    names = sorted(path.name for path in PACKAGE.glob("*.py"))
    assert len(names) <= 6, names


def test_every_folder_of_the_tests_is_one_of_the_package() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    tests = {path.parent.name for path in (ROOT / "tests").glob("*/__init__.py")}
    assert tests - folders == {"benchmarks", "gpu", "helpers", "outside", "reference"}


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports inside functions count: they would only hide a cycle."""
    graphlib.TopologicalSorter(imported_by(at_import=False)).prepare()


def test_no_chain_of_imports_is_longer_than_seven() -> None:
    chain = longest_chain(imported_by(at_import=True))
    assert len(chain) <= LONGEST, " > ".join(chain)


def test_a_cycle_and_a_long_chain_are_found() -> None:
    chain = {f"m{i}": {f"m{i + 1}"} for i in range(LONGEST)} | {f"m{LONGEST}": set()}
    assert longest_chain(chain) == [f"m{i}" for i in range(LONGEST + 1)]
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()


@pytest.mark.parametrize("name", ["application.py", "startup.py", "trainer.py", "report.py"])
def test_the_application_names_no_technique(name: str) -> None:
    """What a technique wants to do before torch is imported is a hook in its folder."""
    source = (PACKAGE / "train" / name).read_text()
    named = re.findall(r'"(\w+)"|algorithms\.(\w+)', source)
    assert {one or other for one, other in named}.isdisjoint(technique_names())


def test_a_folder_of_yamls_in_the_package_is_the_wheels_only() -> None:
    assert not (PACKAGE / "yamls").exists(), "-f NAME would not find those of the checkout"
