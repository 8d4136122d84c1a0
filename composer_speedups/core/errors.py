"""Errors that a user can mend: each message is one line that names the key and the fix."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable, Iterator

from composer_speedups.core.credentials import mask_urls

__all__ = [
    "CannotRunError",
    "ConfigError",
    "DataError",
    "DivergedError",
    "Interrupted",
    "NonFiniteError",
    "NotEngagedError",
    "RunFailedError",
    "TechniqueError",
    "UserError",
    "WriteError",
    "causes_of",
    "did_you_mean",
    "first_line",
]


class UserError(ValueError):
    """Bad input. ``train.py`` prints the message on one line and exits with 2; of a very long one, both ends."""

    def __init__(self, message: str) -> None:
        plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(message.split()))  # files' names too
        line = mask_urls(plain)  # job logs keep it
        super().__init__(line if len(line) <= 2000 else f"{line[:1200]} […] {line[-600:]}")


class ConfigError(UserError):
    """A YAML key, an override or a value that cannot be used."""


class DataError(UserError):
    """A dataset, a file or a row that cannot be used."""


class RunFailedError(UserError):
    """A run that began and cannot go on: exit status 1."""


class NonFiniteError(RunFailedError):
    """A loss, a weight or every gradient that is NaN or infinite."""


class DivergedError(RunFailedError):
    """A loss that climbed far above what it was."""


class TechniqueError(UserError):
    """A technique that cannot be used here: something it needs is missing, or it clashes with another."""

    def __init__(self, technique: str, reason: str, fix: str) -> None:
        self.technique, self.reason, self.fix = technique, reason, fix
        super().__init__(f"{technique}: {reason}; {fix}")


class CannotRunError(TechniqueError):
    """A technique that engaged, and that the first batches show cannot run here."""


class NotEngagedError(TechniqueError):
    """A technique that was applied but left no evidence of having taken effect."""


class WriteError(RunFailedError):
    """A file of a running job that cannot be written; what it wrote before is there."""


class Interrupted(SystemExit):
    """Training ended by a signal after a whole batch. The exit status is 128 and the signal.

    Args:
        signum: The signal.
        batch: How many batches were trained.
        earlier: Where the run goes on from, when no checkpoint of this batch was written since its loss had climbed.
    """

    def __init__(self, signum: int, batch: int, earlier: str | None = None) -> None:
        super().__init__(128 + signum)
        self.signum, self.batch, self.earlier = signum, batch, earlier

    def __str__(self) -> str:
        said = f"stopped by {signal.Signals(self.signum).name} after batch {self.batch}"
        if self.earlier is None:
            return f"{said}, with a checkpoint; the same command goes on from there"
        return f"{said}, without a checkpoint, since the loss had climbed; the same command goes on from {self.earlier}"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the nearest of some names; all of them when none is near."""
    known = list(known)
    close = difflib.get_close_matches(str(name), known, n=1) or [k for k in known if str(name) in k]
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def first_line(error: BaseException) -> str:
    """The first line that an error's message says anything in; the name of its class for an empty message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """The error itself, then what each was raised from, or while handling, from the last back to the first."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
