"""AdamW's state split over two ranks: weights and checkpoints equal a plain AdamW's under DDP, also after resuming."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.algorithms import GradientClipping
from composer.utils import dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from composer_speedups import ShardedOptimizer
from composer_speedups.core.optimizer_state import state_bytes
from composer_speedups.core.trainer_state import model_of
from composer_speedups.train.checkpoints import restricted_loading
from tests.algorithms.optimizers.cases import engaged, technique
from tests.helpers.common import (
    SAVING,
    fit_and_close,
    grouped_adamw,
    make_trainer,
    tiny_bert,
)
from tests.helpers.ranks import on_ranks
from tests.reference.composition import batches
from tests.reference.tolerance import assert_equal

# Composer warns that random states of other ranks are missing; nothing is random here.
pytestmark = pytest.mark.filterwarnings("ignore:The current world size:UserWarning")

KINDS = ("plain", "sharded")
JOURNEYS = [(2, 2), (2, 1), (1, 2)]  # the ranks that train two batches, and those that train two more


def sharded(optimizer: AdamW) -> Any:
    return engaged(technique("sharded_optimizer"), optimizer, nn.ParameterList(optimizer.param_groups[0]["params"]))[1]


def train(kind: str, until: int, *, save: Path | None = None, load: Path | None = None) -> dict[str, Any]:
    """Train with Composer, clipping and a decaying learning rate; ``load`` and ``save`` are folders of checkpoints."""
    algorithms: list[Any] = [GradientClipping("norm", clipping_threshold=0.05)]
    built = ShardedOptimizer()
    model = tiny_bert()
    settings: dict[str, Any] = {"schedulers": lambda state: 1 / (1 + int(state.timestamp.batch))}
    if save is not None:
        settings |= {**SAVING, "save_folder": str(save / kind)}
    with ExitStack() as stack:
        if load is not None:
            stack.enter_context(restricted_loading(trust=False))  # as train.py loads it
            settings["load_path"] = str(load / kind / "ba2.pt")
        trainer = make_trainer(
            [*algorithms, *([built] if kind == "sharded" else [])],
            model=model,
            optimizer=grouped_adamw(model),
            batches=batches(dist.get_world_size()),
            max_duration=f"{until}ba",
            **settings,
        )
    fit_and_close(trainer)
    weights = {name: p.detach().clone() for name, p in model_of(trainer.state).named_parameters()}
    return {"weights": weights, "evidence": built.evidence}


def loop(kind: str, *, scaled: bool) -> dict[str, Any]:
    """Train in a loop of one's own, with clipping and a scheduler that cycles betas, and with loss scaling; there, the
    second batch's gradients are infinite on rank 1 before they are averaged."""
    rank, model = dist.get_global_rank(), tiny_bert()
    ddp, optimizer = DistributedDataParallel(model), grouped_adamw(model)
    if kind == "sharded":
        optimizer = sharded(optimizer)
    scheduler = OneCycleLR(optimizer, max_lr=[4e-3, 2e-3], total_steps=6)
    scaler = torch.amp.GradScaler("cpu", init_scale=128, enabled=scaled)
    for step, inputs in enumerate(batches(2)[rank::2]):
        optimizer.zero_grad()
        loss = scaler.scale(ddp(**inputs).loss)
        (loss * (float("inf") if scaled and (step, rank) == (1, 1) else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    result: dict[str, Any] = {"weights": {n: p.detach().clone() for n, p in model.named_parameters()}}
    result |= {"bytes": state_bytes(optimizer), "scale": scaler.get_scale() if scaled else None}
    result["state"] = copy.deepcopy(optimizer.state_dict())
    return result


def save_where_a_rank_has_no_state() -> list[str]:
    """Only the second rank's parameter is trained; names of the parameters with a state."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False).requires_grad_(False), nn.Linear(8, 1, bias=False))
    optimizer = sharded(AdamW(model.parameters(), lr=1e-3))
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return list(get_optimizer_state_dict(model, optimizer)["state"])


def observe(folder: Path) -> dict[str, Any]:
    """What one of two ranks sees."""
    seen: dict[str, Any] = {"trained": {kind: train(kind, 2, save=folder / "2") for kind in KINDS}}
    dist.barrier()
    for first in (1, 2):
        seen[first, 2] = {kind: train(kind, 4, load=folder / str(first)) for kind in KINDS}
    seen["loops"] = {scaled: {kind: loop(kind, scaled=scaled) for kind in KINDS} for scaled in (False, True)}
    seen["saved"] = save_where_a_rank_has_no_state()
    return seen


class Seen:
    """The observations of both ranks, and of one process before and after them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.alone = {kind: train(kind, 2, save=folder / "1") for kind in KINDS}
        self.ranks = on_ranks(partial(observe, folder))
        self.journeys = {journey: self.ranks[0].get(journey) for journey in JOURNEYS}
        self.journeys[2, 1] = {kind: train(kind, 4, load=folder / "2") for kind in KINDS}

    def checkpoint(self, kind: str, ranks: int) -> Any:
        return torch.load(self.folder / str(ranks) / kind / "ba2.pt", weights_only=False)["state"]["optimizers"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("sharded")
        patch.chdir(folder)
        yield Seen(folder)


@pytest.mark.exhaustive
def test_two_ranks_train_exactly_like_adamw(seen: Seen) -> None:
    for rank in seen.ranks:
        assert_equal(rank["trained"]["sharded"]["weights"], seen.ranks[0]["trained"]["plain"]["weights"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("scaled", [False, True])
def test_a_loop_with_clipping_schedulers_and_loss_scaling_trains_exactly_like_adamw(scaled: bool, seen: Seen) -> None:
    loops = [rank["loops"][scaled] for rank in seen.ranks]
    for rank in loops:
        assert_equal(rank["sharded"]["weights"], loops[0]["plain"]["weights"])
    assert loops[0]["sharded"]["scale"] == (64 if scaled else None), "the batch with infinite gradients is skipped"
    plain, sharded = (loops[0][kind]["state"] for kind in KINDS)
    assert_equal(sharded["state"], plain["state"])
    for group, expected in zip(sharded["param_groups"], plain["param_groups"], strict=True):
        assert {**group, "foreach": False, "fused": None} == expected


@pytest.mark.exhaustive
def test_each_rank_holds_a_share_of_the_state(seen: Seen) -> None:
    evidence = [rank["trained"]["sharded"]["evidence"] for rank in seen.ranks]
    shares, whole = evidence[0]["state_bytes_by_rank"], seen.alone["sharded"]["evidence"]["state_bytes"]
    assert [e["state_bytes"] for e in evidence] == shares
    assert sum(shares) == whole
    assert max(shares) < 0.6 * whole
    loops = [rank["loops"][False] for rank in seen.ranks]
    assert sum(rank["sharded"]["bytes"] for rank in loops) == loops[0]["plain"]["bytes"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_checkpoint_is_that_of_adamw(ranks: int, seen: Seen) -> None:
    (name, state), (plain_name, plain) = (next(iter(seen.checkpoint(kind, ranks).items())) for kind in reversed(KINDS))
    assert name == plain_name == "AdamW"
    assert_equal(state["state"], plain["state"])
    for group, expected in zip(state["param_groups"], plain["param_groups"], strict=True):
        assert {**group, "foreach": False, "fused": None} == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("journey", JOURNEYS, ids=lambda journey: f"{journey[0]} to {journey[1]}")
def test_resuming_on_any_number_of_ranks_is_exactly_like_adamw(journey: tuple[int, int], seen: Seen) -> None:
    plain, sharded = (seen.journeys[journey][kind] for kind in KINDS)
    assert_equal(sharded["weights"], plain["weights"])
    assert sharded["evidence"]["ranks"] == journey[1]
    assert any((w != seen.alone["plain"]["weights"][n]).any() for n, w in plain["weights"].items()), "it trained on"


@pytest.mark.exhaustive
def test_a_rank_without_a_trained_parameter_does_not_step_while_the_others_save(seen: Seen) -> None:
    assert [rank["saved"] for rank in seen.ranks] == [["1.weight"]] * 2
