"""Replays under DDP on two ranks: the mean of what one untouched process computes over each rank's rows."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.core import Event
from composer.loggers import InMemoryLogger
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from composer_speedups import CUDAGraphs, apply_cuda_graphs
from composer_speedups.algorithms.cuda_graphs.graphed_calls import GraphedCalls
from composer_speedups.algorithms.cuda_graphs.recorders import CUDARecorder
from composer_speedups.distributed.ddp import ddp_of
from tests.helpers.common import batch, tiny_bert
from tests.helpers.ranks import on_ranks
from tests.helpers.rerun import Logged, graphed
from tests.reference.loop import gradients
from tests.reference.tolerance import assert_near

SAME = [[[5, 4], [3, 5]], [[2, 5], [5, 1]]]  # steps of one length a rank's row
UNLIKE = [[[5, 4], [8, 8]], [[8, 8], [3, 3, 3]], [[5, 5], [9]], [[2, 5], [8, 1]]]


def mean_of_ranks(lengths: list[list[list[int]]], width: int | None = None) -> dict[str, Tensor]:
    """What an untouched model in one process gets from the micro-batches of all ranks."""
    reference = tiny_bert()
    for micro, rows in enumerate(lengths):
        for rank, each in enumerate(rows):
            (reference(**batch(each, width, seed=10 * micro + rank)).loss / len(rows)).backward()
    return gradients(reference)


def learn(shared: Any, step: list[list[list[int]]], micro: int, width: int | None = None) -> None:
    """This rank's part of a micro-batch; DDP adds up the ranks' gradients after the last one."""
    rank = dist.get_rank()
    with shared.no_sync() if micro < len(step) - 1 else contextlib.nullcontext():
        shared(**batch(step[micro][rank], width, seed=10 * micro + rank)).loss.backward()


def train(steps: list[list[list[list[int]]]], segments: int = 1) -> tuple[int, int, int]:
    """Steps of micro-batches of each rank's row lengths; the last micro-batch of a step is synchronised."""
    counts = [_train(steps, segments, under) for under in (ddp_of, DistributedDataParallel)]  # train.py's, Composer's
    assert counts[0] == counts[1]
    return counts[0]


def _train(steps: list[list[list[list[int]]]], segments: int, under: Any) -> tuple[int, int, int]:
    model = tiny_bert()
    calls: GraphedCalls = graphed(model, segments=segments)
    shared = under(model)
    for step in steps:
        shared.zero_grad()
        for micro in range(len(step)):
            learn(shared, step, micro)
        assert_near(gradients(model), mean_of_ranks(step), what=f"{step}")
    assert calls.backward_segments == segments
    return calls.graphs, calls.replays, calls.eager_calls


@pytest.mark.parametrize("segments", [1, 2])
def test_ranks_of_the_same_shapes_replay(segments: int) -> None:
    assert on_ranks(lambda: train([[each] for each in SAME], segments)) == [(1, 2, 0), (1, 2, 0)]


@pytest.mark.parametrize("segments", [1, 2])
def test_a_rank_may_capture_or_run_eagerly_while_the_other_replays(segments: int) -> None:
    assert on_ranks(lambda: train([[each] for each in UNLIKE], segments)) == [(2, 4, 0), (2, 3, 1)]


@pytest.mark.parametrize("segments", [1, 2])
def test_micro_batches_that_are_not_synchronised_add_up(segments: int) -> None:
    assert on_ranks(lambda: train([UNLIKE[:3], SAME, UNLIKE[1:]], segments)) == [(2, 8, 0), (2, 4, 4)]


