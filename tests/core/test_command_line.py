"""The command-line parser of all programs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from composer_speedups.core.command_line import CommandLine, parse_command_line, read_settings
from composer_speedups.core.settings import Settings, keys_help


class Request(Settings):
    steps: int | None = Field(None, ge=5)
    """Batches to train."""
    share: float = Field(0.5, gt=0)
    """Share of the time."""
    kinds: list[Literal["a", "b"]] = Field(default_factory=list)
    """Allowed kinds."""
    title: str = "none"
    """Title of the page."""
    dry_run: bool = False
    """Whether to do nothing."""


def test_config_files_words_and_overrides_are_separated() -> None:
    assert parse_command_line(["seed=3", "-f", "x.yaml", "a.b="]) == CommandLine(
        ["x.yaml"], [], ["seed=3", "a.b="], False
    )
    assert parse_command_line(["bert", "a=b=c"], "PROJECT") == CommandLine([], ["bert"], ["a=b=c"], False)
    assert parse_command_line(["--help"]).help
    assert parse_command_line(["-h", "bert"], "PROJECT").help


def test_read_settings_returns_the_settings_and_the_other_arguments() -> None:
    given = ["x.steps=7", "-f", "x.yaml", "x.share=1e-1", "x.kinds=[a, b]", "x.title=Größe: a, b=c", "seed=3"]
    assert read_settings(Request, [*given, "x.dry_run=true", "x.steps=8"], "x.") == (
        Request(steps=8, share=0.1, kinds=["a", "b"], title="Größe: a, b=c", dry_run=True),
        ["-f", "x.yaml", "seed=3"],
    )
    for given, expected in (
        (["steps=null", "kinds=b,a", "title=no"], Request(kinds=["b", "a"], title="no")),
        (["kinds=b", "kinds="], Request()),
    ):
        assert read_settings(Request, given) == (expected, [])


def test_help_has_every_key_with_its_type_default_bounds_and_doc() -> None:
    lines = keys_help(Request, "x.").splitlines()
    assert lines[:2] == ["  x.steps: int|null = null  [>= 5]", "      Batches to train."]
    assert lines[2:4] == ["  x.share: float = 0.5  [> 0]", "      Share of the time."]
    assert lines[4] == "  x.kinds: list[a|b] = []"
    assert len(lines) == 10
