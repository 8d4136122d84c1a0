"""fused_layers on a GPU: accuracy in 16 bits compared with the stock model, DeBERTa's kernel, no synchronization."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from composer_speedups import CUDAGraphs, FusedLayers, MixedPrecision, Unpadding
from composer_speedups.algorithms.fused_layers.fusing import fuse
from composer_speedups.algorithms.fused_layers.modules import FusedEmbeddings, FusedLayer
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.core.errors import CannotRunError
from composer_speedups.kernels import Shape
from composer_speedups.packing.attention import PositionBias, unpadded_attention
from composer_speedups.packing.disentangled_attention import Relative, disentangled_attention
from composer_speedups.packing.encoder import unpadded_encoders
from composer_speedups.packing.layout import lay_out
from tests.core.test_custom_models import (
    INPUTS,
    BiEncoder,
    CustomModel,
    Pooling,
    apply_both,
    every_layer_change,
    last_slot,
    masked_mean,
    pairs,
    plain_max,
    plain_mean,
)
from tests.helpers.common import batch, final_weights, make_trainer, plain_batches, tiny_bert, trained
from tests.helpers.masks import masked_batch, random_masks
from tests.helpers.models import FUSED, HEADS, tiny_model
from tests.helpers.waiting import check_planned_steps
from tests.reference.loop import gradients
from tests.reference.nearness import distance, values

# torch warns once per process that its debug mode may miss synchronizations.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", FUSED)
def test_errors_are_at_most_three_times_the_padded_models(family: Any, head: Any, dtype: torch.dtype) -> None:
    """The error of logits and gradients may be three times the stock model's: the residual stream is rounded, too."""
    stock = tiny_model(family, head).cuda()
    ours = copy.deepcopy(stock)
    unpad(ours)
    fuse(ours)
    exact, theirs, mine = [], [], []
    # From seed 200, no input of the ReLU in DistilBERT's head is so near zero that rounding would flip its gradient.
    for seed, mask in enumerate(random_masks(25, widest=64), 200):
        inputs = {k: v.cuda() for k, v in masked_batch(mask, head, seed=seed).items()}
        exact.append(values(stock, inputs, None))
        theirs.append(values(stock, inputs, dtype))
        mine.append(values(ours, inputs, dtype))
    ran = {module.ran for module in ours.modules() if isinstance(module, FusedLayer | FusedEmbeddings)}
    assert "triton" in ran
    for i, what in enumerate(["logits", "gradients"]):
        reference = torch.cat([step[i] for step in exact])
        error = distance(torch.cat([step[i] for step in mine]), reference)
        assert 0 < error <= 3 * distance(torch.cat([step[i] for step in theirs]), reference), what


def test_a_planned_step_never_synchronizes_with_the_gpu() -> None:
    model: Any = tiny_bert(dropout=0.1)
    check_planned_steps(apply_both(model.cuda().train()))


def test_dropout_repeats_with_the_seed_and_differs_between_steps() -> None:
    model: Any = tiny_bert(dropout=0.3)
    model.cuda().train()
    unpad(model)
    fuse(model)
    inputs = {k: v.cuda() for k, v in batch([12, 7, 16, 10]).items()}
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        with torch.autocast("cuda", torch.bfloat16):
            runs.append([model(**inputs).logits for _ in range(2)])
    assert torch.equal(runs[0][0], runs[1][0])
    assert not torch.equal(runs[0][0], runs[0][1])


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
    assert "triton" in technique.evidence["layers_ran"]
    if family == "bert":
        assert technique.evidence["layers_ran"] == "1 triton, 1 triton for first tokens"
        assert technique.evidence["embeddings_ran"] == "triton"
    assert all(weight.isfinite().all() for weight in final_weights(trainer).values())
    if with_graphs:
        assert graphs.evidence["graphs"] >= 1


@every_layer_change
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_changed_layer_computes_the_same_as_in_the_stock_model(change: Any, reason: str, when: str) -> None:
    """The untouched layers run the kernels; in bf16 the error is at most about three times the padded model's."""
    stock, ours = tiny_bert(), tiny_bert()
    model: Any
    for model in (stock, ours):
        torch.manual_seed(4)
        if when == "after" and model is ours:
            apply_both(model)
        change(model.bert.encoder.layer[0])
        if when == "before" and model is ours:
            apply_both(model)
        model.cuda()
    inputs = {name: value.cuda() for name, value in INPUTS.items()}
    exact, theirs = (values(stock, inputs, dtype) for dtype in (None, torch.bfloat16))
    mine = values(ours, inputs, torch.bfloat16)
    ran = [module.ran for module in ours.modules() if isinstance(module, FusedLayer)]
    assert ran == (["unfused", "triton for first tokens"] if when == "after" else ["triton for first tokens"])
    for i, what in enumerate(["logits", "gradients"]):
        assert 0 < distance(mine[i], exact[i]) <= 3 * distance(theirs[i], exact[i]) + 1e-3, what


@pytest.mark.parametrize("with_graphs", [False, True])
def test_your_own_model_is_compared_and_trains_with_the_kernels(with_graphs: bool) -> None:
    fused, graphs = FusedLayers(), CUDAGraphs()
    algorithms = [fused, Unpadding(), MixedPrecision("bf16"), *([graphs] if with_graphs else [])]
    trained(algorithms, model=CustomModel(Pooling(masked_mean)), batches=plain_batches(6), gpu=True)
    assert fused.evidence["compared_with_untouched"]["largest_gradient_difference"] < 2e-3
    assert fused.evidence["layers_ran"] == "2 triton"
    if with_graphs:
        assert graphs.evidence["replays"] >= 4


