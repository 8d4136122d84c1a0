"""The layout that docs/design.md asks for: few modules at the top, no cycle of imports, and no long chain of them."""

from __future__ import annotations

import graphlib
import itertools
import re
import tomllib

import pytest

from composer_speedups.core.registry import technique_names
from tests.conftest import ROOT

grimp = pytest.importorskip("grimp", reason="needs import-linter, of the dev group")
PACKAGE = ROOT / "composer_speedups"


def test_at_most_six_modules_lie_directly_in_the_package() -> None:
    names = sorted(path.name for path in PACKAGE.glob("*.py"))
    assert len(names) <= 6, names


def test_every_folder_of_the_tests_is_one_of_the_package() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    tests = {path.parent.name for path in (ROOT / "tests").glob("*/__init__.py")}
    assert tests - folders == {"benchmarks", "gpu", "helpers", "outside", "reference"}


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports inside functions count, but for those that pyproject.toml names: Composer calls a technique, which hands
    itself to the host."""
    graph = grimp.build_graph("composer_speedups", exclude_type_checking_imports=True, cache_dir=None)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    for named in itertools.chain.from_iterable(contract.get("ignore_imports", ()) for contract in contracts):
        importer, _, imported = named.partition(" -> ")
        graph.remove_import(importer=importer, imported=imported)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()


@pytest.mark.parametrize("name", ["application.py", "startup.py", "trainer.py", "report.py"])
def test_the_application_names_no_technique(name: str) -> None:
    """What a technique wants to do before torch is imported is a hook in its folder."""
    source = (PACKAGE / "train" / name).read_text()
    named = re.findall(r'"(\w+)"|algorithms\.(\w+)', source)
    assert {one or other for one, other in named}.isdisjoint(technique_names())


def test_a_folder_of_yamls_in_the_package_is_the_wheels_only() -> None:
    assert not (PACKAGE / "yamls").exists(), "-f NAME would not find those of the checkout"
