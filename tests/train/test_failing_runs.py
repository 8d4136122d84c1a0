"""Runs that fail during training: one line on stderr, exit status 1, no waiting for ranks or workers."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch
from composer.core import DataSpec, Evaluator
from composer.utils import dist
from torch.utils.data import DataLoader, Dataset

from composer_speedups import LossMonitor
from composer_speedups.callbacks.config import FiniteLossConfig
from composer_speedups.core.errors import DataError, RunFailedError
from composer_speedups.tasks.models import FinetuneModel
from composer_speedups.train.cli import exit_codes
from composer_speedups.train.fit import fit, train_to_end
from tests.helpers.common import Batches, data_spec, make_trainer, plain_batches
from tests.helpers.hangs import wait_until
from tests.helpers.jobs import fork_train
from tests.helpers.nonfinite import Poisoned, batches
from tests.helpers.ranks import ends_of_ranks


def _make_a_loss_nan() -> None:
    """Make the loss of batch 3 NaN."""
    plain, calls = FinetuneModel.loss, iter(range(1, 1000))

    def loss(self: Any, outputs: Any, batch: Any) -> torch.Tensor:
        value = plain(self, outputs, batch)
        return value * float("nan") if self.training and next(calls) == 3 else value

    FinetuneModel.loss = loss  # type: ignore[method-assign]


def test_train_py_stops_with_one_line_and_exit_status_1_and_keeps_its_log() -> None:
    settings = ["loggers.file={flush_interval: 1000}", "checkpoint.interval=1ba", "trainer.max_duration=4ba"]
    done = fork_train(*settings, prepare=_make_a_loss_nan).wait()
    (line,) = [line for line in done.stderr.splitlines() if "train.py" in line]
    assert line.startswith("train.py: loss: nan at step 3 (batch 3 of epoch 1), next learning rate ")
    techniques = "engaged techniques: sdpa_attention, fused_optimizer"
    assert re.search(rf"{techniques}; not finite: (\d+) of \1 gradients, model\.bert", line), line
    assert "resume from runs/quickstart/checkpoints/ep0-ba2-rank0.pt" in line
    assert (done.status, "Traceback" in done.stderr) == (1, False)
    assert "loss/train/total" in Path("runs/quickstart/log-rank0.txt").read_text()
    assert not Path("runs/quickstart/report.json").exists()


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_a_nonfinite_loss_on_one_rank_stops_or_skips_on_all(on_nonfinite: Any) -> None:
    def fit() -> None:
        rank = int(os.environ["RANK"])
        guard = LossMonitor(FiniteLossConfig(on_nonfinite))
        dataset = Batches(batches(8, 6))  # NaN in batch 6, which belongs to the second rank
        loader = DataLoader(
            dataset, 1, sampler=dist.get_sampler(dataset, shuffle=False), collate_fn=lambda rows: rows[0]
        )
        data = DataSpec(loader, split_batch=lambda batch, _: [batch], get_num_samples_in_batch=lambda _: 4)
        trainer = make_trainer(model=Poisoned(), callbacks=[guard], max_duration="4ba", train_dataloader=data)
        trainer.fit()
        weights = torch.cat([p.detach().flatten() for p in trainer.state.model.parameters()])
        np.save(f"rank{rank}.npy", weights.numpy())
        Path(f"rank{rank}.json").write_text(json.dumps(guard.summary()))

    def whole() -> None:
        with exit_codes():
            fit()

    done = ends_of_ranks(whole)
    if on_nonfinite == "stop":
        assert [d.status for d in done] == [1, 1]
        assert all("train.py: loss: nan at step 3 " in d.stderr for d in done)
        return
    assert [d.status for d in done] == [0, 0], done
    first, second = (np.load(f"rank{rank}.npy") for rank in (0, 1))
    assert np.isfinite(first).all()
    np.testing.assert_array_equal(first, second)
    assert all(
        json.loads(Path(f"rank{r}.json").read_text()) == {"nonfinite_losses": 1, "skipped_steps": 1} for r in (0, 1)
    )


@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_killed_worker_ends_the_run_at_once(persistent: bool) -> None:
    endless = ["trainer.max_duration=100000ba", "trainer.eval_interval=100000ba", "data.workers=1", "algorithms=null"]
    fork = fork_train(*endless, f"data.persistent_workers={persistent}".lower(), "loggers.file={flush_interval: 1}")
    log = Path("runs/quickstart/log-rank0.txt")
    trains = lambda: log.exists() and "[batch=8" in log.read_text()  # noqa: E731
    wait_until(lambda: trains() or fork.ends_within(0), "no eighth batch is logged")

    def kill_a_worker() -> bool:  # they restart with each epoch
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(fork.process.pid).children():
                child.send_signal(signal.SIGKILL)
                return True
        return fork.ends_within(0)

    wait_until(kill_a_worker, "there is no worker")
    done = fork.wait()
    assert done.status == 1
    lines = done.stderr.splitlines()
    assert re.match(r"train\.py: data\.workers: a DataLoader worker died .*lower data\.workers", lines[-1]), done.stderr
    assert "Traceback" not in done.stderr


NO_MEMORY = "out of memory: "
ERRORS: list[tuple[type[Exception], str, str | None]] = [  # class, its message, and the line that it becomes
    (RuntimeError, "DataLoader worker (pid 3) is killed", "data.workers: a DataLoader worker died (DataLoader worker"),
    (MemoryError, "Unable to allocate 8. TiB", f"{NO_MEMORY}Unable to allocate 8. TiB; lower data.batch_size"),
    (torch.OutOfMemoryError, "CUDA out\ntrainer.microbatch_size: 8; …=4", "trainer.microbatch_size: 8; …=4 (CUDA out)"),
    (torch.OutOfMemoryError, "CUDA out of memory. Tried", f"{NO_MEMORY}CUDA out of memory"),
    (RuntimeError, "[enforce fail] DefaultCPUAllocator: can't allocate memory: you", NO_MEMORY),
    (RuntimeError, "shapes differ", None),
]


@pytest.mark.parametrize(("kind", "message", "line"), ERRORS)
def test_known_errors_of_the_stack_become_one_line(
    kind: type[Exception], message: str, line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = kind(message)
    trainer = make_trainer(batches=plain_batches(1))
    monkeypatch.setattr(trainer, "fit", Mock(side_effect=error))
    with pytest.raises(RuntimeError if line is None else RunFailedError) as raised:
        fit(trainer)
    assert str(raised.value).startswith(line or str(error)) if line else raised.value is error
    assert trainer.engine._is_closed
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("receive", [lambda pipe: pipe.recv(), lambda pipe: pipe._recv(1)], ids=["recv", "its end"])
def test_a_worker_that_dies_while_it_sends_a_batch_has_its_line(receive: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(duration: str | None) -> None:
        ours, theirs = multiprocessing.Pipe()
        theirs.close()
        receive(ours)

    trainer = make_trainer(batches=plain_batches(1))
    monkeypatch.setattr(trainer, "fit", fail)
    with pytest.raises(RunFailedError, match=r"^data\.workers: a DataLoader worker died \(EOFError\); "):
        fit(trainer)


def test_the_message_of_a_data_error_in_a_worker_has_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(batches=plain_batches(1))
    loader = DataLoader(Refusing(), num_workers=1)
    monkeypatch.setattr(trainer, "fit", lambda duration: list(loader))
    with pytest.raises(DataError, match=r"^b\.csv: line 2 is broken$"):
        fit(trainer)


class Refusing(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise DataError("b.csv: line 2 is broken")


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
