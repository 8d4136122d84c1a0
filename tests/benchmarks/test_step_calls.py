"""A step makes fewer Python calls with the recommended set, and in train.py, than in Composer alone."""

from __future__ import annotations

import pytest

from benchmarks.step_calls import count, fast_set, quickstart
from composer_speedups import LeanDispatch, recommended


@pytest.mark.filterwarnings("ignore:continuing without:UserWarning")
def test_a_step_with_the_recommended_set_has_fewer_calls_than_composers() -> None:
    composers, lean, ours = (count(algorithms) for algorithms in ([], [LeanDispatch()], recommended("warn")))
    assert composers.steps == lean.steps == ours.steps == 20
    assert composers.per_step() > 2000
    assert lean.per_step() < 0.3 * composers.per_step()
    assert ours.per_step() < 900


@pytest.mark.filterwarnings("ignore:continuing without:UserWarning")
def test_a_step_of_train_py_has_few_calls() -> None:
    first, fast = quickstart(), fast_set()
    assert first.steps == fast.steps == 20
    assert max(first.per_step(), fast.per_step()) < 1300
