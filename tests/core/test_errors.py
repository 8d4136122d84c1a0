"""Exceptions: the first line, escaped control characters, causes, and torch's errors in one line."""

from __future__ import annotations

import pytest
import torch

from composer_speedups.core.errors import TechniqueError, UserError, causes_of, first_line
from composer_speedups.core.operator_recorder import cannot_run


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("one line", "one line"),
        ("the first\nthe second", "the first"),
        ("\n  \nafter a blank line\nmore", "after a blank line"),
        ("", "ValueError"),
        (" \n\t", "ValueError"),
    ],
)
def test_the_first_line_of_an_error_is_never_empty(message: str, line: str) -> None:
    assert first_line(ValueError(message)) == line


def test_control_characters_in_messages_are_escaped() -> None:
    assert str(UserError("key\nof \x1b[31mred \udc80 Größe")) == r"key of \x1b[31mred \udc80 Größe"


def test_causes_of_starts_with_the_error_and_ends_with_the_root_cause() -> None:
    first, second, third = OSError("disk"), RuntimeError("archive"), ValueError("checkpoint")
    second.__context__ = first  # raised while handling the first
    third.__cause__, third.__context__ = second, KeyError("ignored: __cause__ is set")
    assert list(causes_of(third)) == [third, second, first]


@pytest.mark.parametrize(
    ("message", "line"), [("\nno kernel\nin detail", "no kernel"), ("", "RuntimeError")], ids=["lines", "nothing"]
)
def test_a_torch_error_becomes_one_line(message: str, line: str) -> None:
    with pytest.raises(TechniqueError) as raised, cannot_run("some_technique", "it cannot run", "remove it"):
        raise RuntimeError(message)
    assert str(raised.value) == f"some_technique: it cannot run ({line}); remove it"
    assert isinstance(raised.value.__cause__, RuntimeError)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), KeyError("input_ids")])
def test_out_of_memory_and_unrelated_errors_are_not_changed(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, cannot_run("some_technique", "it cannot run", "remove it"):
        raise error
    assert raised.value is error
