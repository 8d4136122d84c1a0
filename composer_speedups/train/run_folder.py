"""The folder of a run: used by one process at a time, never overwritten, and resumed if the config is the same."""

from __future__ import annotations

import io
import shutil
import warnings
from datetime import datetime
from pathlib import Path
from typing import Any

from composer.core import Time
from composer.utils import dist

from composer_speedups.core.errors import ConfigError, Refusal
from composer_speedups.core.files import (
    LockedFileError,
    lock_file,
    remove_unfinished,
    with_working_directory,
    write_atomically,
)
from composer_speedups.train.checkpoints import DamagedCheckpointError, checkpoints_in, read_checkpoint
from composer_speedups.train.config.load import differences, save_config
from composer_speedups.train.config.schema import OBJECT_STORES, Config, checkpoint_problem
from composer_speedups.train.inputs import INITIAL, Inputs, changed_input, inputs_of

_LOAD = "checkpoint.load"


class RunFolder:
    """``runs/<run_name>``, locked by this process inside a ``with`` block; only rank 0 changes files. An earlier run is
    resumed, or moved to ``<run_name>.<its date>``. If this run fails before it writes anything, or is refused before it
    writes a checkpoint into the earlier run's folder, the earlier run is as it was. The logs of both stay."""

    def __init__(self, config: Config) -> None:
        self.path = Path(config.runs_folder) / config.run_name
        self._config, self._checkpoints = self.path / "config.yaml", self.path / "checkpoints"
        self.load, self.resumed = config.checkpoint.load, False  # resumed: autoresume found the checkpoint to load
        self.inputs: Inputs = {}  # the files that the run reads, by content; empty on other ranks than 0
        self._lock: io.FileIO | None = None
        self._moved: dict[Path, Path] = {}  # what was set aside → where it is now
        self._stored: bytes | None = None  # config.yaml of the run that continues here
        self._saved: list[Path] | None = None  # the checkpoints of that run; None in a new folder
        if dist.get_global_rank() == 0:
            try:
                self._claim(config)
            except OSError as error:
                raise ConfigError(
                    f"runs_folder: {with_working_directory(self.path)} is not writable ({error.strerror}); choose "
                    "another folder"
                ) from error
        shared = [(self.load, self.resumed)]
        dist.broadcast_object_list(shared)
        self.load, self.resumed = shared[0]

    def _claim(self, config: Config) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = lock_file(self.path.parent / f".{config.run_name}.lock", "runs_folder")  # held to the end
        except LockedFileError:
            raise ConfigError(
                f"run_name: {config.run_name!r} is in use by a running process; choose another name"
            ) from None
        try:
            self.inputs = inputs_of(config)
            continues = self._choose_checkpoint(config)
        except BaseException:
            self._lock.close()
            raise
        if continues:
            self._prepare_to_continue()
            print(f"{config.run_name}: resumes from {self.load}", flush=True)
        elif self.path.exists():
            self._set_aside(self.path, _date_of(self.path))
            print(f"{self.path} is a new run; the earlier one is now {self._moved[self.path]}", flush=True)
        self.path.mkdir(exist_ok=True)
        if continues:
            self._stored = self._config.read_bytes() if self._config.exists() else None
            self._saved = checkpoints_in(self._checkpoints)
        save_config(config, self._config)

    def _choose_checkpoint(self, config: Config) -> bool:
        """Set the checkpoint to load, and return whether the run resumes in its folder. Does not change files."""
        settings, path = config.checkpoint, config.checkpoint.load
        inside = path is not None and self.path.resolve() in Path(path).resolve().parents
        interrupted = self._config.exists() and not (self.path / "report.json").exists()
        resumes = settings.autoresume and settings.interval is not None and interrupted
        if resumes and checkpoints_in(self._checkpoints) and (not inside or self._began_with(config)):
            check_same_run(config, self._config)
            if newest := newest_undamaged(self._checkpoints, trust=settings.trust_checkpoint):
                newest_path, held = newest
                start_over = "choose another run_name, or checkpoint.autoresume=false to start over"
                self._check_same_inputs(held, f"run_name: {config.run_name!r} was interrupted, and", start_over)
                self._check_ranks(held, config)
                self.load, self.resumed = str(newest_path), True
                return True
        if problem := checkpoint_problem(path):
            raise ConfigError(f"{_LOAD} {problem}")
        if path is None:
            return False
        if not settings.trust_checkpoint and not path.endswith(".pt"):
            raise ConfigError(
                f"{_LOAD}: {path} is no .pt file, and Composer unpacks archives unchecked; name a .pt file, or, if you "
                "trust its author, set checkpoint.trust_checkpoint=true"
            )
        if not (settings.trust_checkpoint or settings.weights_only or inside):
            raise ConfigError(
                f"{_LOAD}: {path} is of another run; set checkpoint.weights_only=true to load its weights only, or, if "
                "you trust its author, checkpoint.trust_checkpoint=true to continue that run"
            )
        if path.startswith(OBJECT_STORES):  # Composer downloads it when the Trainer is built
            return False
        held = read_checkpoint(path, _LOAD, trust=settings.trust_checkpoint)
        if inside and not settings.weights_only:
            self._check_same_inputs(held, f"{_LOAD}: {path} was written, and", "set checkpoint.weights_only=true")
            self._check_ranks(held, config)
        return inside

    def _began_with(self, config: Config) -> bool:
        """Whether the interrupted run was started with the same ``checkpoint.load``, so that its own are newer."""
        changes = differences(config, self._config)
        return changes is not None and all(key != _LOAD for key, *_ in changes)

    def _check_same_inputs(self, held: dict[str, Any], since: str, fix: str) -> None:
        """Refuse a checkpoint that was trained on other files. Weights that it began with are not read again."""
        if not held:  # a trusted file that cannot be read here
            return
        history = held["state"].get("callbacks", {}).get("RunHistory", {})
        before, now = ({**inputs, INITIAL: {}} for inputs in (history.get("inputs", {}), self.inputs))
        if changed := changed_input(before, now):
            raise ConfigError(f"{since} {changed} has changed since; to resume, restore that file; or {fix}")

    def _check_ranks(self, held: dict[str, Any], config: Config) -> None:
        """Refuse to continue a stream on another number of ranks, which would skip some rows and repeat others."""
        before, now = len(held.get("rng", ())), dist.get_world_size()
        if before not in (0, now) and config.data.streams:
            raise ConfigError(
                f"{_LOAD}: it was written while {before} rank{'s' * (before > 1)} read the stream, and {now} would "
                f"continue with other rows; start with composer -n {before}, or checkpoint.weights_only=true loads "
                "its weights only"
            )

    def _prepare_to_continue(self) -> None:
        """Delete partial files; set aside the report, and checkpoints newer than the one to load."""
        for folder in (self.path, self._checkpoints):
            remove_unfinished(folder)
        date, report, loaded = _date_of(self.path), self.path / "report.json", Path(str(self.load)).resolve()
        if report.exists():  # the run had finished; until it finishes again, it counts as interrupted
            self._set_aside(report, date)
        saved = checkpoints_in(loaded.parent)
        # damaged ones that were skipped, or intact ones if checkpoint.load names an older one
        for path in saved[: saved.index(loaded)] if loaded in saved else ():
            self._set_aside(path, date)

    def _set_aside(self, path: Path, date: str) -> None:
        """Rename a file or folder to ``<name>.<date>``, or ``<name>.<date>-2`` and so on."""
        names = [f"{path.name}.{date}{suffix}" for suffix in ("", *(f"-{i}" for i in range(2, 100)))]
        self._moved[path] = path.rename(next(new for name in names if not (new := path.with_name(name)).exists()))

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._lock is None:
            return
        if self._saved is None:
            undone = kind is not None and all(path.is_dir() for path in self.path.rglob("*") if path != self._config)
            if undone:
                shutil.rmtree(self.path)
        else:
            refused = kind is not None and issubclass(kind, Refusal) and kind.status == Refusal.status
            undone = refused and checkpoints_in(self._checkpoints) == self._saved
            if undone and self._stored is not None:
                write_atomically(self._config, self._stored)
            elif undone:
                self._config.unlink()
        for path, aside in self._moved.items() if undone else ():
            aside.rename(path)
            print(f"{aside} is {path} again", flush=True)
        self._lock.close()

    def __truediv__(self, name: str) -> Path:
        return self.path / name


