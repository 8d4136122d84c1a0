"""torchao's compiled optimizer step together with torch_compile: its graphs are not counted as the model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composer_speedups import LowBitOptimizer, TorchCompile, apply_lowbit_optimizer
from composer_speedups.core.operator_recorder import compile_counts, counted_apart
from tests.helpers.common import trained

every_width = pytest.mark.parametrize("bits", [8, 4, "fp8"])


def test_graphs_compiled_apart_are_not_counted() -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    before = compile_counts()
    with counted_apart():
        torch.compile(double, backend="aot_eager")(torch.ones(3))
    assert compile_counts().since(before)[:4] == (0, 0, 0, 0)
    torch.compile(lambda x: x * 3, backend="aot_eager")(torch.ones(3))
    assert compile_counts().since(before).graphs == 1


def _train_compiled(bits: Any, *, backend: str, scope: Any = "model", gpu: bool = False) -> dict[str, Any]:
    torch._dynamo.reset()
    compiler = TorchCompile(scope, backend)
    lowbit = [LowBitOptimizer(bits, min_size=1024)] if bits else []
    trained([compiler, *lowbit], gpu=gpu)
    assert all(t.engaged for t in [compiler, *lowbit])
    return compiler.evidence


def test_the_model_is_still_compiled_on_the_cpu() -> None:
    both, alone = (_train_compiled(bits, scope="blocks", backend="eager") for bits in (8, None))
    assert both["graphs"] == alone["graphs"]


@pytest.mark.gpu
@every_width
def test_the_compiled_step_is_not_counted_as_the_models_on_a_gpu(bits: Any) -> None:
    alone = _train_compiled(None, backend="inductor", gpu=True)
    both = _train_compiled(bits, backend="inductor", gpu=True)
    assert [both[k] for k in ("graphs", "recompiles")] == [alone[k] for k in ("graphs", "recompiles")]


@pytest.mark.gpu
@every_width
def test_the_compiled_step_matches_the_eager_step(bits: Any) -> None:
    weights = []
    for compiled in (True, False):
        generator = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.randn(64, 256, generator=generator).cuda())
        optimizer = torch.optim.AdamW([weight], lr=1e-3, foreach=False)
        optimizer = apply_lowbit_optimizer(nn.Module(), optimizer, bits, compiled=compiled)
        before = compile_counts()
        for _ in range(3):
            weight.grad = torch.randn(64, 256, generator=generator).cuda()
            optimizer.step()
        assert compile_counts().since(before)[:4] == (0, 0, 0, 0)
        weights.append(weight.detach())
    # A value between two codes may round to either; every update is smaller than twice the learning rate.
    close = (weights[0] - weights[1]).abs() < 1e-5
    assert close.float().mean() > 0.99
    assert (weights[0] - weights[1]).abs().max() < 3 * 2e-3
