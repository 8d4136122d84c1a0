"""What is said of an error in one line."""

from __future__ import annotations

import pytest

from composer_speedups.errors import first_line


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