@pytest.mark.parametrize("pool", [plain_mean, plain_max, last_slot])
def test_a_head_that_reads_padding_is_refused(pool: Any) -> None:
    algorithms = [FusedLayers(), Unpadding(), MixedPrecision("bf16"), CUDAGraphs()]
    with pytest.raises(CannotRunError, match="unpadding: its result differs from the untouched model's"):
        trained(algorithms, model=CustomModel(Pooling(pool)), gpu=True)


@pytest.mark.parametrize("encoders", [1, 2])
@pytest.mark.parametrize("with_graphs", [False, True])
def test_bi_encoders_train_with_a_plan_for_each_mask(encoders: int, with_graphs: bool) -> None:
    unpadding, graphs = Unpadding(8), CUDAGraphs(8)
    algorithms = [FusedLayers(), unpadding, MixedPrecision("bf16"), *([graphs] if with_graphs else [])]
    trainer = make_trainer(algorithms, model=BiEncoder(encoders), batches=pairs(4), gpu=True)
    trainer.fit()
    counted = [encoder.packing.counted for encoder in unpadded_encoders(trainer.state.model)]
    trainer.close()
    assert counted == [0] * encoders  # no encoder had to count its own tokens in a training batch
    if with_graphs:
        assert graphs.evidence["replays"] == 3


def test_the_functions_handle_two_masks_on_a_gpu() -> None:
    stock, ours = BiEncoder().cuda(), apply_both(BiEncoder().cuda())
    for pair in pairs(3):
        inputs = {name: value.cuda() for name, value in pair.items()}
        with torch.no_grad():
            torch.testing.assert_close(ours(inputs), stock(inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("last_layer", ["needed", "all"])
def test_a_second_derivative_is_refused_by_name(last_layer: Any) -> None:
    model: Any = tiny_bert()
    model.cuda()
    unpad(model)
    fuse(model, last_layer)
    inputs = {name: value.cuda() for name, value in batch([5, 9, 3]).items()}
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(**inputs).loss
    with pytest.raises(RuntimeError, match=r"no second derivative .*undo_unpadding\(model\)"):
        torch.autograd.grad(loss, trained, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_is_as_accurate_as_its_dtype_allows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads, size, lengths = 3, 64, [200, 0, 70, 1, 256]
    mask = torch.arange(256, device="cuda") < torch.tensor(lengths, device="cuda")[:, None]
    plan = lay_out(mask, sum(lengths), 64)
    distances = torch.arange(-plan.longest, plan.longest + 1, device="cuda")
    relative = Relative(plan, (distances // 8 + 32).clamp(0, 63).int())
    tokens = len(plan.indices_T)
    given = [torch.randn(tokens, heads * size, device="cuda", dtype=dtype) for _ in range(3)]
    given.append(torch.randn(64, 2 * heads * size, device="cuda", dtype=dtype))
    grad = torch.randn(tokens, heads * size, device="cuda", dtype=dtype)
    grad[sum(lengths) :] = 0
    results = []
    for wanted in (dtype, torch.float64):
        leaves = [x.to(wanted).requires_grad_() for x in given]
        out = disentangled_attention(leaves[0], leaves[1], leaves[2], leaves[3], relative, heads, 0.0)
        results.append([out[: sum(lengths)], *torch.autograd.grad(out, leaves, grad.to(wanted))])
    for ours, exact in zip(*results, strict=True):
        assert (ours.double() - exact).norm() / exact.norm() < (5e-3 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("scaling", [None, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_with_a_bias_is_as_accurate_as_its_dtype_allows(dtype: torch.dtype, scaling: float | None) -> None:
    torch.manual_seed(0)
    heads, size, lengths = 3, 64, [200, 0, 70, 1, 256]
    mask = torch.arange(256, device="cuda") < torch.tensor(lengths, device="cuda")[:, None]
    layout = lay_out(mask, sum(lengths), 64)
    shape = (1, heads, len(layout.indices_T), size)
    given = [torch.randn(shape, device="cuda").mul(0.3).to(dtype) for _ in range(3)]  # scores of usual size unscaled
    given.append(torch.randn(heads, 2 * layout.longest + 1, device="cuda"))
    grad = torch.randn(1, shape[2], heads, size, device="cuda", dtype=dtype)
    grad[:, sum(lengths) :] = 0
    results = []
    for wanted, of_bias in ((dtype, torch.float32), (torch.float64, torch.float64)):
        query, key, value = leaves = [x.to(wanted).requires_grad_() for x in given[:3]]
        leaves.append(given[3].to(of_bias).requires_grad_())
        settings: Any = {"scaling": scaling, "layout": layout, "position_bias": PositionBias(layout, leaves[3])}
        attended = unpadded_attention(nn.Identity(), query, key, value, None, **settings)[0]
        results.append([attended[:, : sum(lengths)], *torch.autograd.grad(attended, leaves, grad.to(wanted))])
    for ours, exact in zip(*results, strict=True):
        assert (ours.double() - exact).norm() / exact.norm() < (1e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("family", ["deberta_v2", "mpnet", "esm", "jina_embeddings_v3"])
def test_loss_and_gradients_in_bf16_match_the_untouched_model(family: Any) -> None:
    reference, ours = tiny_model(family, "mlm").cuda(), tiny_model(family, "mlm").cuda()
    unpad(ours)
    fuse(ours)
    inputs: Any = {k: v.cuda() for k, v in batch([60, 3, 17, 31]).items()}
    inputs["labels"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    losses = []
    for model in (reference, ours):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**inputs).loss
        loss.backward()
        losses.append(loss)
    assert {layer.ran for layer in ours.modules() if isinstance(layer, FusedLayer)} == {"triton"}
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-2, atol=2e-2)
    exact, actual = gradients(reference), gradients(ours)
    for name in exact:
        assert (actual[name] - exact[name]).norm() <= 0.1 * exact[name].norm() + 1e-3, name
