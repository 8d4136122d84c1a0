"""DeBERTa on a GPU: its attention kernel in 16 bits, parity in bf16, and training with and without CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composer_speedups import CUDAGraphs, FusedLayers, MixedPrecision, Unpadding, apply_fused_layers, apply_unpadding
from composer_speedups.algorithms.fused_layers.modules import FusedLayer
from composer_speedups.packing.disentangled_attention import Relative, disentangled_attention
from composer_speedups.packing.tokens import make_plan
from tests.helpers.common import batch, make_trainer, plain_batches
from tests.helpers.models import tiny_model
from tests.reference.loop import gradients

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_is_as_accurate_as_its_dtype_allows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads, size, lengths = 3, 64, [200, 0, 70, 1, 256]
    mask = torch.arange(256, device="cuda") < torch.tensor(lengths, device="cuda")[:, None]
    plan = make_plan(mask, sum(lengths), 64)
    distances = torch.arange(-plan.longest, plan.longest + 1, device="cuda")
    relative = Relative(plan, (distances // 8 + 32).clamp(0, 63).int())
    tokens = len(plan.indices_T)
    given = [torch.randn(tokens, heads * size, device="cuda", dtype=dtype) for _ in range(3)]
    given.append(torch.randn(64, 2 * heads * size, device="cuda", dtype=dtype))
    grad = torch.randn(tokens, heads * size, device="cuda", dtype=dtype)
    grad[sum(lengths) :] = 0
    found = []
    for wanted in (dtype, torch.float64):
        leaves = [each.to(wanted).requires_grad_() for each in given]
        out = disentangled_attention(leaves[0], leaves[1], leaves[2], leaves[3], relative, heads, 0.0)
        found.append([out[: sum(lengths)], *torch.autograd.grad(out, leaves, grad.to(wanted))])
    for ours, exact in zip(*found, strict=True):
        assert (ours.double() - exact).norm() / exact.norm() < (5e-3 if dtype == torch.bfloat16 else 1e-3)


def test_loss_and_gradients_in_bf16_match_the_untouched_model() -> None:
    reference, ours = tiny_model("deberta_v2", "mlm").cuda(), tiny_model("deberta_v2", "mlm").cuda()
    apply_unpadding(ours)
    apply_fused_layers(ours)
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
    exact, found = gradients(reference), gradients(ours)
    for name in exact:
        assert (found[name] - exact[name]).norm() <= 0.1 * exact[name].norm() + 1e-3, name


@pytest.mark.parametrize("with_graphs", [False, True])
def test_it_trains_under_composer(with_graphs: bool) -> None:
    graphs, technique = CUDAGraphs(), FusedLayers()
    algorithms: list[Any] = [technique, Unpadding(), MixedPrecision("bf16"), *([graphs] if with_graphs else [])]
    model = tiny_model("deberta_v2", dropout=0.1, problem_type="single_label_classification")
    trainer = make_trainer(algorithms, batches=plain_batches(6), model=model, gpu=True)
    trainer.fit()
    assert "triton" in technique.evidence["layers_ran"]
    if with_graphs:
        assert graphs.evidence["graphs"] >= 1
    trainer.close()
