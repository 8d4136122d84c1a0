"""Errors that a user can fix. Each is one line that names the key and the fix, with credentials masked.

Credentials are masked wherever a run writes text, including its config: user and password in URLs, and values under
names such as ``api_key``.
"""

from __future__ import annotations

import difflib
import itertools
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import unquote

from composer_speedups.core.temporary_attribute import temporary_attribute

__all__ = [
    "MASK",
    "ConfigError",
    "DataError",
    "DivergedError",
    "Interrupted",
    "NonFiniteError",
    "NotRecordedError",
    "Refusal",
    "RunFailedError",
    "WriteError",
    "causes_of",
    "did_you_mean",
    "failure_line",
    "first_line",
    "is_secret_name",
    "mask",
    "mask_urls",
    "masked_command_line",
]

MASK = "<masked>"

_SECRET = ("token", "secret", "password", "passwd", "passphrase", "pwd", "credential", "credentials", "apikey")
_SECRET_KEYS = ("api", "access", "private", "secret", "account", "signing", "encryption")  # followed by "key"
_SECRET_IN_URLS = ("key", "sig", "signature", "auth", "authorization", "jwt")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)
_INTERPOLATION = r"\$\{(?:oc\.env:\w+|[\w.]+)\}"  # without a default value, which could be the credential itself
_INTERPOLATED = re.compile(f"(?:{_INTERPOLATION})+")
_INTERPOLATED_PASSWORD = re.compile(f"(?:(?:[^:$]*|{_INTERPOLATION}):)?(?:{_INTERPOLATION})+")
_PARAMETER = re.compile(r"(?P<name>[?&;#][^=&;#\s]+)=(?P<value>(?:\$\{[^{}]*\}|[^&;#\s}])*)")


class Refusal(ValueError):
    """A refused configuration, input or combination of techniques, or a run that failed. It is one line.

    A program prints it and exits with :attr:`status`. Long messages are shortened, and credentials in URLs are masked.

    Args:
        who: The key, file or technique that is refused; or the whole sentence, if ``reason`` is not given.
        reason: Why.
        fix: What the user can do about it.
    """

    status = 2

    def __init__(self, who: str, reason: str = "", fix: str = "") -> None:
        self.who, self.reason, self.fix = who, reason, fix
        message = who + (f": {reason}" if reason else "") + (f"; {fix}" if fix else "")
        plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(message.split()))
        line = mask_urls(plain)  # job logs keep the message
        super().__init__(line if len(line) <= 2000 else f"{line[:1200]} […] {line[-600:]}")


class ConfigError(Refusal):
    """An invalid YAML key, override or value."""


class DataError(Refusal):
    """An invalid dataset, file or row."""


class RunFailedError(Refusal):
    """A run failed after it started."""

    status = 1


class NonFiniteError(RunFailedError):
    """A loss, a weight or all gradients are NaN or infinite."""


class DivergedError(RunFailedError):
    """The loss climbed far above its level at the last good checkpoint."""


class WriteError(RunFailedError):
    """A running job cannot write a file. Files that it wrote earlier are intact."""


class NotRecordedError(RunFailedError):
    """Training ended and its model is safe, but a logger, the plot or the report failed.

    Args:
        model: Where the model is, in one line.
        failures: What failed and why, one line each.
    """

    def __init__(self, model: str, failures: Iterable[str]) -> None:
        self.lines = [model, *failures]
        super().__init__("; ".join(self.lines))


class Interrupted(SystemExit):
    """A signal ended training after a complete batch. The exit status is 128 plus the signal's number.

    Args:
        signum: The signal.
        batch: Number of trained batches.
        earlier: The checkpoint that the run resumes from, if none was written for this batch because the loss had
            climbed.
    """

    def __init__(self, signum: int, batch: int, earlier: str | None = None) -> None:
        super().__init__(128 + signum)
        self.signum, self.batch, self.earlier = signum, batch, earlier

    def __str__(self) -> str:
        stopped = f"stopped by {signal.Signals(self.signum).name} after batch {self.batch}"
        if self.earlier is None:
            return f"{stopped}, with a checkpoint; the same command resumes from it"
        return (
            f"{stopped}, without a checkpoint, since the loss had climbed; the same command resumes from {self.earlier}"
        )


def did_you_mean(name: object, known: Iterable[str], prefix: str = "", *, otherwise: str | None = None) -> str:
    """Return ``; did you mean 'x'?`` with the closest of the known names, or ``otherwise`` if none is close.

    Args:
        name: A name or a dotted key.
        known: The known names or dotted keys. A similar last part, in another section, is close too.
        prefix: Prefix of the suggestion.
        otherwise: By default, ``; known:`` and all known names.
    """
    wanted, known = str(name), list(known)
    section, _, leaf = wanted.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    close = [siblings[match] for match in difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.7)]
    if not siblings:  # the section may be misspelt
        close = difflib.get_close_matches(wanted, known, n=1, cutoff=0.75)
    if not close:
        leaves = {key.rpartition(".")[2]: key for key in reversed(known)}
        cutoff = 0.5 if len(known) <= 20 else 0.7
        matches = difflib.get_close_matches(leaf, leaves, n=1, cutoff=cutoff)
        close = [leaves[leaf] for leaf in matches] or [key for key in known if wanted in key]
    if close:
        return f"; did you mean {prefix + close[0]!r}?"
    return f"; known: {', '.join(known)}" if otherwise is None else otherwise


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def failure_line(what: str, failed: str, error: BaseException) -> str:
    """``what: failed (ErrorClass: reason)`` in one line, with credentials masked."""
    return mask_urls(f"{what}: {failed} ({type(error).__name__}: {first_line(error)})")


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """The error, then the chain of errors that it was raised from or while handling, up to the first."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def mask(value: Any, name: str = "") -> Any:
    """Return a copy of a value, nested or not, without credentials in URLs and under names such as ``api_key``.

    Interpolations such as ``${oc.env:NAME}`` do not contain the credential and are kept.
    """
    if isinstance(value, Mapping):
        return {key: mask(item, name if is_secret_name(name) else str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mask(item, name) for item in value]
    if is_secret_name(name) and not isinstance(value, bool) and value not in (None, ""):
        return value if isinstance(value, str) and _INTERPOLATED.fullmatch(value) else MASK
    return mask_urls(value) if isinstance(value, str) else value


def masked_command_line() -> AbstractContextManager[None]:
    """Mask credentials in ``sys.argv`` inside the block, for libraries that record it."""
    return temporary_attribute(sys, "argv", [_masked_argument(argument) for argument in sys.argv])


def mask_urls(text: str) -> str:
    """Mask user, password and parameters such as ``token`` and ``sig`` in the URLs of a text."""
    return _URL.sub(lambda url: _masked_url(url[0]), text)


def is_secret_name(name: str) -> bool:
    """Whether a key's name indicates a credential: ``hf_token`` and ``apiKey`` do, ``tokenizer`` does not."""
    words = _words(name)
    pairs = itertools.pairwise(words)
    return any(word.endswith(_SECRET) for word in words) or any(a in _SECRET_KEYS and b == "key" for a, b in pairs)


def _masked_argument(argument: str) -> str:
    """Mask a command line argument, which may be ``section.key=value``."""
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


def _masked_parameter(match: re.Match[str]) -> str:
    name, value = unquote(match["name"]), match["value"]
    secret = is_secret_name(name) or any(word in _SECRET_IN_URLS for word in _words(name))
    return match[0] if not secret or not value or _INTERPOLATED.fullmatch(value) else f"{match['name']}={MASK}"
