"""Write checkpoints atomically, and find those in a run's folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

from composer.callbacks import CheckpointSaver
from composer.core import Event, State
from composer.loggers import Logger
from composer.utils import checkpoint, dist

from composer_speedups.callbacks.checkpoints import checkpoint_allowed, last_checkpoint
from composer_speedups.core.errors import Interrupted, RunFailedError, causes_of
from composer_speedups.core.files import NO_SPACE, publish, remove_unfinished
from composer_speedups.train.fit import StopSignals

_FILE_NAME = re.compile(r"ep(\d+)-ba(\d+)-rank0\.pt")  # named as by Composer


class WholeCheckpointSaver(CheckpointSaver):
    """Saves checkpoints in ``folder``, which is this run's own, under a temporary name, and renames them when they are
    on the disk. Composer writes in place: a kill leaves a partial file under a valid name, or no latest one.

    The ``keep`` newest ones are kept (-1: all), whichever process wrote them. FSDP's sharded ones are Composer's own.
    When ``stop`` requests the end, the batch ends with a checkpoint, and training with :class:`Interrupted`. If one
    cannot be written, a :class:`RunFailedError` names the reason, and earlier ones are intact.
    """

    def __init__(self, folder: Path, interval: str, keep: int, stop: StopSignals) -> None:
        super().__init__(
            folder=str(folder),
            remote_file_name=None,
            latest_remote_file_name=None,
            save_interval=interval,
            overwrite=True,  # the folder belongs to this run
            num_checkpoints_to_keep=keep,
        )
        self.stop = stop
        self._due = False  # at the end of the epoch

    def fit_start(self, state: State, logger: Logger) -> None:
        super().fit_start(state, logger)
        if dist.get_global_rank() == 0:
            self._remove_older()  # an earlier process may have been killed before it did
        self.stop.defer()

    def fit_end(self, state: State, logger: Logger) -> None:
        super().fit_end(state, logger)
        self.stop.ignore()

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch_in_epoch.value == state.dataloader_len:
            # The epoch ends next, from where a resumed run starts more cleanly than from after the last batch.
            self._due = self.save_interval(state, Event.BATCH_CHECKPOINT)
        else:
            super().batch_checkpoint(state, logger)
        if (signum := self.stop.signal_on_any_rank(state.device)) is None:
            return
        unsaved = self.last_checkpoint_batch != state.timestamp.batch
        if unsaved and checkpoint_allowed(self, state, Event.BATCH_CHECKPOINT):
            self._save_checkpoint(state, logger)
        saved = self.last_checkpoint_batch == state.timestamp.batch
        raise Interrupted(signum, state.timestamp.batch.value, None if saved else last_checkpoint(state) or "the start")

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        if self._due and self.last_checkpoint_batch != state.timestamp.batch:
            self._save_checkpoint(state, logger)
        self._due = False
        super().epoch_checkpoint(state, logger)

    def _save_checkpoint(self, state: State, logger: Logger) -> None:
        if state.fsdp_sharded_state_dict_enabled:
            super()._save_checkpoint(state, logger)
            return
        self.last_checkpoint_batch = state.timestamp.batch
        path = Path(self.filename.format(state))
        partial = path.with_name(f".unfinished-{path.name}")
        try:
            checkpoint.save_checkpoint(state, str(partial))
            if dist.get_global_rank() == 0:
                publish(partial, path)
                self._point_at(path, state)
        except Exception as error:
            remove_unfinished(path.parent)
            cause = next((cause for cause in causes_of(error) if isinstance(cause, OSError)), None)
            if cause is None:
                raise
            older = next(iter(checkpoints_in(path.parent)), "the start")
            fix = "free some space" if cause.errno in NO_SPACE else "see to the folder"
            reason = f"{path} could not be written ({cause.strerror or cause}); {fix}"
            raise RunFailedError(f"checkpoint: {reason}; the same command resumes from {older}") from error
        if dist.get_global_rank() == 0:
            self.saved_checkpoints.append(str(path))
            self._remove_older()

    def _point_at(self, path: Path, state: State) -> None:
        assert self.latest_filename is not None
        link = Path(self.latest_filename.format(state))
        new = link.with_name(f".unfinished-{link.name}")
        new.unlink(missing_ok=True)
        new.symlink_to(path.name)
        os.replace(new, link)

    def _remove_older(self) -> None:
        if self.num_checkpoints_to_keep >= 0:
            for path in checkpoints_in(Path(self.folder))[max(self.num_checkpoints_to_keep, 1) :]:
                path.unlink(missing_ok=True)


def checkpoints_in(folder: Path) -> list[Path]:
    """Checkpoints sorted by batches, the newest first. Partial files are not included."""
    numbers = {path: match for path in folder.glob("*.pt") if (match := _FILE_NAME.fullmatch(path.name))}
    return sorted(numbers, key=lambda path: (int(numbers[path][2]), int(numbers[path][1])), reverse=True)
