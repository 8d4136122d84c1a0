"""The recommended set makes fewer Python calls in a step than Composer alone."""

from __future__ import annotations

import pytest

from benchmarks.step_calls import count
from composer_speedups import LeanDispatch, recommended


@pytest.mark.filterwarnings("ignore:continuing without:UserWarning")
def test_a_step_with_the_recommended_set_has_fewer_calls_than_composers() -> None:
    composers, lean, ours = (count(algorithms) for algorithms in ([], [LeanDispatch()], recommended("warn")))
    assert composers.steps == lean.steps == ours.steps >= 20
    assert composers.per_step() > 2000
    assert lean.per_step() < 0.4 * composers.per_step()
    assert ours.per_step() < 1200
