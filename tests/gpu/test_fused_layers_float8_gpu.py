"""fused_layers with 8-bit matmuls, on GPUs that support them: accuracy, scales, CUDA graphs and resuming."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_speedups import CUDAGraphs, FusedLayers, MixedPrecision, Unpadding
from composer_speedups.algorithms.cuda_graphs.graphed_calls import install
from composer_speedups.algorithms.fused_layers.fusing import float8_scales, fuse
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from tests.gpu.test_fused_layers_gpu import adapted, needs_float8
from tests.helpers.common import (
    SAVING,
    batch,
    final_weights,
    plain_batches,
    tiny_bert,
    trained,
)
from tests.helpers.models import FAMILIES, HEADS, tiny_model
from tests.helpers.unpadded import observed
from tests.reference.loop import losses_on_a_gpu, on_gpu
from tests.reference.nearness import distance, errors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),
    needs_float8,
]


def in_float8(model: Any, last_layer: Any = "all", precision: Any = "fp8") -> Any:
    changed = copy.deepcopy(model).cuda()
    unpad(changed)
    fuse(changed, last_layer, precision)
    return changed


@pytest.mark.parametrize(
    ("family", "head", "prepare"),
    [
        *[(family, head, lambda model: model.cuda()) for family, head in product([*FAMILIES, "mpnet"], HEADS)],
        *[(family, "classification", adapted) for family in ("bert", "roberta")],
    ],
)
def test_errors_are_within_the_bounds_of_eight_bits(family: Any, head: Any, prepare: Any) -> None:
    stock = prepare(tiny_model(family, head))
    found = errors(stock, in_float8(stock), head, torch.bfloat16, "fused_layer_fp8", first=0)
    for what, bound in (("logits", 0.25), ("gradients", 0.5)):  # measured with large weights: 0.03-0.16 and 0.1-0.4
        assert 0.005 < found[what][0] < bound, what


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_losses_of_any_magnitude_keep_their_gradients_from_the_first_batch(scale: float) -> None:
    stock: Any = tiny_bert()
    stock.cuda()
    ours = in_float8(stock)
    inputs = on_gpu(batch([12, 7, 16, 10]))
    gradients = []
    for model in (stock, ours, ours):  # the last pass uses the scales of the one before
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=model is not stock):
            loss = model(**inputs).loss
        (loss * scale).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    exact, first, second = gradients
    assert 0.005 < distance(first, exact) < 0.5
    torch.testing.assert_close(second, first, rtol=1e-3, atol=1e-4 * float(first.abs().max()))


def test_infinite_gradients_reach_the_weights_but_not_the_scales() -> None:
    model = in_float8(tiny_bert())
    inputs = on_gpu(batch([12, 7, 16, 10]))

    def step(scale: float) -> Tensor:
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**inputs).loss
        (loss * scale).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    step(1.0)
    assert not step(float("inf")).isfinite().all()
    assert step(1.0).isfinite().all()


def test_evaluation_computes_in_eight_bits_and_changes_no_scale() -> None:
    model = in_float8(tiny_bert())
    inputs = on_gpu(batch([12, 7, 16, 10]))
    with torch.autocast("cuda", torch.bfloat16):
        model(**inputs).loss.backward()
        before = float8_scales(model)
        assert any(number for row in before["bert.encoder.layer.0"] for number in row[8:])
        model.eval()
        for _ in range(2):
            with torch.no_grad():
                model(**inputs)
        assert float8_scales(model) == before
        model(**inputs).loss.backward()  # eval mode does not disable gradients
        assert float8_scales(model) == before
        assert observed(lambda: model(**inputs))["fused_layer_fp8"] == 2
        model.train()
        model(**inputs).loss.backward()
        assert float8_scales(model) != before


def test_two_forward_passes_before_backward_keep_their_scales() -> None:
    model = in_float8(tiny_bert())
    inputs = [on_gpu(batch([12, 7, 16, 10], seed=i)) for i in range(2)]
    gradients = []
    for together in (False, True):
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            if together:
                (model(**inputs[0]).loss + model(**inputs[1]).loss).backward()
            else:
                for step in inputs:
                    model(**step).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert distance(gradients[1], gradients[0]) < 0.02


def test_losses_and_scales_are_the_same_with_and_without_graphs() -> None:
    losses, scales = [], []
    for with_graphs in (False, True):
        model: Any = in_float8(tiny_bert()).train()
        if with_graphs:
            install(model, 4)  # captures at the first call, before any scale is known
        losses.append(losses_on_a_gpu(model, [batch([12, 7, 16, 10], seed=i) for i in range(5)]))
        scales.append([[row[0] for row in rows] for rows in float8_scales(model).values()])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    without, captured = (torch.tensor(numbers, dtype=torch.int32).view(torch.float32) for numbers in scales)
    assert set((captured / without).unique().tolist()) <= {0.5, 1.0, 2.0}, "warming up for a capture changes no scale"


@pytest.mark.parametrize("with_graphs", [False, True])
def test_resuming_is_exact(with_graphs: bool, tmp_path: Path) -> None:
    def run(**kwargs: Any) -> Any:
        graphs = [CUDAGraphs()] if with_graphs else []
        algorithms = [FusedLayers("all", "fp8", 0), Unpadding(), MixedPrecision("bf16"), *graphs]
        model = tiny_bert(dropout=0.1)
        model.bert.embeddings.requires_grad_(False)  # their gradients are summed in no fixed order
        return trained(algorithms, model=model, batches=plain_batches(6), gpu=True, **kwargs)

    whole = run(save_folder=str(tmp_path), **SAVING)
    saved = torch.load(tmp_path / "ba2.pt", weights_only=False)["state"]
    assert not [name for name in saved["model"] if "float8" in name]
    resumed = run(load_path=str(tmp_path / "ba2.pt"))
    torch.testing.assert_close(final_weights(resumed), final_weights(whole), rtol=0, atol=0)


def test_fp16_is_refused() -> None:
    model = in_float8(tiny_bert())
    with torch.autocast("cuda", torch.float16), pytest.raises(ValueError, match="needs bf16 autocast"):
        model(**on_gpu(batch([3, 4])))
