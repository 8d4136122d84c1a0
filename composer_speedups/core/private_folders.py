"""Folders for files that Python executes, such as bytecode and compiled kernels. Only the user can write to them."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from composer_speedups.core.errors import ConfigError

__all__ = ["cache_home", "make_own_folder", "make_private_folder", "others_can_write"]


def cache_home() -> Path:
    """This user's cache folder: ``composer_speedups`` in ``$XDG_CACHE_HOME``, by default in ``~/.cache``.

    Raises:
        RuntimeError: The user has no home folder.
    """
    # relative paths must be ignored according to the XDG specification
    cache_home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache_home if cache_home.is_absolute() else Path.home() / ".cache") / "composer_speedups"


def make_own_folder(folder: Path, key: str, fix: str) -> Path:
    """Create a folder for this user alone, or check that no other user can write to an existing one.

    Args:
        folder: The path; symbolic links are followed.
        key: The config key that names it.
        fix: What to do if others can write to it.

    Returns:
        The path without symbolic links, which could be redirected later.

    Raises:
        ConfigError: Other users could put code into it.
        OSError: It cannot be created.
    """
    real = Path(os.path.realpath(folder))
    _check(real, key, fix)
    for path in (*reversed(real.parents), real):
        path.mkdir(mode=0o700, exist_ok=True)
    _check(real, key, fix)  # another process may have created it
    return real


def make_private_folder(folder: Path, key: str, fix: str) -> Path:
    """As :func:`make_own_folder`, but with mode 0700, for folders that only this project uses.

    The modes of the files inside then do not matter.
    """
    real = make_own_folder(folder, key, fix)
    if stat.S_IMODE(real.stat().st_mode) != 0o700:
        real.chmod(0o700)
    return real


def others_can_write(path: Path) -> str | None:
    """Describe how users other than this one and root could write to a path without symbolic links; None if they
    cannot.

    Parents are checked too, because whoever can write to them can replace the folder. Missing parents are skipped.
    """
    me = os.geteuid()
    trusted = {me, 0, os.stat("/").st_uid}  # in a user namespace, root's folders have another owner
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
        # sticky, as /tmp: only owners can rename their files
        kept_apart = found.st_mode & stat.S_ISVTX and place != path
        if (by_group or found.st_mode & stat.S_IWOTH) and not kept_apart:
            return f"{place} is writable by others (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def _check(folder: Path, key: str, fix: str) -> None:
    if problem := others_can_write(folder):
        raise ConfigError(f"{key}: others could put code into {folder}: {problem}; {fix}")


def _is_own_group(gid: int) -> bool:
    """Whether it is the user's private group, which many distributions create and use with umask 002."""
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
