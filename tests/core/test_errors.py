"""Helpers for exceptions: the first line of the message, escaped control characters, and the causes."""

from __future__ import annotations

import pytest

from composer_speedups.core.errors import UserError, causes_of, first_line


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
