"""The checkpoints of a run's folder, and the newest whole one among them."""

from __future__ import annotations

import warnings
from pathlib import Path

from composer_speedups.train.checkpoints.reading import FILE_NAME, DamagedCheckpointError, check_checkpoint, check_whole

__all__ = ["checkpoints_after", "checkpoints_in", "newest_whole", "remove_partials"]


def checkpoints_in(folder: Path) -> list[Path]:
    """Checkpoints by their names, the one after the most batches first. Partial files are none."""
    found = {path: match for path in folder.glob("*.pt") if (match := FILE_NAME.fullmatch(path.name))}
    return sorted(found, key=lambda path: (int(found[path][2]), int(found[path][1])), reverse=True)


def checkpoints_after(path: Path) -> list[Path]:
    """Checkpoints beside this one that were written after more batches; none where it is not named as they are."""
    all_of_them = checkpoints_in(path.parent)
    return all_of_them[: all_of_them.index(path)] if path in all_of_them else []


def newest_whole(folder: Path, *, trust: bool) -> Path | None:
    """The newest checkpoint that is not damaged; a warning names each newer one that is.

    Raises:
        ConfigError: The newest whole one holds what no checkpoint of ours does.
    """
    for path in checkpoints_in(folder):
        try:
            (check_whole if trust else check_checkpoint)(str(path), "checkpoint.autoresume")
        except DamagedCheckpointError as error:
            warnings.warn(f"passed over: {error}", UserWarning, stacklevel=2)
            continue
        return path
    return None


def remove_partials(folder: Path) -> None:
    """Take away what a kill or a full disk left half-written."""
    for path in folder.glob(".*.partial"):
        path.unlink(missing_ok=True)
