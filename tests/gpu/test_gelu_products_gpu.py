"""GELU in cuBLASLt's epilogues on a GPU: the products, whole layers, and CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from composer_speedups import CUDAGraphs, FusedLayers, MixedPrecision, Unpadding
from composer_speedups.kernels.common import counting
from composer_speedups.kernels.gelu_products import gelu_product, gelu_product_backward
from tests.gpu.test_fused_layers_gpu import BF16, FP16, adapted, fused
from tests.helpers.common import final_weights, plain_batches, trained
from tests.helpers.models import HEADS, tiny_model
from tests.reference.nearness import distance, errors

pytestmark = pytest.mark.gpu

SIZES = [(tokens, *widths) for tokens in (64, 8192, 8256) for widths in ((768, 3072), (384, 1536))]


def operands(dtype: torch.dtype, tokens: int, inputs: int, units: int, seed: int = 0) -> list[Tensor]:
    """x, weight and bias of the first product, and gradient and weight of the second one; products are near 1."""
    torch.manual_seed(seed)
    shapes = (tokens, inputs), (units, inputs), (units,), (tokens, inputs), (inputs, units)
    scales = 1.0, inputs**-0.5, 0.5, 1.0, inputs**-0.5
    return [(scale * torch.randn(*shape, device="cuda")).to(dtype) for shape, scale in zip(shapes, scales, strict=True)]


def both(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, next_weight: Tensor) -> list[Tensor]:
    up, activated = gelu_product(x, weight, bias)
    return [up, activated, gelu_product_backward(grad, next_weight, up)]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("sizes", SIZES)
def test_products_match_float32(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    given = operands(dtype, *sizes)
    with counting() as ran:
        found = both(*given)
    assert ran == {"gelu_epilogue": 2}
    x, weight, bias, grad, next_weight = (t.double() for t in given)
    up = F.linear(x, weight, bias)
    kept = found[0].double()  # the derivative is that at the rounded numbers
    d_up = torch.ops.aten.gelu_backward(grad @ next_weight, kept, approximate="tanh")
    for ours, theirs in zip(found, (up, F.gelu(up, approximate="tanh"), d_up), strict=True):
        assert ours.dtype == dtype
        assert distance(ours, theirs) < (0.006 if dtype == BF16 else 0.003)
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-2, atol=2e-2)


def test_torchs_operators_agree_where_cublaslt_has_no_such_product() -> None:
    """Rows of 20 numbers are not aligned to 16 bytes."""
    given = operands(BF16, 64, 20, 40)
    with counting() as ran:
        found = both(*given)
    assert ran == {"gelu_operator": 2}
    x, weight, bias, *_ = (t.double() for t in given)
    assert distance(found[1], F.gelu(F.linear(x, weight, bias), approximate="tanh")) < 0.006


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_captured_product_reads_other_inputs(dtype: torch.dtype) -> None:
    static, others = operands(dtype, 8256, 384, 1536), operands(dtype, 8256, 384, 1536, seed=1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first = [result.clone() for result in both(*static)]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = both(*static)
    graph.replay()
    torch.testing.assert_close(results, first, rtol=0, atol=0)
    for target, source in zip(static, others, strict=True):
        target.copy_(source)
    graph.replay()
    torch.testing.assert_close(results, both(*others), rtol=0, atol=0)
    assert not torch.equal(results[1], first[1])


@pytest.mark.parametrize("prepare", [lambda model: model, adapted], ids=["plain", "adapters"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    ("family", "activation"),
    [("bert", "gelu_new"), ("bert", "gelu_pytorch_tanh"), ("albert", "gelu_new"), ("mpnet", "gelu_new")],
)
def test_errors_are_at_most_three_times_the_padded_models(
    family: Any, activation: str, head: Any, dtype: torch.dtype, prepare: Callable[[Any], Any]
) -> None:
    stock = prepare(tiny_model(family, head, hidden_act=activation)).cuda()
    with counting() as ran:
        found = errors(stock, fused(copy.deepcopy(stock)), head, dtype)
    for what, (mine, theirs) in found.items():
        assert 0 < mine <= 3 * theirs, what
    assert ran["gelu_epilogue"] == 2 * ran["fused_layer"], "forward and backward"
    assert not ran["gelu_operator"]


@pytest.mark.parametrize(("gelu", "with_graphs"), [("tanh", False), ("auto", False), ("auto", True)])
def test_it_trains_under_composer(gelu: Any, with_graphs: bool) -> None:
    technique, graphs = FusedLayers(gelu=gelu), CUDAGraphs()
    algorithms: list[Any] = [technique, Unpadding(), MixedPrecision("bf16"), *([graphs] if with_graphs else [])]
    shape: Any = {"hidden_size": 768, "num_attention_heads": 12}  # from which on auto takes the tanh form
    model = tiny_model("bert", dropout=0.1, problem_type="single_label_classification", **shape)
    trainer = trained(algorithms, model=model, batches=plain_batches(6), gpu=True)
    assert technique.evidence["gelu_ran"] == "2 in matmuls' epilogues", "forward and backward, of one of two layers"
    assert all(weight.isfinite().all() for weight in final_weights(trainer).values())
    if with_graphs:
        assert graphs.evidence["graphs"] >= 1
