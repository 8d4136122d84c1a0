"""Cutting the forward pass for a backward pass in segments: cut points, skip connections, and models left uncut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composer_speedups.algorithms.cuda_graphs import capture
from composer_speedups.algorithms.cuda_graphs.capture import SharedGradients
from composer_speedups.algorithms.cuda_graphs.graphed_calls import ParameterPlaceholders
from composer_speedups.algorithms.cuda_graphs.segments import Segments, blocks_to_cut, cut_points
from tests.helpers.rerun import Rerun, graphed
from tests.reference.loop import gradients
from tests.reference.tolerance import assert_near


class Blocks(nn.Module):
    """Linear blocks, called by ``run``, between an input layer and a head."""

    def __init__(self, run: Callable[[Blocks, Tensor], Any], count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(3, 6), nn.ModuleList(Block() for _ in range(count))
        self.head, self.run = nn.Linear(6, 2), run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, self.first(x).tanh())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return self.inner(x.tanh()), "more"


def states(model: Blocks, x: Tensor) -> list[Tensor]:
    """Return the input of the first block and the output of each block."""
    hidden = [x]
    for block in model.blocks:
        hidden.append(block(hidden[-1])[0])
    return hidden


def from_a_cut(model: Blocks, x: Tensor) -> Any:
    hidden = states(model, x)
    return (model.head(hidden[-1] * hidden[1]),)


def from_within_a_segment(model: Blocks, x: Tensor) -> Any:
    hidden = states(model, x)
    return (model.head(hidden[-1] * hidden[0]),)


def every_state(model: Blocks, x: Tensor) -> Any:
    hidden = states(model, x)
    return (model.head(hidden[-1]), *hidden[1:])


class Once(torch.autograd.Function):
    """The square, with a backward pass that overwrites its saved tensor, so a second call would be silently wrong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = 2 * x
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return ctx.kept.mul_(gradient).clone()


def around_all_cuts(model: Blocks, x: Tensor) -> Any:
    hidden = states(model, Once.apply(x.detach() + model.first.bias))
    return (model.head(hidden[-1]) + hidden[0].sum(),)


def twice(model: Blocks, x: Tensor) -> Any:
    return (model.head(states(model, states(model, x)[-1])[-1]),)


def backwards(model: Blocks, x: Tensor) -> Any:
    for block in reversed(model.blocks):
        x = block(x)[0]
    return (model.head(x),)


def in_place(model: Blocks, x: Tensor) -> Any:
    for block in model.blocks:
        x = block(x)[0]
        x.add_(1)
    return (model.head(x),)


def unused(model: Blocks, x: Tensor) -> Any:
    states(model, x)
    return (model.head(model.blocks[-1].inner(x)),)


@pytest.mark.parametrize(
    ("run", "segments"),
    [
        (from_a_cut, 4),
        (every_state, 4),
        (from_within_a_segment, 1),
        (around_all_cuts, 1),
        (twice, 1),
        (backwards, 1),
        (in_place, 1),
        (unused, 1),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_gradients_match_and_models_that_cannot_be_cut_have_one_segment(run: Any, segments: int) -> None:
    reference, model = Blocks(run), Blocks(run)
    calls = graphed(model, segments=4)
    for seed in range(3):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
        for network in (reference, model):
            network.zero_grad()
            outputs = network(x)
            torch.stack([(i + 1) * output.square().sum() for i, output in enumerate(outputs)]).sum().backward()
        assert_near(gradients(model), gradients(reference), what=f"seed {seed}")
    assert (calls.replays, calls.backward_segments) == (3, segments)


@pytest.mark.parametrize(("frozen", "segments"), [(0, 4), (1, 4), (2, 3), (4, 1)])
def test_frozen_blocks_are_not_cut(frozen: int, segments: int) -> None:
    reference, model = Blocks(from_a_cut), Blocks(from_a_cut)
    for network in (reference, model):
        for module in (network.first, *network.blocks)[:frozen]:
            module.requires_grad_(False)
        network.blocks[-1].inner.bias.requires_grad_(False)
    calls = graphed(model, segments=4)
    for network in (reference, model):
        network(torch.ones(5, 3))[0].square().sum().backward()
    assert_near(gradients(model), gradients(reference))
    assert calls.backward_segments == segments


def test_compiled_blocks_are_cut_outside_the_compiled_code() -> None:
    reference, model = Blocks(from_a_cut), Blocks(from_a_cut)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    compiled = [block._compiled_call_impl for block in model.blocks]
    calls = graphed(model, segments=4)
    for _ in range(2):
        for network in (reference, model):
            network.zero_grad()
            network(torch.ones(5, 3))[0].square().sum().backward()
        assert_near(gradients(model), gradients(reference))
    assert calls.backward_segments == 4
    assert [block._compiled_call_impl for block in model.blocks] == compiled


def test_unused_parameters_have_no_gradient() -> None:
    model = Blocks(from_a_cut)
    model.unused = nn.Linear(2, 2)
    graphed(model, segments=4)
    model(torch.ones(5, 3))[0].square().sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is None} == {"unused.weight", "unused.bias"}


def test_blocks_to_cut() -> None:
    model = Blocks(from_a_cut)
    blocks = list(model.blocks)
    assert blocks_to_cut(model, 1) == []
    assert blocks_to_cut(model, 2) == [blocks[1]]
    assert blocks_to_cut(model, 3) == [blocks[0], blocks[1]]
    assert blocks_to_cut(model, 9) == blocks[:3]
    assert blocks_to_cut(model) == [], "their gradients are too small"
    assert blocks_to_cut(nn.Linear(2, 2), 3) == []
    compiled = copy.deepcopy(model)
    compiled.compile()
    assert blocks_to_cut(compiled, 3) == []


@pytest.mark.parametrize(
    ("sizes", "points"),
    [
        ([27] * 12, [1, 3, 5, 7, 9]),  # BERT-base
        ([27] * 5, [2]),  # the first segment gets the remainder
        ([100] * 3, [0, 1]),
        ([49, 49], []),
        ([0, 0, 60, 60], [2]),  # the first two are frozen
        ([60, 0, 0, 60], [2]),
        ([], []),
    ],
)
def test_cut_points(sizes: list[int], points: list[int]) -> None:
    assert cut_points([size * 2**20 for size in sizes]) == points


def test_capture_keeps_no_reference_to_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Blocks(every_state)
    made: list[Segments] = []
    shared, stand_ins = SharedGradients(model.parameters()), ParameterPlaceholders(model)

    class Kept(Segments):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(capture, "Segments", Kept)

    def call(x: Tensor) -> tuple[Tensor, ...]:
        with stand_ins.in_place():
            return tuple(model(x))

    leaves, blocks = stand_ins.of(shared.parameters), blocks_to_cut(model, 4)
    assert capture.Captured(call, [torch.ones(5, 3)], leaves, shared, Rerun(), blocks).segments == 4
    assert [(segments._outputs, segments._cuts, segments._visited) for segments in made] == [((), [], set())]
