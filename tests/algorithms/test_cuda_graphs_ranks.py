"""Replays under DDP on two ranks: gradients equal the mean over the ranks' batches, as computed in one process."""

from __future__ import annotations

import contextlib
from itertools import product
from typing import Any

import pytest
import torch
from composer.core import Callback, State
from composer.loggers import Logger
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from composer_speedups import CUDAGraphs
from composer_speedups.algorithms.cuda_graphs import graphed_calls
from composer_speedups.algorithms.cuda_graphs.graphed_calls import GraphedCalls
from composer_speedups.distributed.ddp import ddp_of
from tests.helpers.common import batch, final_weights, microbatches, plain_batches, tiny_bert, trained
from tests.helpers.ranks import on_ranks
from tests.helpers.rerun import graphed, in_composer
from tests.reference.loop import gradients
from tests.reference.tolerance import assert_near

SAME = [[[5, 4], [3, 5]], [[2, 5], [5, 1]]]  # the lengths of each rank's rows, by step
UNLIKE = [[[5, 4], [8, 8]], [[8, 8], [3, 3, 3]], [[5, 5], [9]], [[2, 5], [8, 1]]]


def mean_of_ranks(lengths: list[list[list[int]]], width: int | None = None) -> dict[str, Tensor]:
    """Return the gradients of an untouched model in one process over the micro-batches of all ranks."""
    reference = tiny_bert()
    for micro, rows in enumerate(lengths):
        for rank, row_lengths in enumerate(rows):
            (reference(**batch(row_lengths, width, seed=10 * micro + rank)).loss / len(rows)).backward()
    return gradients(reference)


def learn(shared: Any, step: list[list[list[int]]], micro: int, width: int | None = None) -> None:
    """Train on this rank's rows of a micro-batch; DDP all-reduces the gradients after the last micro-batch."""
    rank = dist.get_rank()
    with shared.no_sync() if micro < len(step) - 1 else contextlib.nullcontext():
        shared(**batch(step[micro][rank], width, seed=10 * micro + rank)).loss.backward()


def train(steps: list[list[list[list[int]]]], segments: int = 1) -> tuple[int, int, int]:
    """Train on ``steps[step][micro-batch][rank]``, a list of row lengths, and return graphs, replays and eager calls.

    Gradients are synchronized in the last micro-batch of each step.
    """
    # The DDP of train.py and the one of Composer.
    counts = [_train(steps, segments, wrap) for wrap in (ddp_of, DistributedDataParallel)]
    assert counts[0] == counts[1]
    return counts[0]


def _train(steps: list[list[list[list[int]]]], segments: int, wrap: Any) -> tuple[int, int, int]:
    model = tiny_bert()
    calls: GraphedCalls = graphed(model, segments=segments)
    shared = wrap(model)
    for step in steps:
        shared.zero_grad()
        for micro in range(len(step)):
            learn(shared, step, micro)
        assert_near(gradients(model), mean_of_ranks(step), what=f"{step}")
    assert calls.backward_segments == segments
    return calls.graphs, calls.replays, calls.eager_calls


# The micro-batches of each step, and what both ranks count.
STEPS: dict[str, tuple[Any, list[tuple[int, int, int]]]] = {
    "the same shapes": ([[step] for step in SAME], [(1, 2, 0), (1, 2, 0)]),
    "one captures or is eager while the other replays": ([[step] for step in UNLIKE], [(2, 4, 0), (2, 3, 1)]),
    "micro-batches without synchronization": ([UNLIKE[:3], SAME, UNLIKE[1:]], [(2, 8, 0), (2, 4, 4)]),
}


