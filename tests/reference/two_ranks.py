"""Compare unpadded training on two CPU ranks with plain padded training in one process at the same global batch.

The ranks train under DDP, then under fully_shard, and their rows have different numbers of tokens.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from composer_speedups import apply_unpadding, plan_unpadding
from composer_speedups.packing.encoder import unpadded_encoders
from tests.helpers.common import batch, tiny_bert
from tests.reference.loop import EPS, train_plainly
from tests.reference.tolerance import assert_near

LENGTHS = [[12, 7, 16, 10, 1, 3, 2, 5], [3, 16, 4, 9, 16, 16, 16, 16], [1, 1, 16, 1, 8, 2, 16, 4]]


def wrapped(model: Any, parallelism: str) -> Any:
    if parallelism == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.bert.encoder.layer:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(parallelism: str) -> dict[str, Any]:
    rank = dist.get_rank()
    stock: Any = tiny_bert()
    stock.config.problem_type = "single_label_classification"
    # Both ranks have the same number of labels, so the mean of their mean losses is the global mean.
    batches = [batch(lengths, 16, seed=i) for i, lengths in enumerate(LENGTHS)]
    unpadded = copy.deepcopy(stock)
    apply_unpadding(unpadded, 8)
    model = wrapped(unpadded, parallelism)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=EPS, weight_decay=0.01, foreach=False)
    losses, packed = [], []
    for each in batches:
        mine = {name: values.chunk(2)[rank] for name, values in each.items()}
        plan_unpadding(unpadded, mine["attention_mask"])
        (encoder,) = unpadded_encoders(unpadded)
        optimizer.zero_grad()
        loss = model(**mine).loss
        loss.backward()
        optimizer.step()
        assert encoder.ran == "unpadded"
        packed.append(len(encoder.packing.planned[0].layout.indices_T))  # type: ignore[union-attr]
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / 2)
    expected = train_plainly(stock, batches)
    weights = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in unpadded.named_parameters()}
    assert_near(losses, expected.losses, what="losses")
    assert_near({n: w.detach() for n, w in weights.items()}, expected.weights, what="weights")
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, packed)
    return {"losses": losses, "weights": len(weights), "packed": gathered}


def both_ways() -> dict[str, Any]:
    """Train both ways and return what was compared. A collective: both ranks must call it."""
    return {parallelism: train(parallelism) for parallelism in ("ddp", "fsdp")}
