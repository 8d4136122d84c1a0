"""The working file of a table's call: every finished run at once, so that a killed call loses nothing.

``results/<gpu>/<table>.runs.jsonl`` lies beside the table's rows while a call is not finished. Its first line says
what is being run (arms, overrides, code) and each further line is one finished run. A finished call removes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from benchmarks.table import Arm
from composer_speedups.core.commands import output_of

__all__ = ["Journal", "Unfinished", "code_version", "header_of", "read_unfinished"]

Row = dict[str, Any]
_MEANT = {"base": "base", "jobs": "jobs", "fresh": "fresh", "code": "commit (or uncommitted changes)", "arms": "arms"}


class Unfinished(NamedTuple):
    """What a working file holds."""

    header: Row
    runs: dict[tuple[int, int], Row]  # (arm, repeat) → report

    @property
    def arms(self) -> list[Arm]:
        return [Arm(**arm) for arm in self.header["arms"]]

    def reports_of(self, arm: int) -> list[Row]:
        """Of the arm of this number, in the order of the repeats."""
        return [report for (index, _), report in sorted(self.runs.items(), key=lambda run: run[0]) if index == arm]


def header_of(name: str, call: str, table: Row, arms: Sequence[Arm], code: str | None) -> Row:
    """The first line of a working file: what a call is of, and when it began."""
    return {
        "table": name,
        "call": call,
        "base": table["base"],
        "jobs": table.get("jobs", 1),
        "fresh": table.get("fresh", False),
        "code": code,
        "arms": [arm._asdict() for arm in arms],
        "published": table.get("published", {"arms": {}})["arms"],
    }


def read_unfinished(path: Path) -> Unfinished | None:
    """The last call's working file; None without one. A line cut short by the call's death is left out.

    Raises:
        SystemExit: A line before the last is damaged.
    """
    try:
        lines = path.read_text().split("\n")
    except FileNotFoundError:
        return None
    whole = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last break was not written to its end
        try:
            whole.append(json.loads(line))
        except ValueError as error:
            raise SystemExit(f"{path}: line {number} is damaged; move the file away to begin anew") from error
    if not whole:
        return None
    header, *entries = whole
    return Unfinished(header, {(entry["arm"], entry["repeat"]): entry["report"] for entry in entries})


class Journal:
    """Writes a working file, which it locks: one call of a table at a time.

    Args:
        path: The file; the folder is made.

    Raises:
        SystemExit: Another process is running the table.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = threading.Lock()
        self._file: IO[bytes] = path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise SystemExit(f"{path}: another process is running this table; wait for it to end") from error

    def begin(self, header: Row) -> None:
        """Start the file anew with this call's header."""
        self._file.truncate(0)
        self._append(header)

    def go_on(self, header: Row) -> Unfinished | None:
        """The runs of the call that the file is of; None when it holds none.

        Raises:
            SystemExit: That call was of something else than ``header`` says; names what differs.
        """
        found = read_unfinished(self.path)
        if found is None:
            return None
        now = json.loads(json.dumps(header))
        different = [meant for key, meant in _MEANT.items() if found.header.get(key) != now[key]]
        if different:
            raise SystemExit(
                f"{self.path}: the call of {found.header['call']} had other {', '.join(different)}; "
                "give those again, or leave out resume=true to keep its runs as rows and begin anew"
            )
        content = self.path.read_bytes()
        self._file.truncate(content.rfind(b"\n") + 1)
        return found

    def add(self, arm: int, repeat: int, report: Row) -> None:
        """Keep a finished run; on the disk when this returns. Any thread may call it."""
        with self._lock:
            self._append({"arm": arm, "repeat": repeat, "report": report})

    def _append(self, entry: Row) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self, *, finished: bool) -> None:
        """Release the file, and remove it when its call has ``finished``."""
        if finished:
            self.path.unlink()
        self._file.close()


def code_version(root: Path) -> str | None:
    """The commit, with a digest of uncommitted changes to tracked code; None outside a git checkout."""
    if named := os.environ.get("COMPOSER_SPEEDUPS_COMMIT"):
        return named
    git = partial(output_of, "git", "-C", str(root), timeout=None)
    commit, changes = git("rev-parse", "HEAD"), git("diff", "HEAD", "--", ".", ":(exclude)benchmarks/results")
    if commit is None or not changes:
        return commit
    return f"{commit}+{hashlib.sha256(changes.encode()).hexdigest()[:12]}"
