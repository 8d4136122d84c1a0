"""Train with one technique at a time, in one process or on several ranks with DDP, FSDP (two sharding modes) or HSDP.

Each batch of one process is split over the ranks, so the losses should be the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from composer.utils import dist

from composer_speedups.core.errors import Refusal
from composer_speedups.distributed.fsdp import GradientClipping, fsdp_parallelism, sharded_blocks
from composer_speedups.tasks.classification import Classification
from composer_speedups.tasks.models import FinetuneModel
from composer_speedups.train.config.schema import FSDPConfig
from composer_speedups.train.out_of_memory import MicrobatchTrainer
from tests.helpers.common import Batch, Recorder, batch, tiny_bert, trained
from tests.helpers.settings import Case, cases

PARALLELISMS: dict[str, FSDPConfig | None] = {
    "ddp": None,
    "grad_op": FSDPConfig(shard="grad_op"),
    "full": FSDPConfig(shard="full"),
    "hsdp": FSDPConfig(shard="full", replicas=2),
}
CLIP = 0.05  # well below the norm of the batches' gradients
LENGTHS = [[12, 7, 16, 10], [3, 16, 4, 9], [1, 1, 16, 1], [8, 2, 16, 4]]


def first_cases() -> Iterator[Case]:
    """Yield the first CPU variant of each technique."""
    seen: set[str] = set()
    for parameter in cases():
        case = parameter.values[0]
        if case.name not in seen:
            seen.add(case.name)
            yield case


def batches(ranks: int) -> list[Batch]:
    """Return four batches, each split into one batch per rank, in the order of the ranks."""
    whole = [batch(lengths, 16, seed=i) for i, lengths in enumerate(LENGTHS)]
    return [{name: rows.chunk(ranks)[rank] for name, rows in each.items()} for each in whole for rank in range(ranks)]


def train(case: Case | None, fsdp: FSDPConfig | None = None, *, clip: float | None = None) -> list[float]:
    """Train on the four batches and return their losses, averaged over the ranks."""
    recorder = Recorder()
    recorder.first_gradients = {"": torch.empty(0)}  # do not record gradients: shards cannot be compared
    model: Any = FinetuneModel(tiny_bert(), Classification(), train_metrics=False)
    model.model.config.problem_type = "single_label_classification"
    if fsdp is not None:
        sharded_blocks(model)
    trainer = trained(
        [*(case.build_all() if case else []), *([GradientClipping("norm", clipping_threshold=clip)] if clip else [])],
        batches=batches(dist.get_world_size()),
        max_duration="4ba",
        model=model,
        callbacks=[recorder],
        cls=MicrobatchTrainer,
        parallelism_config=None if fsdp is None else fsdp_parallelism(fsdp),
    )
    assert not case or all(t.engaged for t in trainer.state.algorithms if hasattr(t, "engaged"))
    torch._dynamo.reset()
    return recorder.losses


def outcome(case: Case | None, parallelism: str, **settings: Any) -> Any:
    try:
        return train(case, PARALLELISMS[parallelism], **settings)
    except Refusal as error:
        return str(error)


def all_outcomes() -> dict[str, dict[str, Any]]:
    """Return losses, or the error message of a refusal, by technique and parallelism; the same on every rank."""
    found = {}
    for case in first_cases():
        parallelisms = PARALLELISMS if case.name == "fused_optimizer" else ("ddp", "full")
        found[case.name] = {parallelism: outcome(case, parallelism) for parallelism in parallelisms}
    found["clipped"] = {parallelism: outcome(None, parallelism, clip=CLIP) for parallelism in ("full", "hsdp")}
    return found
