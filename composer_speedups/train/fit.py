"""Training from start to end, whatever ends it."""

from __future__ import annotations

import warnings

from composer import Trainer

from composer_speedups.core.errors import Interrupted
from composer_speedups.train.interrupt import StopSignals
from composer_speedups.train.report_errors import failed_run

__all__ = ["end_evaluation_workers", "train_to_end"]


def train_to_end(trainer: Trainer, stop: StopSignals | None = None) -> None:
    """``trainer.fit()``, also where a resumed run has nothing left to train, of which Composer makes an error.

    Raises:
        RunFailedError: See :func:`failed_run`.
        Interrupted: A signal ended it; the loggers have written what they had.
    """
    state = trainer.state
    assert state.max_duration is not None
    with warnings.catch_warnings():
        # From a checkpoint of an epoch's last batch, Composer goes through the rest of that epoch: no batch at all.
        warnings.filterwarnings("ignore", message="No batches were trained for global rank")
        warnings.filterwarnings("ignore", message="The ``compute`` method of metric .* was called before")
        try:
            with failed_run(trainer, stop):
                trainer.fit(duration=None if state.timestamp < state.max_duration else "1ba")  # RunHistory stops it
        except Interrupted:
            end_evaluation_workers(trainer)
            trainer.close()
            raise
    end_evaluation_workers(trainer)


def end_evaluation_workers(trainer: Trainer) -> None:
    """End the persistent workers of evaluation loaders. Composer ends those of the training loader only.

    With pinned memory torch would otherwise wait five seconds for each of them when the process ends.
    """
    for evaluator in trainer.state.evaluators:
        iterator = getattr(evaluator.dataloader.dataloader, "_iterator", None)
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()
