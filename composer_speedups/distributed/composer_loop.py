"""Fingerprints of the methods of Composer's training loop that this package relies on and was tested with."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from composer import Trainer

__all__ = ["TESTED", "fingerprint", "unknown_methods"]

TESTED: dict[str, dict[str, str]] = {
    "0.32.1": {
        "_train_loop": "38855631e0b55cca",
        "_train_batch": "0e4f2c954b94bf4a",
        "_train_microbatches": "0762cecfa69db15d",
        "_train_microbatch": "7f93aa728509dc17",
        "_accumulate_time_across_ranks": "2f6bf9369df2b0ca",
        "_iter_dataloader": "74417a3ceffbb3d9",
    },
}
"""Version of mosaicml → method of ``composer.Trainer`` → :func:`fingerprint`."""


def fingerprint(function: Any) -> str:
    """A 16-digit hash of a function's or class's source, without comments, docstrings, layout and line numbers.

    Raises:
        OSError: The source is not available.
        TypeError: It is neither a function nor a class.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return hashlib.sha256(repr(_plain(tree)).encode()).hexdigest()[:16]


def _plain(node: Any) -> Any:
    # Not ast.dump or ast.unparse, whose output depends on the version of Python.
    if isinstance(node, list):
        return [_plain(each) for each in node if not _is_doc(each)]
    if isinstance(node, ast.AST):
        fields = [(name, _plain(value)) for name, value in ast.iter_fields(node)]
        return type(node).__name__, [(name, value) for name, value in fields if value not in (None, [])]
    return node


def _is_doc(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def unknown_methods(names: Iterable[str]) -> str | None:
    """Name the methods of Composer's Trainer that differ from all tested versions; None if there are none.

    Returns:
        Text such as ``composer 0.33.0's Trainer._train_batch, and it was tested with 0.32.1``.
    """
    unknown = [f"Trainer.{name}" for name in names if not _is_known(name)]
    if not unknown:
        return None
    return f"composer {version('mosaicml')}'s {', '.join(unknown)}, and it was tested with {', '.join(TESTED)}"


def _is_known(name: str) -> bool:
    try:
        found = fingerprint(getattr(Trainer, name))
    except (AttributeError, OSError, TypeError):
        return False
    return any(methods.get(name) == found for methods in TESTED.values())
