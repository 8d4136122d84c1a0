"""The command-line parser of all programs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Literal

import pytest
from pydantic import Field

from composer_speedups.core.command_line import CommandLine, parse_command_line, read_settings
from composer_speedups.core.settings import Settings, keys_help
from composer_speedups.train import cli


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
    assert read_settings(Request, ["steps=null", "kinds=b,a", "title=no"]) == (
        Request(kinds=["b", "a"], title="no"),
        [],
    )
    assert read_settings(Request, ["kinds=b", "kinds="]) == (Request(), [])


def test_help_has_every_key_with_its_type_default_bounds_and_doc() -> None:
    lines = keys_help(Request, "x.").splitlines()
    assert lines[:2] == ["  x.steps: int|null = null  [>= 5]", "      Batches to train."]
    assert lines[2:4] == ["  x.share: float = 0.5  [> 0]", "      Share of the time."]
    assert lines[4] == "  x.kinds: list[a|b] = []"
    assert len(lines) == 10


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("usage", "started", "said"),
    [
        (cli.help_text, "/bin/composer-speedups-train", "composer-speedups-train"),
        (cli.help_text, "train.py", "composer train.py"),
    ],
)
def test_the_usage_has_the_command_that_was_typed(
    usage: Callable[[], str], started: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [started, "--help"])
    assert usage().startswith(f"usage: {said} -f FILE ")
