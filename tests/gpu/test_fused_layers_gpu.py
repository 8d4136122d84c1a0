"""fused_layers on a GPU: accuracy in 16 bits compared with the stock model, DeBERTa's kernel, no synchronization."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from composer_speedups import CUDAGraphs, FusedLayers, MixedPrecision, Unpadding
from composer_speedups.algorithms.fused_layers.fusing import fuse
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.core.errors import Refusal
from composer_speedups.kernels import Shape
from composer_speedups.kernels.host import counting
from composer_speedups.packing.attention import PositionBias, Relative, disentangled_attention, unpadded_attention
from composer_speedups.packing.layout import lay_out
from tests.helpers.common import batch, final_weights, make_trainer, plain_batches, tiny_bert, trained
from tests.helpers.masks import masked_batch, random_masks
from tests.helpers.models import FUSED, HEADS, tiny_model
from tests.helpers.unpadded import observed, unpad_and_fuse
from tests.helpers.waiting import check_planned_steps
from tests.packing.test_comparison import CustomModel, Pooling, last_slot, masked_mean, plain_mean
from tests.packing.test_planning import TwoTexts, sides
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
    assert observed(lambda: values(ours, inputs, dtype))["fused_layer"]
    for i, what in enumerate(["logits", "gradients"]):
        reference = torch.cat([step[i] for step in exact])
        error = distance(torch.cat([step[i] for step in mine]), reference)
        assert 0 < error <= 3 * distance(torch.cat([step[i] for step in theirs]), reference), what


def test_a_counted_step_never_synchronizes_with_the_gpu() -> None:
    model: Any = tiny_bert(dropout=0.1)
    check_planned_steps(unpad_and_fuse(model.cuda().train()))


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


@pytest.mark.parametrize("pool", [plain_mean, last_slot])
def test_a_head_that_reads_padding_is_refused(pool: Any) -> None:
    algorithms = [FusedLayers(), Unpadding(), MixedPrecision("bf16"), CUDAGraphs()]
    with pytest.raises(Refusal, match=r"unpadding.*: its result differs from the untouched model's"):
        trained(algorithms, model=CustomModel(Pooling(pool)), gpu=True)


@pytest.mark.parametrize("encoders", [1, 2])
@pytest.mark.parametrize("with_graphs", [False, True])
def test_bi_encoders_train_with_a_layout_for_each_mask(encoders: int, with_graphs: bool) -> None:
    unpadding, graphs = Unpadding(8, check="never"), CUDAGraphs(8)
    fused = FusedLayers(check="never")
    algorithms = [fused, unpadding, MixedPrecision("bf16"), *([graphs] if with_graphs else [])]
    trainer = make_trainer(algorithms, model=TwoTexts(encoders), batches=sides(1), gpu=True)
    ran = observed(trainer.fit)
    trainer.close()
    assert not ran["counted_in_the_call"]
    if with_graphs:
        assert graphs.evidence["replays"] == 2


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
    with pytest.raises(RuntimeError, match="no second derivative"):
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
        with torch.autocast("cuda", torch.bfloat16), counting() as ran:
            loss = model(**inputs).loss
        loss.backward()
        losses.append(loss)
    assert ran["fused_layer"]
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-2, atol=2e-2)
    exact, actual = gradients(reference), gradients(ours)
    for name in exact:
        assert (actual[name] - exact[name]).norm() <= 0.1 * exact[name].norm() + 1e-3, name
