"""Folders of what Python executes, bytecode and compiled kernels: only the user can write to them."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from composer_speedups.core.errors import ConfigError

__all__ = ["cache_home", "make_own_folder", "make_private_folder", "others_can_write"]


def cache_home() -> Path:
    """Where this user's caches of composer_speedups are: in ``$XDG_CACHE_HOME``, by default ``~/.cache``.

    Raises:
        RuntimeError: The user has no home folder.
    """
    cache_home = Path(os.environ.get("XDG_CACHE_HOME", ""))  # the standard has relative ones ignored
    return (cache_home if cache_home.is_absolute() else Path.home() / ".cache") / "composer_speedups"


def make_own_folder(folder: Path, key: str, fix: str) -> Path:
    """Create a folder, for its user alone, or check that nobody else can write to an existing one.

    Args:
        folder: Symbolic links are followed.
        key: The config key that asks for it.
        fix: What to do where others could write to it.

    Returns:
        Its path without symbolic links, which others could turn elsewhere later.

    Raises:
        ConfigError: Others could put code there.
        OSError: It cannot be made.
    """
    real = Path(os.path.realpath(folder))
    _check(real, key, fix)
    for path in (*reversed(real.parents), real):
        path.mkdir(mode=0o700, exist_ok=True)
    _check(real, key, fix)  # another process may have been faster
    return real


def make_private_folder(folder: Path, key: str, fix: str) -> Path:
    """As :func:`make_own_folder`, for a folder whose mode this project decides: 0700.

    Then the modes of what it holds do not matter.
    """
    real = make_own_folder(folder, key, fix)
    if stat.S_IMODE(real.stat().st_mode) != 0o700:
        real.chmod(0o700)
    return real


def others_can_write(path: Path) -> str | None:
    """How users other than this one and root could write to a path without symbolic links; None where they cannot.

    Whoever can write to a parent can exchange what lies in it. Parents that do not exist yet are passed over.
    """
    me = os.geteuid()
    trusted = {me, 0, os.stat("/").st_uid}  # in a user namespace, root's own folders show another number
    for place in (path, *path.parents):
        try:
            found = os.lstat(place)
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(found.st_mode):
            return f"{place} is a symbolic link"
        if found.st_uid not in ({me} if place == path else trusted):
            return f"{place} belongs to {_name_of(found.st_uid)}"
        by_group = found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid)
        kept_apart = found.st_mode & stat.S_ISVTX and place != path  # as in /tmp: only owners rename what is theirs
        if (by_group or found.st_mode & stat.S_IWOTH) and not kept_apart:
            return f"{place} is writable by others (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def _check(folder: Path, key: str, fix: str) -> None:
    if problem := others_can_write(folder):
        raise ConfigError(f"{key}: others could put code into {folder}: {problem}; {fix}")


def _is_own_group(gid: int) -> bool:
    """Whether it is the group of this user alone that many distributions make, where umask 002 is common."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and not {*group.gr_mem} - {user.pw_name}


def _name_of(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
