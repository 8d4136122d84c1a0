"""Capturing CUDA graphs: parameters, gradients, warm-up and timing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composer_speedups.algorithms.cuda_graphs.graphed_calls import CaptureError, GraphedCalls
from composer_speedups.core.compile_counts import capture_seconds
from tests.helpers.common import batch, tiny_bert
from tests.helpers.rerun import Rerun, graphed
from tests.reference.loop import gradients
from tests.reference.tolerance import assert_near


def test_capture_keeps_parameters_and_sums_the_gradients_of_tied_ones() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.rnn, self.out = nn.Embedding(7, 4), nn.LSTM(4, 4), nn.Linear(4, 7)
            self.out.weight = self.embedding.weight

        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (self.out(self.rnn(self.embedding(x))[0]),)

    reference, model = Tied(), Tied()
    model.load_state_dict(reference.state_dict())
    own = dict(model.named_parameters(remove_duplicate=False))
    calls = graphed(model)
    for length in (3, 5):
        for network in (reference, model):
            network.zero_grad()
            network(torch.arange(length).unsqueeze(1))[0].square().mean().backward()
        assert_near(gradients(model), gradients(reference))
    assert calls.replays == 2
    assert all(own[name] is p for name, p in model.named_parameters(remove_duplicate=False))


def test_a_parameter_outside_the_module_is_refused() -> None:
    model = nn.Linear(3, 3)
    weight = model.weight
    model.forward = lambda x: x @ weight  # type: ignore[method-assign]
    graphed(model)
    with pytest.raises(CaptureError, match="the call uses a parameter that is not registered in a module"):
        model(torch.ones(2, 3))


def test_compilation_ends_before_capture() -> None:
    model = nn.Linear(3, 3)
    linear, stats = model.forward, torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    ran: list[int] = []
    warmed_up: list[list[int]] = []

    def forward(x: Tensor) -> tuple[Tensor]:
        stats["unique_graphs"] += len(ran) < 2
        ran.append(stats["unique_graphs"] - before)
        return (linear(x),)

    class Recorder(Rerun):
        def record(self, run: Any) -> Any:
            warmed_up.append(list(ran))
            return super().record(run)

    model.forward = forward
    GraphedCalls(model, forward, 1, recorder=Recorder)(torch.ones(2, 3))
    assert warmed_up[0] == [1, 2, 2], "warm-up lasts until a call compiles nothing"


def test_captures_are_timed() -> None:
    before = capture_seconds()
    model = tiny_bert()
    graphed(model)
    model(**batch([4, 4]))
    after = capture_seconds()
    model(**batch([4, 4]))
    assert before < after == capture_seconds()


def test_shapes_share_their_gradient_buffers() -> None:
    model = tiny_bert()
    graphed(model)
    pointers = []
    for lengths in ([5, 4], [8, 8]):
        model.zero_grad()
        model(**batch(lengths)).loss.backward()
        pointers.append([p.grad.data_ptr() for p in model.parameters() if p.grad is not None])
    assert pointers[0] == pointers[1]
    assert len(pointers[0]) == len(list(model.parameters()))


def test_gradients_of_any_subset_of_outputs_with_unused_parameters() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    model["a"].bias.requires_grad_(False)
    reference = copy.deepcopy(model)
    for network in (model, reference):
        network.forward = lambda x, network=network: (network["a"](x), network["b"](x), x.sum(-1))
    calls = graphed(model)
    for pick in ([0], [1], [0, 1]):
        for network in (model, reference):
            network.zero_grad()
            outputs = network(torch.ones(4, 3))
            assert [o.requires_grad for o in outputs] == [True, True, False]
            torch.stack([(i + 1) * outputs[i].square().sum() for i in pick]).sum().backward()
        # Graphs return zeros for gradients that autograd leaves out.
        zeros = {n: torch.zeros_like(g) for n, g in gradients(model).items()}
        assert_near(gradients(model), {**zeros, **gradients(reference)})
    assert calls.replays == 3
    assert model["unused"].weight.grad is None
    assert model["a"].bias.grad is None
