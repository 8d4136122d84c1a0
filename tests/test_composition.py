"""Every technique on several ranks: the losses of one process at the same global batch, or a refusal by name."""

from __future__ import annotations

from typing import Any

import pytest

from composer_speedups.algorithms.registry import technique_class
from tests.ranks import on_ranks
from tests.reference.composition import CLIP, WAYS, all_outcomes, first_cases, train
from tests.reference.tolerance import assert_near
from tests.settings import Case

# What one process computes over a whole batch and ranks over theirs.
PER_RANK = {
    "sparse_upcycling": "the load-balancing loss is a product of means over a rank's tokens",
    "float8_linear": "a tensor's scale is that of a rank's rows",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("ranks"))
        one, other = on_ranks(all_outcomes)
    assert one == other, "Composer gives every rank the mean"
    return one


@pytest.mark.parametrize("case", first_cases(), ids=lambda case: case.name)
def test_ranks_train_as_one_process_does_or_it_is_refused(case: Case, found: dict[str, dict[str, Any]]) -> None:
    refused = technique_class(case.name).not_sharded
    expected = train(case)
    assert len(expected) == 4
    for way, outcome in found[case.name].items():
        if way != "ddp" and refused:
            assert outcome == f"{case.name}: {refused}; train without FSDP (DDP works), or take it out"
        elif case.name in PER_RANK:
            assert outcome == pytest.approx(expected, abs=0.05), f"{way}: {PER_RANK[case.name]}"
        else:
            assert_near(outcome, expected, case.entry.dtype, what=way)


def test_a_sharded_gradient_is_clipped_to_its_global_norm(found: dict[str, dict[str, Any]]) -> None:
    """Composer's GradientClipping would leave it as it is, without a word."""
    expected, unclipped = train(None, clip=CLIP), train(None)
    assert abs(expected[-1] - unclipped[-1]) > 0.01
    for way in ("full", "hsdp"):
        assert_near(found["clipped"][way], expected, what=way)


def test_all_ways_were_tried(found: dict[str, dict[str, Any]]) -> None:
    assert set(found["fused_optimizer"]) == set(WAYS)
