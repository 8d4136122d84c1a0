"""Internals of other libraries that the package patches or relies on have not changed; docs/internals.md lists them."""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import re
import textwrap
from importlib.metadata import version
from typing import Any

import pytest

from composer_speedups.distributed.composer_loop import _TRAINER_METHODS, TESTED_COMPOSER, other_composer
from composer_speedups.distributed.host_scalars import _COUNTS, _LOSSES
from tests.conftest import ROOT

ROW = re.compile(r"^\| `([\w.]+)` \| ([\w/, ]+) \| (.+) \| (\w+) ([\d.]+) \| `(\w+)` \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs" / "internals.md").read_text())


def resolve(name: str) -> Any:
    """Return the module, class or attribute with this dotted name."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            value = getattr(value, part)
        return value
    raise AssertionError(f"no such module: {name}")


def fingerprint(function: Any) -> str:
    """Return a 16-digit hash of a function's or class's source, without comments, docstrings and layout."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return hashlib.sha256(repr(plain(tree)).encode()).hexdigest()[:16]


def plain(node: Any) -> Any:
    # Not ast.dump or ast.unparse, whose output depends on the version of Python.
    if isinstance(node, list):
        return [plain(child) for child in node if not is_docstring(child)]
    if isinstance(node, ast.AST):
        fields = [(name, plain(value)) for name, value in ast.iter_fields(node)]
        return type(node).__name__, [(name, value) for name, value in fields if value not in (None, [])]
    return node


def is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_an_internal_has_not_changed(row: tuple[str, ...]) -> None:
    name, where, _, package, tested, expected = row
    if package in ("peft", "torchao"):
        pytest.importorskip(package)
    assert version(package).split("+")[0] == tested, (
        "review what changed, then update docs/internals.md's version and fingerprint"
    )
    assert fingerprint(resolve(name)) == expected, f"{name} has changed: see {where}"
    assert all((ROOT / "composer_speedups" / folder).exists() for folder in where.split(", "))


def test_the_table_lists_all_methods_that_are_relied_on() -> None:
    listed = {name: version for name, *_, version, _ in ROWS}
    for method in {"_train_loop", *_LOSSES, *_COUNTS, *_TRAINER_METHODS}:
        assert listed[f"composer.Trainer.{method}"] == TESTED_COMPOSER
    assert other_composer() is None
    assert len(ROWS) > 40
