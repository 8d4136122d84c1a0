"""Folders for code that Python executes are refused if another user could write to them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from composer_speedups.core.errors import ConfigError
from composer_speedups.core.private_folders import cache_home, make_own_folder, make_private_folder, others_can_write

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


def here(*names: str) -> Path:
    return Path.cwd().joinpath(*names)


def made(*names: str, mode: int = 0o700) -> Path:
    path = here(*names)
    path.mkdir(parents=True)
    path.chmod(mode)
    return path


def test_a_private_folder_has_mode_700_whatever_the_umask() -> None:
    before = os.umask(0)
    try:
        real = make_private_folder(here("a", "b"), "key", "fix")
    finally:
        os.umask(before)
    assert real == here("a", "b")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (real, real.parent)] == [0o700, 0o700]
    assert make_private_folder(real, "key", "fix") == real


@pytest.mark.parametrize("mode", [0o757, 0o777, 0o1777, 0o722])
def test_a_folder_that_others_can_write_to_is_refused_in_one_line(mode: int) -> None:
    folder = made("a", "b", mode=mode)
    with pytest.raises(ConfigError, match=rf"^key: others could put code into {folder}: .*\(mode {mode:o}\); fix$"):
        make_own_folder(folder, "key", "fix")
    assert stat.S_IMODE(folder.stat().st_mode) == mode, (
        "the mode is not repaired, since others may already have written to the folder"
    )
    below = folder / "made" / "here"
    if mode & stat.S_ISVTX:  # as in /tmp: others cannot replace files that they do not own
        assert make_own_folder(below, "key", "fix") == below
    else:
        with pytest.raises(ConfigError, match=f"into {below}: {folder} is writable by others"):
            make_own_folder(below, "key", "fix")
        assert not below.parent.exists()


def test_only_make_private_folder_removes_read_access() -> None:
    folder = made("a", mode=0o755)
    make_own_folder(folder, "key", "fix")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    make_private_folder(folder, "key", "fix")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_symbolic_links_are_resolved_before_the_check() -> None:
    folder = made("own")
    here("link").symlink_to(folder)
    assert make_own_folder(here("link"), "key", "fix") == folder
    assert others_can_write(here("link")) == f"{here('link')} is a symbolic link"
    shared = made("shared", mode=0o777)
    here("to_shared").symlink_to(shared)
    with pytest.raises(ConfigError, match=f"into {shared / 'new'}: {shared} is writable by others"):
        make_own_folder(here("to_shared", "new"), "key", "fix")


@as_root
def test_a_folder_of_another_user_and_folders_below_it_are_refused() -> None:
    folder = made("theirs", "mine")
    os.chown(folder, 12345, 0)
    with pytest.raises(ConfigError, match=f"into {folder}: {folder} belongs to user 12345; fix"):
        make_own_folder(folder, "key", "fix")
    os.chown(folder, 0, 0)
    os.chown(folder.parent, 12345, 0)
    with pytest.raises(ConfigError, match=f"into {folder}: {folder.parent} belongs to user 12345; fix"):
        make_own_folder(folder, "key", "fix")
    sticky = made("tmp", mode=0o1777)
    os.chown(made("tmp", "planted"), 12345, 0)
    with pytest.raises(ConfigError, match=f"{sticky / 'planted'} belongs to user 12345"):
        make_own_folder(sticky / "planted", "key", "fix")


def test_this_users_folder_is_refused_for_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made("mine")
    assert others_can_write(folder) is None
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 12345)
    assert str(others_can_write(folder)).startswith(f"{folder} belongs to user ")


@as_root
def test_write_access_of_the_users_private_group_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made("a", mode=0o775)
    os.chown(folder, 0, 0)
    monkeypatch.setattr("grp.getgrgid", lambda gid: _Group("root", gid, []))
    assert others_can_write(folder) is None
    for others in (_Group("root", 0, ["bob"]), _Group("staff", 0, [])):
        monkeypatch.setattr("grp.getgrgid", lambda _, group=others: group)
        assert others_can_write(folder) == f"{folder} is writable by others (mode 775)"
    monkeypatch.undo()
    os.chown(folder, 0, 12345)
    assert others_can_write(folder) == f"{folder} is writable by others (mode 775)"


class _Group:
    def __init__(self, name: str, gid: int, members: list[str]) -> None:
        self.gr_name, self.gr_gid, self.gr_mem = name, gid, members


def test_cache_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_home() == Path("/somewhere/composer_speedups")
    monkeypatch.setenv("HOME", "/home/someone")
    for ignored in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_home() == Path("/home/someone/.cache/composer_speedups")
