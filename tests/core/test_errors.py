"""Errors: one line of who, reason and fix, its exit status, and what programs print of it."""

from __future__ import annotations

import errno
import sys

import pytest

from composer_speedups.core.errors import ConfigError, DataError, Refusal, RunFailedError
from composer_speedups.train.cli import exit_codes


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
