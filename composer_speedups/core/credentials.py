"""What looks like a credential, and is masked wherever a run writes it down: parts of addresses, values under names."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

__all__ = ["MASK", "is_secret_name", "mask", "mask_urls", "masked_command_line"]

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
