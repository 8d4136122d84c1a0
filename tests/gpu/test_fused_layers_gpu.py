"""fused_layers on a GPU: accuracy in 16 bits compared with the stock model or PEFT, adapters, no synchronization."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composer_speedups import (
    CUDAGraphs,
    FusedLayers,
    LoRA,
    MixedPrecision,
    Unpadding,
)
from composer_speedups.algorithms.cuda_graphs.graphed_calls import install
from composer_speedups.algorithms.fused_layers.fusing import fuse
from composer_speedups.algorithms.layer_freezing.modules import freeze
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.kernels import Shape
from composer_speedups.packing.attention import PositionBias, Relative, disentangled_attention, unpadded_attention
from composer_speedups.packing.layout import lay_out, round_up
from tests.algorithms.test_fused_layers import adapted as adapted_on_cpu
from tests.helpers.common import (
    Recorder,
    batch,
    final_weights,
    fit_and_close,
    learnable_batches,
    make_trainer,
    plain_batches,
    tiny_bert,
    trained,
)
from tests.helpers.models import FUSED, HEADS, tiny_model
from tests.helpers.unpadded import observed
from tests.packing.test_comparison import CustomModel, Pooling, masked_mean
from tests.packing.test_planning import TwoTexts, sides
from tests.reference.loop import counted, losses_on_a_gpu, no_waiting, on_gpu
from tests.reference.nearness import distance, errors

# torch warns once per process that its debug mode may miss synchronizations.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")]


needs_float8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="8-bit matmuls need compute capability 8.9",
)
PRECISIONS = ["bf16", pytest.param("fp8", marks=needs_float8)]
WITH_ADAPTERS = [family for family in FUSED if family not in ("modernbert", "esm")]


def adapted(model: Any, **settings: Any) -> Any:
    return adapted_on_cpu(model, **settings).cuda()


def frozen(layers: Any, model: Any) -> Any:
    freeze(model, (), layers)
    return model


def fused(model: Any, last_layer: Any = "needed", precision: Any = "bf16") -> Any:
    unpad(model)
    fuse(model, last_layer, precision)
    return model.cuda()


def unpadded(model: Any) -> Any:
    unpad(model)
    return model


BF16, FP16 = torch.bfloat16, torch.float16
# Family, head, dtype, and what is done to both models.
ACCURACY: list[tuple[Any, Any, torch.dtype, Callable[[Any], Any]]] = [
    *[(family, head, dtype, lambda model: model) for family, head, dtype in product(FUSED, HEADS, (BF16, FP16))],
    # without bias, GELU's kernels compute products of adapters
    *[(family, head, BF16, adapted) for family, head in product(WITH_ADAPTERS, HEADS)],
    *[(family, head, FP16, partial(adapted, bias="lora_only")) for family, head in product(WITH_ADAPTERS, HEADS)],
    *[
        (family, "classification", BF16, partial(frozen, layers))
        for family, layers in product(["bert", "modernbert", "deberta_v2"], [0, 1, 2])
    ],
]


@pytest.mark.parametrize(("family", "head", "dtype", "prepare"), ACCURACY)
def test_errors_are_at_most_three_times_the_padded_models(family: Any, head: Any, dtype: Any, prepare: Any) -> None:
    """The error of logits and gradients may be three times the stock model's: the residual stream is rounded, too."""
    stock = prepare(tiny_model(family, head)).cuda()
    for what, (mine, theirs) in errors(stock, fused(copy.deepcopy(stock)), head, dtype).items():
        assert 0 < mine <= 3 * theirs, what


@pytest.mark.parametrize(
    "prepare",
    [
        unpadded,
        fused,
        lambda model: fused(adapted(model, lora_dropout=0.1)),
        pytest.param(lambda model: fused(model, "all", "fp8"), marks=needs_float8),
    ],
    ids=["unpadded", "fused", "adapted", "8 bits"],
)
def test_a_counted_step_never_synchronizes_with_the_gpu(prepare: Callable[[Any], Any]) -> None:
    stock: Any = tiny_bert(dropout=0.1)
    model = prepare(stock.cuda().train()).train()
    model.config.problem_type = "single_label_classification"
    for i in range(4):
        inputs = on_gpu(counted(model, batch([12, 7, 16, 10 - i], seed=i)))
        with no_waiting(strict=i > 0):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(**inputs).loss
            loss.backward()


def test_kernels_compiled_ahead_run() -> None:
    from composer_speedups.kernels.compile_ahead import launches  # imports Triton

    shape = Shape(64, 128, 2, 0.1, 0.1, 0.1, 64, 0.1)
    for some in launches(shape, torch.bfloat16, torch.device("cuda")):
        for launch in some:
            launch()
    torch.cuda.synchronize()


@pytest.mark.parametrize("with_graphs", [False, True])
@pytest.mark.parametrize("family", ["bert", "deberta_v2", "mpnet", "esm", "jina_embeddings_v3"])
def test_it_trains_under_composer(family: Any, with_graphs: bool) -> None:
    technique, graphs = FusedLayers(), CUDAGraphs()
    algorithms: list[Any] = [technique, Unpadding(), MixedPrecision("bf16"), *([graphs] if with_graphs else [])]
    model = tiny_model(family, dropout=0.1, problem_type="single_label_classification")
    trainer = trained(algorithms, model=model, batches=plain_batches(6), gpu=True)
    assert "by fused kernels" in technique.evidence["layers_ran"]
    if family == "bert":
        assert technique.evidence["layers_ran"] == "1 by fused kernels, 1 for first tokens"
        assert technique.evidence["embeddings_ran"] == "by a fused kernel"
    assert all(weight.isfinite().all() for weight in final_weights(trainer).values())
    if with_graphs:
        assert graphs.evidence["graphs"] >= 1


