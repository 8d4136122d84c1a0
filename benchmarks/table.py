"""A table of benchmarks/tables: its file, its arms, and what the command line changes in it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

__all__ = ["Arm", "arms_of", "read_table"]

_KNOWN = {"base", "set", "repeats", "matrix", "cumulative", "jobs", "ahead", "fresh", "losses", "published", "arms"}
_KNOWN_OF_AN_ARM = {"peer", "ranks", "set", "warm"}
_PEERS = Path(__file__).parent / "peers"


class Arm(NamedTuple):
    name: str
    point: dict[str, Any]  # its place in the matrix
    overrides: list[str]
    peer: str | None = None  # a module of benchmarks.peers in train.py's place
    warm: bool = False  # its runs find a filled compile cache
    ranks: int = 1  # processes, a GPU each, that train together


def arms_of(table: dict[str, Any]) -> list[Arm]:
    """Every arm at every point of the matrix."""
    matrix = table.get("matrix", {})
    points = [dict(zip(matrix, values, strict=True)) for values in itertools.product(*matrix.values())]
    arms = []
    for point in points:
        kept: list[str] = []
        for name, given in table["arms"].items():
            arm = given if isinstance(given, dict) else {"set": given}
            peer, warm = arm.get("peer"), arm.get("warm", False)
            own = list(arm.get("set", []))
            if table.get("cumulative") and peer is None:
                own = kept = kept + own
            placed = [f"{key}={json.dumps(value)}" for key, value in point.items()]
            asked = ["loggers.file={}"] if table.get("losses") else []
            if name in (table.get("only") or table["arms"]):
                overrides = [*table.get("set", []), *placed, *own, *asked, *table.get("last", [])]
                arms.append(Arm(name, point, overrides, peer, warm, arm.get("ranks", 1)))
    return arms


def read_table(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The table; overrides replace ``repeats`` and axes of the matrix, pick arms, and others go to every arm.

    Raises:
        SystemExit: A key that tables or arms do not have, an arm that is not there, an override that is no key=value.
    """
    table = yaml.safe_load(path.read_text())
    if "like" in table:
        table = _like(path.with_name(f"{table['like']}.yaml"), table)
    unknown = set(table) - _KNOWN
    if unknown or not {"base", "arms"} <= set(table):
        raise SystemExit(f"{path}: needs base and arms; may have {', '.join(sorted(_KNOWN))}")
    for name, arm in table["arms"].items():
        _check_arm(path, name, arm)
    _check_published(path, table)
    table["last"] = []
    table["given"] = [override for override in overrides if not override.startswith("resume=")]
    for override in overrides:
        key, sign, value = override.partition("=")
        if not sign:
            raise SystemExit(f"{override}: must be key=value, like repeats=2")
        if key in ("repeats", "jobs", "ahead"):
            if not value.isdecimal() or int(value) < 1:
                raise SystemExit(f"{override}: must be a whole number of at least 1")
            table[key] = int(value)
        elif key == "resume":
            if value not in ("true", "false"):
                raise SystemExit(f"{override}: must be true or false")
            table[key] = value == "true"
        elif key == "arms":
            table["only"] = yaml.safe_load(value)
            if not isinstance(table["only"], list) or not set(table["only"]) <= set(table["arms"]):
                raise SystemExit(f"arms={value}: must be a list of {', '.join(table['arms'])}")
        elif key in table.get("matrix", {}):
            table["matrix"][key] = [yaml.safe_load(value)]
        else:
            table["last"].append(override)
    return table


def _like(other: Path, table: dict[str, Any]) -> dict[str, Any]:
    """Another table with this one's keys in place of its own, its overrides after those, and nothing published."""
    if not other.is_file():
        raise SystemExit(f"{other}: no such table, which another is to be like")
    found = yaml.safe_load(other.read_text())
    found.pop("published", None)
    own = {key: value for key, value in table.items() if key != "like"}
    return {**found, **own, "set": [*found.get("set", []), *table.get("set", [])]}


def _check_arm(path: Path, name: str, arm: Any) -> None:
    given = arm.get("set", []) if isinstance(arm, dict) else arm
    strings = isinstance(given, list) and all(isinstance(override, str) for override in given)
    if not strings or (isinstance(arm, dict) and set(arm) - _KNOWN_OF_AN_ARM):
        raise SystemExit(
            f"{path}: arm {name!r} must be a list of overrides, each a string (in quotes where it has a colon), "
            f"or have {', '.join(sorted(_KNOWN_OF_AN_ARM))}"
        )
    if isinstance(arm, list):
        return
    peers = sorted(p.stem for p in _PEERS.glob("*.py") if "def main(" in p.read_text())
    if arm.get("peer") not in (None, *peers):
        raise SystemExit(f"{path}: arm {name!r} names no peer; there are {', '.join(peers)}")
    ranks = arm.get("ranks", 1)
    if not isinstance(ranks, int) or ranks < 1:
        raise SystemExit(f"{path}: arm {name!r} has ranks {ranks!r}; it must be a whole number of at least 1")
    if ranks > 1 and arm.get("peer"):
        raise SystemExit(f"{path}: arm {name!r} is a peer, which trains in one process; leave out ranks")


def _check_published(path: Path, table: dict[str, Any]) -> None:
    published = table.get("published", {"where": "", "arms": {}})
    if set(published) != {"where", "arms"} or not set(published["arms"]) <= set(table["arms"]):
        raise SystemExit(f"{path}: published must have where (a text) and arms (those of the table, each with a text)")
