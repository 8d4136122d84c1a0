"""The YAML file of a table, and the configurations that it declares; :mod:`benchmarks.run` describes the keys."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

_PEERS = sorted(path.stem for path in (Path(__file__).parent / "peers").glob("*.py") if "def main(" in path.read_text())
_ON_SEVERAL_GPUS = "own_trainer"  # the peer that supports them


class Configuration(NamedTuple):
    """One configuration at one point of the matrix."""

    name: str
    point: dict[str, Any]
    overrides: list[str]
    peer: str | None = None  # a module of benchmarks.peers to run instead of train.py
    warm: bool = False  # its runs use a filled compile cache
    ranks: int = 1  # number of processes, with one GPU each
    published: str | None = None


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Configuration(_Keys):
    overrides: list[str] = Field([], alias="set")
    peer: str | None = None
    warm: bool = False
    ranks: int = Field(1, ge=1)
    published: str | None = None

    @model_validator(mode="after")
    def _check_peer(self) -> _Configuration:
        if self.peer not in (None, *_PEERS):
            raise ValueError(f"no such peer; peers are {', '.join(_PEERS)}")
        if self.ranks > 1 and self.peer not in (None, _ON_SEVERAL_GPUS):
            raise ValueError(f"this peer trains in one process; leave out ranks, or take {_ON_SEVERAL_GPUS}")
        return self


class Table(_Keys):
    """The keys of a table, and what the command line adds to them: ``only``, ``last`` and ``resume``."""

    base: str
    overrides: list[str] = Field([], alias="set")
    repeats: int = Field(1, ge=1)
    matrix: dict[str, list[Any]] = {}
    cumulative: bool = False
    jobs: int = Field(1, ge=1)
    warm_jobs: int = Field(1, ge=1)
    fresh: bool = False
    share_compiled: bool = False
    losses: bool = False
    configurations: dict[
        str, Annotated[_Configuration, BeforeValidator(lambda keys: {"set": keys} if isinstance(keys, list) else keys)]
    ]
    only: list[str] = []  # selected configurations; all if empty
    last: list[str] = []  # overrides of all configurations, after their own
    resume: bool = False

    @model_validator(mode="after")
    def _check_names(self) -> Table:
        if not set(self.only) <= set(self.configurations):
            raise ValueError(f"configurations must be among {', '.join(self.configurations)}")
        return self


def _keys_of(path: Path) -> dict[str, Any]:
    """A file's keys; those that it lacks are of the table that it is ``like``, after whose ``set`` comes its own."""
    keys = yaml.safe_load(path.read_text())
    like = keys.pop("like", None)
    if like is None:
        return keys
    other = _keys_of(path.with_name(f"{like}.yaml"))
    return {**other, **keys, "set": [*other.get("set", []), *keys.get("set", [])]}


def read_table(path: Path, overrides: Sequence[str] = ()) -> Table:
    """Read a table. Overrides replace ``repeats``, ``jobs``, ``warm_jobs`` and axes of the matrix, select
    configurations or resume; others apply to all configurations.

    Raises:
        SystemExit: Names the key, and says what is allowed.
    """
    keys = _keys_of(path) | {"last": []}
    for override in overrides:
        key, sign, value = override.partition("=")
        if not sign:
            raise SystemExit(f"{override}: must be key=value, like repeats=2")
        if key in ("repeats", "jobs", "warm_jobs", "resume"):
            keys[key] = value
        elif key == "configurations":
            keys["only"] = yaml.safe_load(value)
        elif key in keys.get("matrix", {}):
            given = yaml.safe_load(value)
            keys["matrix"][key] = given if isinstance(given, list) else [given]
        else:
            keys["last"].append(override)
    try:
        return Table.model_validate(keys)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise SystemExit(f"{path}: {where}{': ' if where else ''}{message}, not {first['input']!r:.80}") from error


def configurations_of(table: Table) -> list[Configuration]:
    """Every selected configuration at every point of the matrix."""
    configurations = []
    logged = ["loggers.file={}"] if table.losses else []
    for values in itertools.product(*table.matrix.values()):
        point = dict(zip(table.matrix, values, strict=True))
        placed = [f"{key}={json.dumps(value)}" for key, value in point.items()]
        kept: list[str] = []
        for name, keys in table.configurations.items():
            own = keys.overrides
            if table.cumulative and keys.peer is None:
                own = kept = kept + own
            if name in (table.only or table.configurations):
                overrides = [*table.overrides, *placed, *own, *logged, *table.last]
                more = keys.model_dump(exclude={"overrides"})
                configurations.append(Configuration(name, point, overrides, **more))
    return configurations