@pytest.mark.parametrize("with_graphs", [False, True])
def test_your_own_model_is_compared_and_trains_with_the_kernels(with_graphs: bool) -> None:
    fused, graphs = FusedLayers(), CUDAGraphs()
    algorithms = [fused, Unpadding(), MixedPrecision("bf16"), *([graphs] if with_graphs else [])]
    trained(algorithms, model=CustomModel(Pooling(masked_mean)), batches=plain_batches(6), gpu=True)
    assert fused.evidence["compared_with_untouched"]["largest_gradient_difference"] < 2e-3
    assert fused.evidence["layers_ran"] == "2 by fused kernels"
    if with_graphs:
        assert graphs.evidence["replays"] >= 4


@pytest.mark.parametrize("encoders", [1, 2])
@pytest.mark.parametrize("with_graphs", [False, True])
def test_bi_encoders_train_with_a_layout_for_each_mask(encoders: int, with_graphs: bool) -> None:
    unpadding, graphs = Unpadding(8, check="never"), CUDAGraphs(8)
    fused = FusedLayers(check="never")
    algorithms = [fused, unpadding, MixedPrecision("bf16"), *([graphs] if with_graphs else [])]
    trainer = make_trainer(algorithms, model=TwoTexts(encoders), batches=sides(1), gpu=True)
    ran = observed(lambda: fit_and_close(trainer))
    assert not ran["counted_in_the_call"]
    if with_graphs:
        assert graphs.evidence["replays"] == 2


@pytest.mark.parametrize("kind", ["tables", "bias", "unscaled bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernels_with_positions_are_as_accurate_as_their_dtype_allows(dtype: torch.dtype, kind: str) -> None:
    torch.manual_seed(0)
    heads, size, lengths = 3, 64, [200, 0, 70, 1, 256]
    mask = torch.arange(256, device="cuda") < torch.tensor(lengths, device="cuda")[:, None]
    layout = lay_out(mask, round_up(sum(lengths), 64), 64)
    tokens, far = len(layout.indices_T), layout.longest
    relative = Relative(layout, (torch.arange(-far, far + 1, device="cuda") // 8 + 32).clamp(0, 63).int())
    size_of_scores = 1.0 if kind == "tables" else 0.3  # of usual size, also unscaled
    given = [torch.randn(tokens, heads * size, device="cuda").mul(size_of_scores).to(dtype) for _ in range(3)]
    given.append(torch.randn(*((64, 2 * heads * size) if kind == "tables" else (heads, 2 * far + 1)), device="cuda"))
    if kind == "tables":
        given[3] = given[3].to(dtype)
    grad = torch.randn(tokens, heads * size, device="cuda", dtype=dtype)
    grad[sum(lengths) :] = 0

    def attended(query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
        if kind == "tables":
            return disentangled_attention(query, key, value, positions, relative, heads, 0.0)
        query, key, value = (x.unflatten(1, (heads, size)).transpose(0, 1)[None] for x in (query, key, value))
        settings: Any = {"scaling": 1.0 if kind == "unscaled bias" else None, "layout": layout}
        settings["position_bias"] = PositionBias(layout, positions)
        return unpadded_attention(nn.Identity(), query, key, value, None, **settings)[0][0].flatten(1)

    results = []
    for exact in (False, True):
        leaves = [(x.double() if exact else x).detach().clone().requires_grad_() for x in given]
        out = attended(*leaves)
        results.append([out[: sum(lengths)], *torch.autograd.grad(out, leaves, grad.to(out.dtype))])
    bound = (5e-3 if dtype == torch.bfloat16 else 1e-3) * (1 if kind == "tables" else 2)
    for ours, exact in zip(*results, strict=True):
        assert (ours.double() - exact).norm() / exact.norm() < bound


# Adapters.


@pytest.mark.parametrize("precision", PRECISIONS)
def test_losses_are_the_same_with_and_without_graphs(precision: Any) -> None:
    losses, weights = [], []
    for with_graphs in (False, True):
        model = fused(adapted(tiny_bert()).train(), "needed", precision)
        if with_graphs:
            install(model, 4)
        losses.append(losses_on_a_gpu(model, [batch([12, 7, 16, 10], seed=i) for i in range(5)]))
        weights.append([p.detach().clone() for p in model.parameters() if p.requires_grad])
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    # warming up for a capture moves the scales of 8-bit operands by up to a factor of two, and so what is rounded
    bound = 2e-2 if precision == "bf16" else 8e-2
    assert losses[1] == pytest.approx(losses[0], rel=bound)
    for one, other in zip(*weights, strict=True):
        assert distance(other, one) < bound


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_loss_curve_matches_pefts(precision: Any) -> None:
    curves = []
    for kernels in (False, True):
        recorder = Recorder()
        fast: list[Any] = [Unpadding(8), FusedLayers("all", precision, 0), CUDAGraphs()] if kernels else []
        algorithms = [LoRA(alpha=64.0), MixedPrecision("bf16"), *fast]
        trained(algorithms, batches=learnable_batches(), callbacks=[recorder], gpu=True)
        curves.append(torch.tensor(recorder.losses).unfold(0, 20, 1).mean(-1))
    assert curves[0][-1] < 0.8 * curves[0][0], "the comparison needs a loss that falls"
    assert float((curves[1] - curves[0]).abs().max()) < 0.06