def technique_on_ddp(microbatches: int, segments: int) -> dict[str, Any]:
    """Four batches as Composer has them; what the technique has counted, and whose memory the gradients are."""
    model, rows = tiny_bert(), SAME[:microbatches]
    shared = ddp_of(model)
    technique: Any = CUDAGraphs()
    technique._calls = calls = graphed(model, segments=segments)
    technique.engaged, calls.eager_first = True, 1
    state: Any = SimpleNamespace(model=shared, algorithms=[])
    logger: Any = InMemoryLogger()

    def happens(event: Event) -> None:
        if technique.match(event, state):
            technique.apply(event, state, logger)

    for step in range(4):
        shared.zero_grad()
        for micro in range(microbatches):
            happens(Event.BEFORE_FORWARD)
            learn(shared, rows, micro, width=5)
        assert_near(gradients(model), mean_of_ranks(rows, width=5), what=f"step {step}")
        happens(Event.BATCH_END)
    places = {id(p): p.grad.untyped_storage().data_ptr() for p in model.parameters()}
    assert calls._gradients is not None
    own = sum(b.untyped_storage().data_ptr() != places[id(p)] for p, b in calls._gradients._buffers.items())
    return {**technique.verify(state), "own": own, "pieces": len(set(places.values()))}


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_graphs_write_gradients_to_the_buckets_that_ddp_sends(microbatches: int, segments: int) -> None:
    for found in on_ranks(lambda: technique_on_ddp(microbatches, segments)):
        assert found.pop("pieces") < 4, "tiny BERT's are a few hundred KiB, and a bucket 25 MiB"
        assert found.pop("own") == 0
        assert found.pop("backward_segments", 1) == segments
        assert found == {"graphs": 1, "replays": 2 * microbatches, "eager_calls": 2 * microbatches}


def test_ranks_that_are_cut_elsewhere_or_not_at_all_train_together() -> None:
    def either() -> tuple[int, int, int]:
        return train([[each] for each in UNLIKE], segments=1 + dist.get_rank())

    assert on_ranks(either) == [(2, 4, 0), (2, 3, 1)]


def send(log, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
    log.append("bucket")
    return allreduce_hook(None, bucket)


def sent() -> dict[int, list[Any]]:
    """What DDP sends of a step between which replays (0 the forward pass), by segments."""
    found: dict[int, list[Any]] = {}
    for segments in (1, 2):
        model, log = tiny_bert(), found.setdefault(segments, [])
        graphed(model, segments=segments, recorder=lambda pool, log=log: Logged(log))
        shared: Any = DistributedDataParallel(model, bucket_cap_mb=0.01)
        shared.register_comm_hook(log, send)
        for _ in range(3):  # DDP settles its buckets after the first
            log.clear()
            shared.zero_grad()
            learn(shared, SAME[:1], 0, width=5)
        assert_near(gradients(model), mean_of_ranks(SAME[:1], width=5))
    return found


def test_the_gradients_of_the_last_blocks_are_sent_before_those_of_the_first_are_computed() -> None:
    for found in on_ranks(sent):
        assert found[1].index("bucket") > found[1].index(1), "all after the one backward graph"
        assert [entry for entry in found[2] if entry != "bucket"] == [0, 1, 2]
        first, second = found[2].index(1), found[2].index(2)
        assert found[2][first + 1 : second].count("bucket") >= 2
        assert found[2][second + 1 :].count("bucket") >= 2


def chosen() -> tuple[int, int]:
    """Cuts of a model whose blocks are large, in the technique's function, and its segments."""
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(2600, 2600) for _ in range(5))})
    vars(model)["parameters"] = lambda: iter([SimpleNamespace(device=torch.device("cuda"))])
    automatic, four = (len(apply_cuda_graphs(model, segments=segments).cut_behind) for segments in (None, 4))
    with pytest.raises(ValueError, match="before DDP wraps it"):
        apply_cuda_graphs(DistributedDataParallel(tiny_bert()))
    with pytest.raises(ValueError, match="segments must be at least 1, not 0"):
        apply_cuda_graphs(model, segments=0)
    return automatic, four


def test_a_process_cuts_by_itself_where_there_are_others() -> None:
    assert on_ranks(chosen) == [(1, 3), (1, 3)]
    assert on_ranks(chosen, ranks=1) == [(0, 3)]


def modes() -> str:
    """The mode that a capture is begun in."""
    seen: list[str] = []

    class Graph(contextlib.nullcontext[None]):
        def __init__(self, graph: Any, pool: Any, capture_error_mode: str) -> None:
            super().__init__()
            seen.append(capture_error_mode)

    class Captured:
        def replay(self) -> None: ...

    torch.cuda.graph, torch.cuda.CUDAGraph = Graph, Captured  # type: ignore[misc, assignment]
    CUDARecorder(pool=(0, 1)).record(lambda: None)
    return seen[0]


def test_threads_of_nccl_may_ask_the_gpu_during_a_capture() -> None:
    assert on_ranks(modes) == ["thread_local"] * 2
    assert on_ranks(modes, ranks=1) == ["global"]
