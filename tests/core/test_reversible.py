"""Process-wide flags with several Trainers in one process: each Trainer sets its own value while it runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from composer import Trainer
from composer.core import Callback, Event, State
from composer.loggers import Logger

from composer_speedups import TF32Matmul
from composer_speedups.core.reversible import MATMUL_PRECISION
from tests.helpers.common import make_trainer, plain_batches
from tests.helpers.jobs import run

current = torch.get_float32_matmul_precision


@pytest.fixture(autouse=True)
def tf32_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Allow TF32Matmul on a CPU, where the flag exists but does not change matmuls."""
    monkeypatch.setattr(TF32Matmul, "needs", lambda *_: ())
    monkeypatch.setattr(TF32Matmul, "proof", lambda *_: {})
    yield
    assert MATMUL_PRECISION._held == [], "a Trainer of this test is still open"


class Seen(Callback):
    """Records the flag's values during forward passes."""

    def __init__(self) -> None:
        self.flags: set[str] = set()

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event in (Event.BEFORE_FORWARD, Event.EVAL_BEFORE_FORWARD):
            self.flags.add(current())


def build(kind: str, *, bad: bool = False) -> tuple[Trainer, Seen]:
    """Return a Trainer with TF32, and its Seen callback."""
    seen, batches = Seen(), plain_batches(1)
    if bad:
        batches[0]["input_ids"] = batches[0]["input_ids"] + 10_000  # not in the vocabulary
    return make_trainer([TF32Matmul(kind)], callbacks=[seen], batches=batches), seen  # type: ignore[arg-type]


@pytest.mark.parametrize("original", ["highest", "medium"])
@pytest.mark.parametrize("kinds", [("high", "medium"), ("high", "high")], ids="+".join)
def test_each_fit_uses_its_own_flag_in_any_order(kinds: tuple[str, str], original: str) -> None:
    for fitting, closing in itertools.product(([0, 1], [1, 0]), repeat=2):
        torch.set_float32_matmul_precision(original)
        pair = [build(kind) for kind in kinds]
        assert current() == original, "a Trainer sets the flag only while it runs"
        for i in fitting:
            pair[i][0].fit()
            assert current() == original
        for i in closing:
            pair[i][0].close()
            assert current() == original
        assert [seen.flags for _, seen in pair] == [{kind} for kind in kinds]


@pytest.mark.parametrize("closes", ["before the fit of another", "during it", "after it", "after its close"])
def test_a_failed_run_does_not_affect_the_flag_of_another(closes: str) -> None:
    torch.set_float32_matmul_precision(original := "highest")
    failed, (other, seen) = build("high", bad=True)[0], build("medium")
    with pytest.raises(IndexError):
        failed.fit()

    class Closing(Callback):
        def batch_start(self, state: State, logger: Logger) -> None:
            failed.close()

    if closes == "before the fit of another":
        failed.close()
    if closes == "during it":
        other.state.callbacks.insert(0, Closing())
    other.fit()
    for trainer in [other, failed] if closes == "after its close" else [failed, other]:
        trainer.close()
    assert seen.flags == {"medium"}
    assert current() == original


def test_train_py_uses_full_float32_matmuls_by_default() -> None:
    torch.set_float32_matmul_precision("medium")
    short = ["trainer.max_duration=1ba", "trainer.eval_batches=1", "trainer.device=cpu"]
    assert run(*short)["numerics"]["float32_matmul_precision"] == "highest"
    assert run(*short, "algorithms.tf32_matmul={}")["numerics"]["float32_matmul_precision"] == "high"
    assert current() == "medium"
