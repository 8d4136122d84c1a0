"""Training of one technique at a time, in one process or on the ranks of several: DDP, FSDP's two ways, HSDP.

The ranks share the batches that one process has whole, so the losses should be the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from composer.utils import dist

from composer_speedups.core.errors import UserError
from composer_speedups.distributed.fsdp import GradientClipping, fsdp_parallelism, sharded_blocks
from composer_speedups.tasks.classification import Classification
from composer_speedups.tasks.models import FinetuneModel
from composer_speedups.train.config.schema import FSDPConfig
from composer_speedups.train.out_of_memory import MicrobatchTrainer
from tests.helpers.common import Batch, Recorder, batch, tiny_bert, trained
from tests.helpers.settings import Case, cases

WAYS: dict[str, FSDPConfig | None] = {
    "ddp": None,
    "grad_op": FSDPConfig(shard="grad_op"),
    "full": FSDPConfig(shard="full"),
    "hsdp": FSDPConfig(shard="full", replicas=2),
}
CLIP = 0.05  # well below the norm of the batches' gradients
LENGTHS = [[12, 7, 16, 10], [3, 16, 4, 9], [1, 1, 16, 1], [8, 2, 16, 4]]


def first_cases() -> Iterator[Case]:
    """The first CPU variant of each technique."""
    seen: set[str] = set()
    for parameter in cases():
        case = parameter.values[0]
        if case.name not in seen:
            seen.add(case.name)
            yield case


def batches(ranks: int) -> list[Batch]:
    """Four batches, each cut into one for every rank, in turn."""
    whole = [batch(lengths, 16, seed=i) for i, lengths in enumerate(LENGTHS)]
    return [{name: rows.chunk(ranks)[rank] for name, rows in each.items()} for each in whole for rank in range(ranks)]


def train(case: Case | None, fsdp: FSDPConfig | None = None, *, clip: float | None = None) -> list[float]:
    """Losses of the four batches, the mean over ranks."""
    recorder = Recorder()
    recorder.first_gradients = {"": torch.empty(0)}  # shards are no gradients to compare
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


def outcome(case: Case | None, way: str, **settings: Any) -> Any:
    try:
        return train(case, WAYS[way], **settings)
    except UserError as error:
        return str(error)


def all_outcomes() -> dict[str, dict[str, Any]]:
    """Losses, or the one line of a refusal, by technique and way; the same on every rank."""
    found = {
        case.name: {way: outcome(case, way) for way in (WAYS if case.name == "fused_optimizer" else ("ddp", "full"))}
        for case in first_cases()
    }
    found["clipped"] = {way: outcome(None, way, clip=CLIP) for way in ("full", "hsdp")}
    return found
