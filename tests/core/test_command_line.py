"""The command line of all programs, and what they print of an error: one line of who, reason and fix."""

from __future__ import annotations

import errno
import sys
from typing import Any, Literal

import pytest
from pydantic import Field

from composer_speedups.core.command_line import CommandLine, parse_command_line, read_settings
from composer_speedups.core.errors import ConfigError, DataError, Refusal, RunFailedError
from composer_speedups.core.settings import Settings, keys_help
from composer_speedups.train.cli import exit_codes


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
    assert parse_command_line(["seed=3", "-f", "x.yaml", "a.b="]) == CommandLine(["x.yaml"], [], ["seed=3", "a.b="])
    assert parse_command_line(["bert", "a=b=c"], "PROJECT") == CommandLine([], ["bert"], ["a=b=c"])


@pytest.mark.parametrize("arguments", [(["--help"],), (["-h", "bert"], "PROJECT")])
def test_help_is_printed(arguments: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        parse_command_line(*arguments, help=lambda: "how to")
    assert capsys.readouterr().out == "how to\n"


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


def test_a_refusal_is_one_line_of_who_reason_and_fix() -> None:
    refusal = Refusal("unpadding", "no\nmask", "pass one")
    assert (str(refusal), refusal.reason) == ("unpadding: no mask; pass one", "no\nmask")
    assert str(Refusal("key\nof \x1b[31mred \udc80 Größe")) == r"key of \x1b[31mred \udc80 Größe"
    assert len(str(Refusal("who", "x" * 5000, "fix"))) < 2000


FULL = "the disk is full: "
PRINTED: list[tuple[Exception, int, str]] = [
    (ConfigError("no"), 2, "no"),
    (DataError("no"), 2, "no"),
    (Refusal("x", "no", "fix"), 2, "x: no; fix"),
    (RunFailedError("no"), 1, "no"),
    (OSError(errno.EDQUOT, "Quota exceeded", "runs"), 1, f"{FULL}[Errno 122] Quota exceeded: 'runs'; free some space"),
    (RuntimeError("No space (os error 28)"), 1, f"{FULL}No space (os error 28); free some space"),
]


@pytest.mark.parametrize(("error", "status", "line"), PRINTED)
def test_a_refusal_and_a_full_disk_are_one_line_and_an_exit_status(
    error: Exception, status: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os._exit", sys.exit)  # os._exit would end this process
    monkeypatch.setattr(sys, "argv", ["/usr/bin/composer-speedups-train"])
    with pytest.raises(SystemExit) as exited, exit_codes():
        raise error
    assert exited.value.code == status
    assert capsys.readouterr().err == f"composer-speedups-train: {line}\n"


def test_another_error_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="other"), exit_codes():
        raise RuntimeError("another error: other (os error 2)")