def newest_undamaged(folder: Path, *, trust: bool) -> tuple[Path, dict[str, Any]] | None:
    """The newest undamaged checkpoint and its contents. A warning names each newer damaged one."""
    for path in checkpoints_in(folder):
        try:
            return path, read_checkpoint(str(path), "checkpoint.autoresume", trust=trust)
        except DamagedCheckpointError as error:
            warnings.warn(f"skipped a checkpoint: {error}", UserWarning, stacklevel=2)
    return None


def _date_of(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y%m%d-%H%M%S")


def check_same_run(config: Config, stored: Path) -> None:
    """Refuse to resume the run whose config.yaml is ``stored`` under another config, except for a longer training."""
    fix = "choose another run_name, or checkpoint.autoresume=false to start over"
    changes = differences(config, stored)
    if changes is None:
        raise ConfigError(f"run_name: {config.run_name!r} was interrupted, and its {stored} cannot be read; {fix}")
    for name, old, new in changes:
        if name == "trainer.max_duration" and _longer(old, new):
            continue
        before, now = ("null" if value is None else value for value in (old, new))
        raise ConfigError(
            f"run_name: {config.run_name!r} was interrupted under another config: {name} was {before} and is {now}; to "
            f"resume, set the same value; or {fix}"
        )


def _longer(old: Any, new: Any) -> bool:
    try:
        return Time.from_timestring(str(old)) < Time.from_timestring(str(new))
    except (RuntimeError, ValueError):  # other units, or not a time
        return False
