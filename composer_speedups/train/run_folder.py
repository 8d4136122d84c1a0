"""The folder of a run: claimed once, never overwritten, written to atomically."""

from __future__ import annotations

import fcntl
from datetime import datetime
from pathlib import Path
from typing import IO

from composer.utils import dist, partial_format

from composer_speedups.core.errors import ConfigError
from composer_speedups.core.files import remove_unfinished, with_working_directory
from composer_speedups.train.checkpoints.finding import checkpoints_after, checkpoints_in, newest_whole, remove_partials
from composer_speedups.train.checkpoints.reading import check_checkpoint
from composer_speedups.train.checkpoints.same_run import began_with_same_load, check_same_run
from composer_speedups.train.config import Config, save_config
from composer_speedups.train.config.checks import checkpoint_fault

__all__ = ["RunFolder"]

_LOAD = "checkpoint.load"


class RunFolder:
    """``runs/<run_name>``, held by this process inside a ``with`` block.

    A run of this name that was interrupted goes on in its folder from its newest whole checkpoint, where
    ``checkpoint.autoresume`` says so and the config is the same; so does a run whose ``checkpoint.load`` lies inside
    the folder. Any other earlier run of the name is moved to ``<run_name>.<its date>``, and back where this one ends
    with an error before it has written anything; one still going is refused. On ranks other than 0 nothing is touched.

    Args:
        config: Of the run.
        named: Whether its name was given: under the default one, jobs that have nothing to do with each other meet.

    Attributes:
        load: The checkpoint to load, the one found or ``checkpoint.load``; None for none. Agreed among the ranks.
        resumed: Whether it was found in the folder.
        starts: How many processes have worked in the folder, this one included.

    Raises:
        ConfigError: The folder cannot be written, another process is using it, its run was interrupted under another
            config, or the checkpoint is refused.
    """

    def __init__(self, config: Config, *, named: bool = False) -> None:
        self.path = Path(config.runs_folder) / config.run_name
        self.load, self.resumed, self.starts = config.checkpoint.load, False, 1
        self._named = named
        self._lock: IO[str] | None = None
        self._earlier: Path | None = None  # where an earlier run was moved
        if dist.get_global_rank() == 0:
            try:
                self._claim(config)
            except OSError as error:
                raise ConfigError(
                    f"runs_folder: {with_working_directory(self.path)} cannot be written ({error.strerror}); choose "
                    "another folder"
                ) from error
        agreed = [(self.load, self.resumed, self.starts)]
        dist.broadcast_object_list(agreed)
        self.load, self.resumed, self.starts = agreed[0]

    def _claim(self, config: Config) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.path.parent / f".{config.run_name}.lock", "w")  # noqa: SIM115  # held to the end
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ConfigError(
                f"run_name: {config.run_name!r} is in use by a run that is still going; choose another name"
            ) from None
        try:
            goes_on = self._find(config)
        except BaseException:
            self._lock.close()
            raise
        if self.path.exists() and not goes_on:
            self._earlier = self.path.rename(_free_name(self.path, _date_of(self.path)))
        self.path.mkdir(exist_ok=True)
        if goes_on:
            self._go_on(_date_of(self.path))
            print(f"{config.run_name}: goes on from {self.load}", flush=True)
        save_config(config, self._config)

    def _find(self, config: Config) -> bool:
        """Whether the run goes on in its folder; sets what it loads. Nothing is changed here."""
        settings, given = config.checkpoint, config.checkpoint.load
        inside = given is not None and self.path.resolve() in Path(given).resolve().parents
        interrupted = self._config.exists() and not (self.path / "report.json").exists()
        resumable = self._named and settings.autoresume and settings.interval is not None and interrupted
        if (
            resumable
            and checkpoints_in(self._checkpoints)
            and (not inside or began_with_same_load(config, self._config))
        ):
            check_same_run(config, self._config)
            if found := newest_whole(self._checkpoints, trust=settings.trust_checkpoint):
                self.load, self.resumed = str(found), True
                return True
        path = None if given is None else _formatted(given, config.run_name)
        if fault := checkpoint_fault(path):
            raise ConfigError(f"{_LOAD} {fault}")
        if path is not None and not settings.trust_checkpoint:
            check_checkpoint(path, _LOAD, weights_only=settings.weights_only)
        return inside

    def _go_on(self, date: str) -> None:
        """Take away what was half-written, and put aside what a run from here on does not lead to."""
        remove_unfinished(self.path)
        remove_partials(self._checkpoints)
        report = self.path / "report.json"
        if report.exists():  # it has finished before; until it has again, it is interrupted
            report.rename(_free_name(self.path / "report.json", date))
        for path in checkpoints_after(Path(str(self.load)).resolve()):  # damaged ones, when it was found
            path.rename(_free_name(path, date))
        self.starts = 1 + len(list(self.path.glob("log-rank0*.txt")))

    @property
    def _config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._earlier is not None and [*self.path.iterdir()] == [self._config]:
            self._config.unlink()
            self._earlier.rename(self.path)  # takes the place of an empty folder
        if self._lock is not None:
            self._lock.close()

    def __truediv__(self, name: str) -> Path:
        return self.path / name


def _formatted(pattern: str, run_name: str) -> str:
    try:
        return partial_format(pattern, run_name=run_name, rank=0, local_rank=0, node_rank=0)
    except (AttributeError, LookupError, ValueError) as error:
        raise ConfigError(
            f"{_LOAD} is no file: {pattern}; what braces hold is run_name, rank, local_rank or node_rank"
        ) from error


def _date_of(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y%m%d-%H%M%S")


def _free_name(path: Path, date: str) -> Path:
    candidates = [path.with_name(f"{path.name}.{date}{suffix}") for suffix in ("", *(f"-{i}" for i in range(2, 100)))]
    return next(c for c in candidates if not c.exists())
