"""Frozen layers on a GPU: fused kernels beside the untouched model, graphs captured again, and the cache."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

from composer_speedups import (
    CUDAGraphs,
    EarlyLoss,
    FusedLayers,
    FusedOptimizer,
    LayerFreezing,
    LeanDispatch,
    MixedPrecision,
    SDPAAttention,
    Unpadding,
    apply,
)
from composer_speedups.algorithms.cuda_graphs.graphed_calls import install
from composer_speedups.algorithms.fused_layers.fusing import fuse
from composer_speedups.algorithms.layer_freezing.modules import freeze
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.packing.encoder import with_counted_rows
from tests.algorithms.test_cuda_graphs_segments import bert
from tests.algorithms.test_layer_freezing_cache import indexed, samples
from tests.helpers.common import batch, final_weights, trained
from tests.helpers.models import tiny_model
from tests.reference.loop import gradients, on_gpu
from tests.reference.tolerance import assert_near

pytestmark = pytest.mark.gpu


def test_fused_graphs_are_captured_again_and_compute_the_eager_gradients() -> None:
    eager = bert().cuda()
    unpad(eager)
    fuse(eager, last_layer="all")
    graphed = copy.deepcopy(eager)
    calls = install(graphed, 1)
    for layers in (None, 0, 3):
        for seed in range(2):
            inputs = batch([12, 7, 16, 10], seed=seed)
            for model in (eager, graphed):
                if layers is not None:
                    freeze(model, (), layers)
                model.zero_grad()
                moved = on_gpu(inputs)
                with torch.autocast("cuda", torch.bfloat16), with_counted_rows(model, inputs, moved):
                    loss = model(**moved).loss
                loss.backward()
            assert_near(gradients(graphed), gradients(eager), torch.bfloat16, f"{layers}")
        assert calls.graphs == 1
    assert (calls.replays, calls.eager_calls) == (6, 0)
    calls.release()


def test_activations_gradients_and_graphs_of_frozen_layers_are_freed() -> None:
    """A model whose activations are much larger than its weights; a third of the blocks still trains."""

    def used(layers: int | None, *, graphs: bool) -> int:
        """Peak memory of a step, or the memory of all graphs, after layers were frozen."""
        gc.collect()
        torch.cuda.empty_cache()
        model = tiny_model("bert", layers=6).cuda()
        apply(model, [SDPAAttention()])
        inputs = on_gpu(batch([16] * 512))
        model(**inputs).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.0).step()  # ends the batch that apply observes
        model.zero_grad()
        calls = install(model, 4) if graphs else None
        model(**inputs).loss.backward()
        if layers is not None:
            freeze(model, (), layers)
        model.zero_grad()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(**inputs).loss.backward()
        if calls is None:
            return torch.cuda.max_memory_allocated() - before
        gc.collect()
        torch.cuda.empty_cache()
        segments = torch.cuda.memory_snapshot()
        held = sum(segment["total_size"] for segment in segments if segment["segment_pool_id"] != (0, 0))
        calls.release()
        return held

    for graphs in (False, True):
        whole, frozen = (used(layers, graphs=graphs) for layers in (None, 4))
        assert frozen < 0.7 * whole, f"with graphs: {graphs}"


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("family", ["bert", "mpnet", "deberta_v2", "modernbert"])
def test_the_fast_set_with_the_cache_trains_as_without_it(
    family: str, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs are captured behind the frozen blocks, and evaluation between the epochs runs the whole model."""
    if not on_gpu:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (0, 0))
    weights = []
    for cache in (True, False):
        model = tiny_model(family, layers=4)
        freezing, graphs = LayerFreezing(layers=2, cache=cache), CUDAGraphs(max_graphs=16)
        fast: list[Any] = [Unpadding(pad_to_multiple_of=64), FusedLayers(), graphs, EarlyLoss(), LeanDispatch()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        trainer = trained(
            [freezing, MixedPrecision("bf16"), *fast],
            model=model,
            optimizer=optimizer,
            gpu=True,
            batches=[],
            train_dataloader=indexed(samples(model.config.pad_token_id)),
            max_duration="4ep",
            device_train_microbatch_size=4,
            precision="amp_bf16",
        )
        weights.append(final_weights(trainer))
        assert graphs.evidence["replays"] >= 8
        if cache:
            assert freezing.evidence["cache"].endswith("on the GPU" if on_gpu else "in pinned host memory")
    cached, plain = weights
    assert_near(cached, plain, torch.bfloat16, family)


def test_a_run_with_the_cache_repeats_bit_by_bit() -> None:
    weights = []
    for _ in range(2):
        fast: list[Any] = [
            Unpadding(),
            FusedLayers(),
            CUDAGraphs(max_graphs=16),
            FusedOptimizer(),
            MixedPrecision("bf16"),
        ]
        trainer = trained(
            [LayerFreezing(layers=1, cache=True), *fast],
            model=tiny_model("bert", layers=3, dropout=0.1),
            gpu=True,
            batches=[],
            train_dataloader=indexed(),
            max_duration="3ep",
            device_train_microbatch_size=4,
        )
        weights.append(final_weights(trainer))
    torch.testing.assert_close(*weights, rtol=0, atol=0)
