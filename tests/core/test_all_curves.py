"""Loss curves of 200 steps: techniques that are not exact in float32 stay within their bound of the untouched run."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.common import Recorder, learnable_batches, trained
from tests.helpers.settings import Case, cases

WINDOW = 20  # steps of the moving average; the loss of one batch of 16 rows is too noisy


def inexact(*, gpu: bool) -> list[Any]:
    return [c for c in cases(gpu=gpu) if c.values[0].entry.loss_bound is not None]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", inexact(gpu=False))
def test_the_loss_curve_stays_within_its_bound(case: Case) -> None:
    _check(case, gpu=False)


@pytest.mark.gpu
@pytest.mark.parametrize("case", inexact(gpu=True))
def test_the_loss_curve_stays_within_its_bound_on_a_gpu(case: Case) -> None:
    _check(case, gpu=True)


def _check(case: Case, *, gpu: bool) -> None:
    expected, actual = _reference(), _curve(case.build_all(), gpu=gpu)
    distance = float((actual - expected).abs().max())
    assert distance <= case.entry.loss_bound, f"the loss differs by {distance:.3f} from the untouched run's"


@cache
def _reference() -> Tensor:
    curve = _curve([])
    assert curve[-1] < 0.6 * curve[0], "the reference run must learn"
    return curve


def _curve(algorithms: list[Any], *, gpu: bool = False) -> Tensor:
    recorder = Recorder()
    trained(algorithms, batches=learnable_batches(), callbacks=[recorder], gpu=gpu)
    losses = torch.tensor(recorder.losses)
    assert len(losses) == 200
    assert losses.isfinite().all()
    return losses.unfold(0, WINDOW, 1).mean(-1)
