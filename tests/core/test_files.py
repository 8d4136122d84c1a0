"""Atomic writes, even on a full disk; and locks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from composer_speedups.core.files import (
    LockedFileError,
    lock_file,
    remove_unfinished,
    replace_folder,
    write_atomically,
    write_json,
)
from tests.helpers.hangs import wait_until


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a full disk that reports the error only in fsync."""

    def fsync(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", fsync)


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_leaves_the_old_file_and_nothing_else() -> None:
    Path("report.json").write_text("old")
    with pytest.raises(OSError, match="No space left"):
        write_atomically(Path("report.json"), "new")
    assert Path("report.json").read_text() == "old"
    assert [path.name for path in Path().iterdir()] == ["report.json"]


def test_write_json_replaces_nan_and_infinity_with_null() -> None:
    write_json(Path("x.json"), {"a": [1.5, float("nan")], "b": {"c": (float("-inf"), "nan", None)}, "d": 2})
    assert json.loads(Path("x.json").read_text()) == {"a": [1.5, None], "b": {"c": [None, "nan", None]}, "d": 2}
    assert "NaN" not in Path("x.json").read_text()


def test_a_failed_replace_folder_leaves_the_old_folder_and_nothing_else() -> None:
    Path("model").mkdir()
    Path("model/weights").write_text("old")
    with pytest.raises(FileNotFoundError), replace_folder(Path("model")) as partial:
        (partial / "missing" / "weights").write_text("new")
    assert Path("model/weights").read_text() == "old"
    assert [path.name for path in Path().iterdir()] == ["model"]


def test_remove_unfinished_deletes_the_leftovers_of_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*_: Any) -> None:
        raise KeyboardInterrupt

    Path("mine").write_text("kept")
    with monkeypatch.context() as patch:
        patch.setattr("os.unlink", lambda *_: None)
        patch.setattr("shutil.rmtree", lambda *_, **__: None)
        patch.setattr("os.replace", kill)
        with pytest.raises(KeyboardInterrupt):
            write_atomically(Path("report.json"), "new")
        with pytest.raises(KeyboardInterrupt), replace_folder(Path("model")):
            kill()
    assert len(list(Path().iterdir())) == 3
    remove_unfinished(Path())
    assert [path.name for path in Path().iterdir()] == ["mine"]


def test_a_lock_is_exclusive_until_it_is_closed_and_keeps_the_content() -> None:
    Path("x").write_text("mine")
    with lock_file(Path("x"), "key"):
        with pytest.raises(LockedFileError, match=r"^key: x is in use by a running process"):
            lock_file(Path("x"), "key")
        lock_file(Path("y"), "key").close()
    lock_file(Path("x"), "key").close()
    assert Path("x").read_text() == "mine"
    assert Path("y").read_text() == ""


def can_be_locked(path: Path) -> bool:
    try:
        lock_file(path, "key").close()
    except LockedFileError:
        return False
    return True


def test_a_forked_child_does_not_hold_the_lock() -> None:
    """As a DataLoader worker, which lives for seconds after its parent was killed."""
    lock = lock_file(Path("x"), "key")
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(write)
        os.read(read, 1)  # until the parent closes its end
        os._exit(0)
    try:
        with pytest.raises(LockedFileError):  # the child has closed its copy only
            lock_file(Path("x"), "key")
        lock.close()
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        wait_until(lambda: can_be_locked(Path("x")), "the child holds the lock")  # it may not have got to run yet
    finally:
        os.close(write)
        os.waitpid(child, 0)
        os.close(read)


def test_a_file_that_its_holder_deletes_is_created_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two processes would hold the lock of one path: one of the deleted file, one of the new one."""
    flock, calls = fcntl.flock, []

    def late(file: Any, how: int) -> None:
        calls.append(file)
        if len(calls) == 1:
            os.unlink("x")
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with lock_file(Path("x"), "key") as lock:
        assert os.path.samestat(os.fstat(lock.fileno()), os.stat("x"))
    assert len(calls) == 2
    assert calls[0].closed


def test_replace_folder_keeps_another_processs_folder_if_requested() -> None:
    for keep in (True, False):
        with replace_folder(Path("tokenizer"), keep_existing=keep) as partial:
            (partial / "mine").touch()
            Path("tokenizer").mkdir(exist_ok=True)
            Path("tokenizer/theirs").touch()
        assert [path.name for path in Path("tokenizer").iterdir()] == ["theirs" if keep else "mine"]
        assert [path.name for path in Path().iterdir()] == ["tokenizer"]


def test_weights_in_a_replaced_folder_have_the_mode_of_a_new_file() -> None:
    before = os.umask(0o077)
    try:
        with replace_folder(Path("model")) as folder:
            (folder / "model.safetensors").touch(0o600)
        assert Path("model/model.safetensors").stat().st_mode & 0o777 == 0o600
        os.umask(0o022)
        with replace_folder(Path("model")) as folder:
            (folder / "model.safetensors").touch(0o600)
        assert Path("model/model.safetensors").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)
