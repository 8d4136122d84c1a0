"""Internals of other libraries that the package patches or relies on have not changed; docs/internals.md lists them."""

from __future__ import annotations

import importlib
import re
from importlib.metadata import version
from typing import Any

import pytest
from composer import Trainer

from composer_speedups import EarlyLoss
from composer_speedups.core.errors import TechniqueError
from composer_speedups.distributed import composer_loop
from composer_speedups.distributed.composer_loop import TESTED, fingerprint, unknown_methods
from tests.conftest import ROOT
from tests.helpers.common import make_trainer

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


def test_the_table_lists_all_methods_that_are_compared_at_run_time() -> None:
    (methods,) = TESTED.values()
    listed = {name: mark for name, *_, mark in ROWS}
    assert {name: listed[f"composer.Trainer.{name}"] for name in methods} == methods
    assert len(ROWS) > 40


def one(value: int) -> int:
    """Docstring."""
    return value + 1  # comment


def two(value: int) -> int:
    return value + 2


def test_a_fingerprint_ignores_docstrings_and_comments() -> None:
    source = composer_loop.ast.parse(composer_loop.inspect.getsource(one))
    as_written = composer_loop.ast.parse("def one(value: int) -> int:\n    return value + 1")
    assert repr(composer_loop._plain(source)) == repr(composer_loop._plain(as_written))
    assert fingerprint(one) != fingerprint(two)


def test_a_changed_training_loop_is_refused_with_version_and_method(monkeypatch: pytest.MonkeyPatch) -> None:
    from composer_speedups.algorithms.early_loss import early_loss as module
    from composer_speedups.algorithms.early_loss import functional
    from composer_speedups.distributed.host_scalars import HostCopies, Readback

    monkeypatch.setattr(EarlyLoss, "requirements", lambda *_: ())
    monkeypatch.setattr(
        module, "apply_early_loss", lambda device: functional._intercept(device, Readback(HostCopies()))
    )
    assert unknown_methods(TESTED["0.32.1"]) is None

    def _train_batch(self: Any, use_grad_scaling: bool) -> Any:
        return None

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_batch", _train_batch)
        with pytest.raises(TechniqueError, match=r"early_loss: .*composer 0\.32\.1's Trainer\._train_batch"):
            make_trainer([EarlyLoss()])
        with pytest.warns(UserWarning, match="continuing without early_loss"):
            trainer = make_trainer([technique := EarlyLoss(on_unavailable="warn")])
    trainer.fit()
    trainer.close()
    assert technique.engaged is False
