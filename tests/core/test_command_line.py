"""The command-line parser of all programs, and its one-line errors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Literal

import pytest
from pydantic import Field

from composer_speedups.core.command_line import CommandLine, parse_command_line, read_settings
from composer_speedups.core.errors import ConfigError
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


@pytest.mark.parametrize(
    ("arguments", "words", "message"),
    [
        (["-f"], [], "-f needs a file"),
        (["-f", "a", "-f", "b"], [], "names a second config file"),
        ([], [], "no config file; add -f"),
        (["quickstart"], [], "cannot read 'quickstart'; expected -f FILE or key=value"),
        (["--lr=3"], [], "cannot read '--lr=3'; did you mean 'lr=3'"),
        (["=3"], [], "cannot read '=3'"),
        (["a={b:", "c}"], [], "cannot read 'c}'; expected -f FILE or key=value; quote a value that has blanks"),
        (["-f", "x.yaml"], ["PROJECT"], "cannot read '-f'; expected PROJECT or key=value"),
        ([""], ["PROJECT"], "cannot read ''"),
        (["seed=3"], ["PROJECT"], "expected PROJECT and then key=value, not 'seed=3'; see --help"),
        (["a", "b"], ["PROJECT"], "expected PROJECT and then key=value, not 'a b'"),
    ],
)
def test_a_mistyped_command_line_is_refused(arguments: list[str], words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^command line: .*{message}"):
        parse_command_line(arguments, *words)


def test_read_settings_returns_the_settings_and_the_other_arguments() -> None:
    given = ["x.steps=7", "-f", "x.yaml", "x.share=1e-1", "x.kinds=[a, b]", "x.title=Größe: a, b=c", "seed=3"]
    assert read_settings(Request, [*given, "x.dry_run=true", "x.steps=8"], "x.") == (
        Request(8, 0.1, ["a", "b"], "Größe: a, b=c", True),
        ["-f", "x.yaml", "seed=3"],
    )
    assert read_settings(Request, ["steps=null", "kinds=b", "kinds="]) == (Request(), [])


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("x.stps=7", "unknown key 'x.stps'; did you mean 'x.steps'?"),
        ("x.other=7", "unknown key 'x.other'; known: steps, share, kinds, title, dry_run"),
        ("x.steps=few", "x.steps must be a whole number or null, not 'few'"),
        ("x.steps=[", "x.steps must be a whole number or null, not '['"),
        ("x.steps=4", "x.steps must be at least 5, not 4"),
        ("x.share=nan", "x.share must be a finite number, not nan"),
        ("x.kinds=a,,b", "x.kinds must not be empty"),
        ("x.kinds=[c]", "x.kinds must be a list of 'a' or 'b', not ['c']"),
        ("x.title= ", "x.title must not be empty"),
        ("x.dry_run=maybe", "x.dry_run must be true or false, not 'maybe'"),
    ],
)
def test_an_invalid_override_is_a_one_line_error_with_its_key(pair: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_settings(Request, [pair], "x.")
    assert str(error.value).startswith(f"command line: {message}")


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
