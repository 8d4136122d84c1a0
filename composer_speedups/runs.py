"""The folder of a run: claimed once, never overwritten, written to atomically."""

from __future__ import annotations

import fcntl
from datetime import datetime
from pathlib import Path
from typing import IO

from composer.utils import dist

from composer_speedups.config import Config, save_config
from composer_speedups.errors import ConfigError

__all__ = ["RunFolder"]


class RunFolder:
    """``runs/<run_name>``, held by this process inside a ``with`` block.

    An earlier run of the same name is moved to ``<run_name>.<its date>``; a run still going is refused. A run
    that resumes from a checkpoint inside the folder goes on in it. On ranks other than 0 nothing is touched.

    Raises:
        ConfigError: The folder cannot be written, or another process is using it.
    """

    def __init__(self, config: Config) -> None:
        self.path = Path(config.runs_folder) / config.run_name
        self._lock: IO[str] | None = None
        if dist.get_global_rank() == 0:
            try:
                self._claim(config)
            except OSError as error:
                raise ConfigError(
                    f"runs_folder: {self.path} cannot be written ({error.strerror}); choose another folder"
                ) from error
        dist.barrier()

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
        load = config.checkpoint.load
        resumes_here = load is not None and self.path.resolve() in Path(load).resolve().parents
        if self.path.exists() and not resumes_here:
            self.path.rename(_free_name(self.path))
        self.path.mkdir(exist_ok=True)
        save_config(config, self.path / "config.yaml")

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def __truediv__(self, name: str) -> Path:
        return self.path / name


def _free_name(path: Path) -> Path:
    date = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y%m%d-%H%M%S")
    candidates = [path.with_name(f"{path.name}.{date}{suffix}") for suffix in ("", *(f"-{i}" for i in range(2, 100)))]
    return next(c for c in candidates if not c.exists())
