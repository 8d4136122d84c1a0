"""Layers of experts: outputs and gradients, the load-balancing loss, and exclusion of padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composer_speedups import apply_sparse_upcycling, load_balancing_loss
from composer_speedups.algorithms.sparse_upcycling.experts import SparseFeedForward, balance_loss
from composer_speedups.algorithms.sparse_upcycling.loss import sparse_layers
from tests.helpers.common import batch, tiny_bert
from tests.reference.tolerance import assert_near


def upcycled(**settings: Any) -> Any:
    model = tiny_bert()
    apply_sparse_upcycling(model, **{"every": 1, **settings})
    return model


def perturb_experts(model: nn.Module) -> None:
    """Give every expert different weights."""
    generator = torch.Generator().manual_seed(1)
    for layer in sparse_layers(model):
        for parameter in layer.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.data.add_(noise.to(parameter.device))


def test_only_routers_are_drawn_from_the_cpu_generator() -> None:
    torch.manual_seed(7)
    expected = [0.02 * torch.randn(4, 32) for _ in range(2)]
    model = tiny_bert()
    torch.manual_seed(7)
    apply_sparse_upcycling(model, experts=4, every=1)
    assert_near([layer.router.weight.detach() for layer in sparse_layers(model)], expected, what="routers")


@pytest.mark.parametrize("top_k", [2, 3])
def test_a_layer_is_the_weighted_sum_of_its_experts(top_k: int) -> None:
    model = upcycled(experts=4, top_k=top_k)
    perturb_experts(model)
    layer = sparse_layers(model)[0]
    hidden = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    output = layer(hidden)
    expected = plainly(layer, hidden)
    assert_near([output], [expected], what="outputs")
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    inputs = [hidden, *layer.parameters()]
    actual = torch.autograd.grad(output, inputs, upstream)
    assert_near(actual, torch.autograd.grad(expected, inputs, upstream), what="gradients")
    assert actual[1].abs().max() > 1e-3, "the router learns from the task through the combination weights"


def plainly(layer: SparseFeedForward, hidden: Tensor) -> Tensor:
    """Compute every expert for every token, and weight experts that were not chosen by 0."""
    probabilities = (hidden @ layer.router.weight.T).softmax(-1)
    smallest = probabilities.sort(-1, descending=True).values[..., layer.top_k - 1 : layer.top_k]
    weights = probabilities * (probabilities >= smallest)
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.stack([e(hidden) * weights[..., i : i + 1] for i, e in enumerate(layer.experts)]).sum(0)


def test_an_expert_without_tokens_has_a_zero_gradient() -> None:
    layer = sparse_layers(upcycled(experts=4))[0]
    layer(torch.ones(1, 1, 32)).sum().backward()
    gradients = [e.up.weight.grad for e in layer.experts]
    assert [bool(g.any()) for g in gradients].count(True) == 2, "the only token goes to two experts"


@pytest.mark.pins
def test_the_load_balancing_loss_follows_the_paper_on_real_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(12, 4, generator=generator).softmax(-1)
    chosen = probabilities.topk(2).indices
    real = torch.tensor([True] * 7 + [False] * 5)
    loss, shares = balance_loss(probabilities, chosen, real)
    f = [sum(int(e in chosen[t].tolist()) for t in range(7)) / 14 for e in range(4)]
    p = [float(probabilities[:7, e].mean()) for e in range(4)]
    assert float(loss) == pytest.approx(4 * sum(a * b for a, b in zip(f, p, strict=True)))
    assert shares.tolist() == pytest.approx(f)
    even, one_sided = torch.eye(4), torch.eye(4)[[0, 0, 0, 0]]
    assert float(balance_loss(torch.full((4, 4), 0.25), even.argmax(-1, keepdim=True), None)[0]) == pytest.approx(1)
    assert float(balance_loss(one_sided, one_sided.argmax(-1, keepdim=True), None)[0]) == pytest.approx(4)
    assert float(balance_loss(probabilities, chosen, torch.zeros(12))[0]) == 0, "all tokens are padding"


def balance_of(model: Any, tokens: dict[str, Tensor]) -> float:
    model.train()(**tokens)
    return float(load_balancing_loss(model).detach())


@pytest.mark.parametrize("positional", [False, True])
def test_padding_does_not_change_the_load_balancing_loss(positional: bool) -> None:
    model = upcycled()
    narrow = batch([9, 16, 3], 16)
    wide = {k: (nn.functional.pad(v, (0, 6)) if v.dim() == 2 else v) for k, v in narrow.items()}
    assert balance_of(model, wide) == pytest.approx(balance_of(model, narrow), rel=1e-5)
    unmasked = {k: v for k, v in wide.items() if k != "attention_mask"}
    everything = {**unmasked, "attention_mask": torch.ones_like(wide["attention_mask"])}
    assert balance_of(model, unmasked) == pytest.approx(balance_of(model, everything), rel=1e-5)
    assert balance_of(model, everything) != pytest.approx(balance_of(model, wide), rel=1e-3)
    if positional:
        model.bert(wide["input_ids"], wide["attention_mask"])
        assert float(load_balancing_loss(model).detach()) == pytest.approx(balance_of(model, wide), rel=1e-5)


def test_packed_tokens_are_real_and_filler_is_not() -> None:
    routing = sparse_layers(upcycled())[0].routing
    mask = batch([3, 0, 5], 8)["attention_mask"]
    routing.begin(nn.Identity(), (None, mask), {})
    cpu = torch.device("cpu")
    assert routing.real_tokens(torch.Size([1, 10]), cpu).tolist() == [True] * 8 + [False] * 2
    assert routing.real_tokens(torch.Size([3, 8]), cpu).tolist() == mask.bool().flatten().tolist()
