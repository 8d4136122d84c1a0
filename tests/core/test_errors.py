"""Exceptions: the first line, escaped control characters, causes, and refusals."""

from __future__ import annotations

import pytest

from composer_speedups.core.errors import ConfigError, DataError, Refusal, RunFailedError, causes_of, first_line


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
    assert str(Refusal("key\nof \x1b[31mred \udc80 Größe")) == r"key of \x1b[31mred \udc80 Größe"


def test_causes_of_starts_with_the_error_and_ends_with_the_root_cause() -> None:
    first, second, third = OSError("disk"), RuntimeError("archive"), ValueError("checkpoint")
    second.__context__ = first  # raised while handling the first
    third.__cause__, third.__context__ = second, KeyError("ignored: __cause__ is set")
    assert list(causes_of(third)) == [third, second, first]


def test_a_refusal_is_one_line_of_who_reason_and_fix_and_knows_its_exit_status() -> None:
    refusal = Refusal("unpadding", "no\nmask", "pass one")
    assert (str(refusal), refusal.reason, refusal.status) == ("unpadding: no mask; pass one", "no\nmask", 2)
    assert str(ConfigError("data.file is missing")) == "data.file is missing"
    assert (ConfigError("x").status, DataError("x").status, RunFailedError("x").status) == (2, 2, 1)
    assert len(str(Refusal("who", "x" * 5000, "fix"))) < 2000
