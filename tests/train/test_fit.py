"""The end of training."""

from __future__ import annotations

import multiprocessing

from composer.core import Evaluator

from composer_speedups.train.fit import train_to_end
from tests.helpers.common import data_spec, make_trainer, plain_batches


def test_evaluation_workers_end_with_training() -> None:
    """With pinned memory, torch would wait 5 s for each of them at the end of the process."""
    before = set(multiprocessing.active_children())
    trainer = make_trainer(eval_dataloader=[_loader_of("a"), _loader_of("b")], eval_interval="1ba")
    assert set(multiprocessing.active_children()) <= before  # one of another test may have ended
    train_to_end(trainer)
    iterators = [evaluator.dataloader.dataloader._iterator for evaluator in trainer.state.evaluators]
    assert all(len(iterator._workers) == 1 for iterator in iterators), "the workers were started"
    assert not any(worker.is_alive() for iterator in iterators for worker in iterator._workers)
    assert set(multiprocessing.active_children()) <= before
    trainer.close()


def _loader_of(label: str) -> Evaluator:
    loader = data_spec(plain_batches(2), num_workers=1, persistent_workers=True)
    return Evaluator(label=label, dataloader=loader, metric_names=[])
