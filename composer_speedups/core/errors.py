"""Errors that a user can mend, each one line that names the key and the fix; credentials are masked in it.

What looks like a credential is masked wherever a run writes it down, its config too: parts of addresses, and values
under names such as ``api_key``.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

__all__ = [
    "MASK",
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
    "is_secret_name",
    "mask",
    "mask_urls",
    "masked_command_line",
]

MASK = "<masked>"

_SECRET = ("token", "secret", "password", "passwd", "passphrase", "pwd", "credential", "credentials", "apikey")
_SECRET_KEYS = ("api", "access", "private", "secret", "account", "signing", "encryption")  # … key
_SECRET_IN_URLS = ("key", "sig", "signature", "auth", "authorization", "jwt")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)
_INTERPOLATION = r"\$\{(?:oc\.env:\w+|[\w.]+)\}"  # without a default, which could be the credential
_INTERPOLATED = re.compile(f"(?:{_INTERPOLATION})+")
_INTERPOLATED_PASSWORD = re.compile(f"(?:(?:[^:$]*|{_INTERPOLATION}):)?(?:{_INTERPOLATION})+")
_PARAMETER = re.compile(r"(?P<name>[?&;#][^=&;#\s]+)=(?P<value>(?:\$\{[^{}]*\}|[^&;#\s}])*)")


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


def mask(value: Any, name: str = "") -> Any:
    """A copy of a value, nested or not, without credentials: those in URLs, and all under a name such as ``api_key``.

    What is given as ``${oc.env:NAME}`` holds none, and stays.
    """
    if isinstance(value, Mapping):
        return {key: mask(item, name if is_secret_name(name) else str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mask(item, name) for item in value]
    if is_secret_name(name) and not isinstance(value, bool) and value not in (None, ""):
        return value if isinstance(value, str) and _INTERPOLATED.fullmatch(value) else MASK
    return mask_urls(value) if isinstance(value, str) else value


@contextlib.contextmanager
def masked_command_line() -> Iterator[None]:
    """Inside, ``sys.argv`` is without credentials, for libraries that keep it."""
    before = sys.argv
    sys.argv = [_masked_argument(argument) for argument in before]
    try:
        yield
    finally:
        sys.argv = before


def mask_urls(text: str) -> str:
    """A text whose URLs have neither user nor password, nor values of parameters such as ``token`` and ``sig``."""
    return _URL.sub(lambda found: _masked_url(found[0]), text)


def is_secret_name(name: str) -> bool:
    """Whether a key's name says that its value is a credential: ``hf_token`` and ``apiKey``, but not ``tokenizer``."""
    words = _words(name)
    pairs = itertools.pairwise(words)
    return any(word.endswith(_SECRET) for word in words) or any(a in _SECRET_KEYS and b == "key" for a, b in pairs)


def _masked_argument(argument: str) -> str:
    """A command line's ``section.key=value``, or any other."""
    name, equals, value = argument.partition("=")
    return f"{name}={mask(value, name)}" if equals and is_secret_name(name) else mask_urls(argument)


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORDS.findall(name)]


def _masked_url(url: str) -> str:
    scheme, _, rest = url.partition("://")
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    tail = rest[len(authority) :]
    user, at, host = authority.rpartition("@")
    if at and not _INTERPOLATED_PASSWORD.fullmatch(user):
        user = MASK
    return f"{scheme}://{user}{at}{host}{mask_urls(_PARAMETER.sub(_masked_parameter, tail))}"


def _masked_parameter(found: re.Match[str]) -> str:
    name, value = unquote(found["name"]), found["value"]
    secret = is_secret_name(name) or any(word in _SECRET_IN_URLS for word in _words(name))
    return found[0] if not secret or not value or _INTERPOLATED.fullmatch(value) else f"{found['name']}={MASK}"
