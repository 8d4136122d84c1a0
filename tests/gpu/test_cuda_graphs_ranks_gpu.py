"""CUDA graphs with the backward pass in segments: replays on one GPU, and under DDP on two."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from composer_speedups.algorithms.cuda_graphs import graphed_calls
from tests.gpu.test_fsdp_gpu import job
from tests.helpers.rerun import cut_into

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def test_segments_allocate_no_further_activations() -> None:
    """With segments, the memory held after capturing grows by less than one activation."""
    held = []
    for segments in (1, 1, 4):  # the first run also makes one-time allocations
        model: Any = nn.Sequential(nn.Linear(16, 512), nn.ModuleList(nn.Linear(512, 512) for _ in range(8))).cuda()
        model.forward = partial(_through, model)
        calls = graphed_calls.install(model)
        calls.cut_behind = cut_into(model, segments)
        gc.collect()  # release the earlier model's memory
        before = torch.cuda.memory_allocated()
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(8192, 16, device="cuda")).backward()
        gc.collect()
        held.append(torch.cuda.memory_allocated() - before)
        assert calls.backward_segments == segments
        calls.release()
        del model, calls
    activation = 8192 * 512 * 4
    assert held[2] - held[1] < activation


def _through(model: Any, x: Any) -> Any:
    hidden = model[0](x)
    for block in model[1]:
        hidden = block(hidden).tanh()
    return hidden.square().mean()


UNPADDED = [
    "algorithms.sdpa_attention=null",
    "algorithms.unpadding={pad_to_multiple_of: 64}",
    "data.padding=max_length",
    "data.drop_last=true",
    "optimizer.max_grad_norm=null",  # optimizer steps overlap with the all-reduce of later buckets
]
GRAPHS = "algorithms.cuda_graphs={max_graphs: 16}"
SIXTEEN_BITS = ["algorithms.mixed_precision={dtype: bf16}", "algorithms.fused_layers={}"]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[dict[str, Any]]]]:
    """The reports of all jobs, which run at the same time because their metrics do not depend on each other."""
    jobs: dict[str, tuple[int, list[str]]] = {
        "one": (1, UNPADDED),
        "two": (2, [*UNPADDED, GRAPHS]),
        "micro": (2, [*UNPADDED, GRAPHS, "trainer.microbatch_size=2"]),
        "bf16": (2, [*UNPADDED, *SIXTEEN_BITS]),
        "bf16 graphs": (2, [*UNPADDED, *SIXTEEN_BITS, GRAPHS]),
    }
    with ThreadPoolExecutor() as pool:
        yield {
            name: pool.submit(job, tmp_path_factory.mktemp("job"), ranks, *overrides)
            for name, (ranks, overrides) in jobs.items()
        }


@two_gpus
@pytest.mark.parametrize(("name", "calls"), [("two", 1), ("micro", 2)])
def test_two_gpus_with_graphs_train_like_one_process_without(
    name: str, calls: int, reports: dict[str, Future[dict[str, Any]]]
) -> None:
    one, two = reports["one"].result(), reports[name].result()
    for metric, value in one["metrics"].items():
        assert two["metrics"][metric] == pytest.approx(value, rel=1e-3, abs=1e-3), metric
    assert two["training"]["ranks"] == 2
    evidence = two["algorithms"]["cuda_graphs"]["evidence"]
    assert evidence["replays"] == calls * (two["training"]["batches"] - 3)
    assert evidence["eager_calls"] == 3 * calls, "with a warm-up from a rate of 0, three batches are observed"
    assert evidence["backward_segments"] == 6, "each segment has two of BERT-base's layers"
    assert two["ddp"]["buckets"] > 3
    assert two["ddp"]["overlapped_steps"] == two["training"]["batches"] - 2


@two_gpus
def test_fused_kernels_in_16_bits_train_the_same_with_and_without_graphs(
    reports: dict[str, Future[dict[str, Any]]],
) -> None:
    without, graphs = reports["bf16"].result(), reports["bf16 graphs"].result()
    assert graphs["metrics"]["loss"] == pytest.approx(without["metrics"]["loss"], abs=0.02)
    assert graphs["algorithms"]["cuda_graphs"]["evidence"]["replays"] > 0
    assert graphs["algorithms"]["fused_layers"]["engaged"]
