"""What is read from an error: its first line, and what it comes of."""

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


def test_what_a_file_holds_neither_colours_the_terminal_nor_ends_the_line() -> None:
    assert str(UserError("key\nof \x1b[31mred \udc80 Größe")) == r"key of \x1b[31mred \udc80 Größe"


def test_the_causes_of_an_error_begin_with_itself_and_end_with_the_first() -> None:
    first, second, third = OSError("disk"), RuntimeError("archive"), ValueError("checkpoint")
    second.__context__ = first  # raised while it was handled
    third.__cause__, third.__context__ = second, KeyError("not asked: a cause is there")
    assert list(causes_of(third)) == [third, second, first]
