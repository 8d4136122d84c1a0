"""Errors that a user can fix. Each is one line that names the key and the fix."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable, Iterator
from typing import Self


class Refusal(ValueError):
    """A refused configuration, input or combination of techniques, or a run that failed.

    A program prints its :attr:`lines`, one for each mistake, and exits with :attr:`status`. Long lines are shortened.

    Args:
        who: The key, file or technique that is refused; or the whole sentence, if ``reason`` is not given.
        reason: Why.
        fix: What the user can do about it.
    """

    status = 2

    def __init__(self, who: str, reason: str = "", fix: str = "") -> None:
        self.who, self.reason, self.fix = who, reason, fix
        message = who + (f": {reason}" if reason else "") + (f"; {fix}" if fix else "")
        line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(message.split()))
        self.lines = [line if len(line) <= 2000 else f"{line[:1200]} […] {line[-600:]}"]
        super().__init__(*self.lines)

    @classmethod
    def of(cls, lines: Iterable[str]) -> Self:
        each = [cls(line) for line in lines]
        each[0].lines = [line for refusal in each for line in refusal.lines]
        each[0].args = ("\n".join(each[0].lines),)
        return each[0]


class ConfigError(Refusal):
    """An invalid YAML key, override or value."""


class DataError(Refusal):
    """An invalid dataset, file or row."""


class RunFailedError(Refusal):
    """A run failed after it started, or training ended and the plot or the report failed."""

    status = 1


class Interrupted(SystemExit):
    """A signal ended training after a complete batch. The exit status is 128 plus the signal's number.

    ``earlier`` is the checkpoint that the run resumes from, if none was written because the loss had climbed.
    """

    def __init__(self, signum: int, batch: int, earlier: str | None = None) -> None:
        super().__init__(128 + signum)
        self.signum, self.batch, self.earlier = signum, batch, earlier

    def __str__(self) -> str:
        stopped = f"stopped by {signal.Signals(self.signum).name} after batch {self.batch}"
        if self.earlier is None:
            return f"{stopped}, with a checkpoint; the same command resumes from it"
        without = "without a checkpoint, since the loss had climbed"
        return f"{stopped}, {without}; the same command resumes from {self.earlier}"


def did_you_mean(name: object, known: Iterable[str], prefix: str = "", *, otherwise: str | None = None) -> str:
    """Return ``; did you mean 'x'?`` with the closest of the known names or dotted keys, of which a similar last part
    is close too. If none is, return ``otherwise``; by default, ``; known:`` and all known names."""
    wanted, known = str(name), list(known)
    leaves = {key.rpartition(".")[2]: key for key in reversed(known)}
    cutoff = 0.5 if len(known) <= 20 else 0.7
    close = difflib.get_close_matches(wanted, known, n=1, cutoff=0.8)
    close = close or [leaves[m] for m in difflib.get_close_matches(wanted.rpartition(".")[2], leaves, 1, cutoff)]
    close = close or [key for key in known if wanted in key]
    if close:
        return f"; did you mean {prefix + close[0]!r}?"
    return f"; known: {', '.join(known)}" if otherwise is None else otherwise


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """The error, then the chain of errors that it was raised from or while handling, up to the first."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