@pytest.mark.parametrize("segments", [(1, 1), (2, 2), (1, 2)], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_ranks_replay_the_mean_gradients(name: str, segments: tuple[int, int]) -> None:
    steps, expected = STEPS[name]
    assert on_ranks(lambda: train(steps, segments[dist.get_rank()])) == expected


def technique_on_ddp(microbatches: int, segments: int) -> dict[str, Any]:
    """Train four batches with Composer's events.

    Returns:
        The evidence, and where the gradients are stored.
    """
    model, rows = tiny_bert(), SAME[:microbatches]
    shared = ddp_of(model)
    technique: Any = CUDAGraphs()
    technique._control(calls := graphed(model, segments=segments))
    run = in_composer(shared)
    technique.fit_start(run)
    for step in range(4):
        shared.zero_grad()
        for micro in range(microbatches):
            technique.before_forward(run)
            learn(shared, rows, micro, width=5)
        assert_near(gradients(model), mean_of_ranks(rows, width=5), what=f"step {step}")
        technique.batch_end(run)
    storages = {id(p): p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}
    outside = sum(b.untyped_storage().data_ptr() != storages[id(p)] for p, b in calls._gradients._buffers.items())
    return {**technique.summary(run), "outside buckets": outside, "storages": len(set(storages.values()))}


@pytest.mark.parametrize(("microbatches", "segments"), [*product([1, 2], [1, 2])])
def test_graphs_write_gradients_into_ddps_buckets(microbatches: int, segments: int) -> None:
    for evidence in on_ranks(lambda: technique_on_ddp(microbatches, segments)):
        assert evidence.pop("storages") < 4, "the gradients are a few hundred KiB, and a bucket is 25 MiB"
        assert evidence.pop("outside buckets") == 0
        assert evidence.pop("backward_segments", 1) == segments
        assert evidence == {"graphs": 1, "replays": 2 * microbatches, "eager_calls": 2 * microbatches}


class Accumulated(Callback):
    """Counts the parameters whose gradient autograd accumulates, in each backward pass."""

    def __init__(self) -> None:
        self.parameters: list[int] = []

    def before_backward(self, state: State, logger: Logger) -> None:
        own, seen = {id(p) for p in state.model.parameters()}, set[Any]()
        loss: Any = state.loss
        nodes = [loss.grad_fn]
        while nodes:
            node = nodes.pop()
            if node is not None and node not in seen:
                seen.add(node)
                nodes += [before for before, _ in node.next_functions]
        self.parameters.append(sum(id(getattr(node, "variable", None)) in own for node in seen))


def technique_in_a_trainer() -> list[int]:
    """Train four batches of two micro-batches, in a Composer Trainer with the technique and in one without; return for
    each micro-batch how many parameters' gradients autograd accumulated."""
    CUDAGraphs.needs = lambda *_: ()  # type: ignore[method-assign,assignment,return-value]
    graphed_calls.install = graphed  # type: ignore[assignment]
    torch.cuda.graph_pool_handle = lambda: None  # type: ignore[assignment,return-value]
    weights, seen, technique = [], Accumulated(), CUDAGraphs()
    for techniques, callbacks in (([technique], [seen]), ([], [])):
        settings: Any = {"callbacks": callbacks, **microbatches(plain_batches(4), 2)}
        weights.append(final_weights(trained(techniques, model=tiny_bert(dropout=0.1), **settings)))
    assert_near(weights[0], weights[1], what="weights")
    assert technique.evidence["replays"] == 6, "the first batch is observed, so both its micro-batches are eager"
    return seen.parameters


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_trainer_accumulates_gradients_without_autograd_except_under_ddp(ranks: int) -> None:
    """DDP's hooks are called by autograd."""
    every = len(list(tiny_bert().parameters()))
    replayed = 0 if ranks == 1 else every
    assert on_ranks(technique_in_a_trainer, ranks) == [[every, every, *[replayed] * 6]] * ranks


def number_of_cuts() -> int:
    """Return the number of cuts in a model with large blocks."""
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(2600, 2600) for _ in range(5))})
    calls = graphed_calls.install(model)
    calls.release()
    with pytest.raises(ValueError, match="before DDP wraps the model"):
        graphed_calls.install(DistributedDataParallel(tiny_bert()))
    return len(calls.cut_behind)


def test_models_are_cut_on_several_ranks_only() -> None:
    assert on_ranks(number_of_cuts) == [1, 1]
    assert on_ranks(number_of_cuts, ranks=1) == [0]
