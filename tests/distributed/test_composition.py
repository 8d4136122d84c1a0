"""Every technique on several ranks: the losses equal those of one process, or the technique is refused by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from composer_speedups.core.registry import technique_class
from composer_speedups.core.technique import FSDP
from tests.helpers.jobs import run
from tests.helpers.ranks import on_ranks, once_per_run
from tests.helpers.settings import Case
from tests.reference.composition import CLIP, all_outcomes, first_cases, train
from tests.reference.tolerance import assert_near


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("ranks"))
        one, other = once_per_run(lambda: on_ranks(all_outcomes), "composition", tmp_path_factory)
    assert one == other, "Composer averages the loss over the ranks"
    return one


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", first_cases(), ids=lambda case: case.name)
def test_ranks_train_like_one_process_or_the_technique_is_refused(
    case: Case, outcomes: dict[str, dict[str, Any]]
) -> None:
    refused = technique_class(case.name).not_with.get(FSDP)
    expected = train(case)
    assert len(expected) == 4
    for parallelism, outcome in outcomes[case.name].items():
        if parallelism != "ddp" and refused:
            assert outcome == f"{case.name}: {refused}; train without FSDP (DDP works), or remove it"
        elif case.entry.per_rank:
            assert outcome == pytest.approx(expected, abs=0.05), f"{parallelism}: {case.entry.per_rank}"
        else:
            assert_near(outcome, expected, case.entry.dtype, what=parallelism)


def test_a_sharded_gradient_is_clipped_to_its_global_norm(outcomes: dict[str, dict[str, Any]]) -> None:
    """Composer's own GradientClipping would silently not clip it."""
    expected, unclipped = train(None, clip=CLIP), train(None)
    assert abs(expected[-1] - unclipped[-1]) > 0.01
    for parallelism in ("full", "hsdp"):
        assert_near(outcomes["clipped"][parallelism], expected, what=parallelism)


def halves(first: list[str], second: list[str], ranks: tuple[int, int]) -> dict[str, Any]:
    """Train 3 batches on ``ranks[0]`` ranks, resume for 3 more on ``ranks[1]``; return the resumed run's report."""
    common = ["trainer.device=cpu", "scheduler.name=constant"]

    def train_on(count: int, *overrides: str) -> dict[str, Any]:
        job = partial(run, *common, *overrides)
        return on_ranks(job, count)[0] if count > 1 else job()

    train_on(ranks[0], *first, "trainer.max_duration=3ba", "checkpoint.interval=3ba", "run_name=first")
    (checkpoint,) = Path("runs/first/checkpoints").glob("ep*-ba3*.pt")
    load = [f"checkpoint.load={checkpoint}", "checkpoint.trust_checkpoint=true"]
    return train_on(ranks[1], *second, "trainer.max_duration=6ba", *load, "run_name=second")


# Composer warns that random states of other ranks are missing; nothing is random here.
@pytest.mark.filterwarnings("ignore:The current world size:UserWarning")
@pytest.mark.parametrize(("ranks", "first"), [((2, 1), True), ((1, 2), False)], ids=["to one process", "from one"])
def test_sharded_and_single_process_runs_resume_from_each_other(ranks: tuple[int, int], first: bool) -> None:
    shards = ["trainer.fsdp.shard=full"]
    whole = run("trainer.device=cpu", "scheduler.name=constant", "trainer.max_duration=6ba")
    resumed = halves(shards if first else [], [] if first else shards, ranks)
    assert resumed["metrics"]["loss"] == pytest.approx(whole["metrics"]["loss"], rel=1e-4)
    assert resumed["training"]["samples"] == whole["training"]["samples"]
    exported, stock = (load_file(f"runs/{name}/model/model.safetensors") for name in ("second", "quickstart"))
    assert_near(exported, stock, what="exported weights")
