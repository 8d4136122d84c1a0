"""Backward passes in segments, with a stand-in for the capture: parity, gradient order, and where a model is cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertForMaskedLM, BertForSequenceClassification

from composer_speedups import CUDAGraphs
from composer_speedups.algorithms.cuda_graphs.segments import blocks_to_cut, cut_points
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.core.run import Run
from composer_speedups.packing.encoder import with_counted_rows
from tests.helpers.common import batch, tiny_config
from tests.helpers.rerun import Logged, graphed, in_composer
from tests.reference.loop import gradients
from tests.reference.tolerance import assert_near

LAYERS = 5


def bert(head: Any = BertForSequenceClassification) -> Any:
    torch.manual_seed(0)
    config = tiny_config(initializer_range=0.2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config.num_hidden_layers, config.problem_type = LAYERS, "single_label_classification"
    return head._from_config(config, attn_implementation="eager")


def given(head: Any, lengths: list[int], seed: int) -> dict[str, Tensor]:
    inputs = batch(lengths, 16, seed=seed)
    if head is BertForMaskedLM:
        inputs["labels"] = inputs["input_ids"].where(inputs["attention_mask"] > 0, -100)
    return inputs


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(("segments", "accumulate"), [(1, False), (1, True), (2, False), (3, False), (LAYERS, True)])
@pytest.mark.parametrize("head", [BertForSequenceClassification, BertForMaskedLM])
def test_gradients_of_several_calls_and_shapes_accumulate(
    head: Any, segments: int, accumulate: bool, set_to_none: bool
) -> None:
    reference, model = bert(head), bert(head)
    calls = graphed(model, segments=segments, accumulate=accumulate)
    for step in range(2):
        for network in (reference, model):
            network.zero_grad(set_to_none=set_to_none)
            for seed, lengths in enumerate([[5, 4], [16, 8, 8], [3, 9], [5, 5, 1]]):
                output = network(**given(head, lengths, 10 * step + seed))
                (output.loss + output.logits.square().mean()).backward()
        assert_near(gradients(model), gradients(reference), what=f"step {step}")
    assert (calls.graphs, calls.replays, calls.backward_segments) == (2, 8, segments)
    model.eval()
    reference.eval()
    inputs = given(head, [5, 4], 1)
    assert_near([model(**inputs).loss], [reference(**inputs).loss])
    assert calls.replays == 8


def test_hooks_of_parameters_and_second_derivatives_are_not_passed_by() -> None:
    model, technique = bert(), CUDAGraphs()
    technique._control(graphed(model))
    run = in_composer(model)
    technique.fit_start(run)
    assert technique._calls.accumulate
    inputs = given(None, [5, 4], 0)
    model(**inputs).loss.backward()
    wanted, called = gradients(model), list[Any]()
    model.zero_grad()
    with pytest.raises(RuntimeError, match="no second derivative"):
        model(**inputs).loss.backward(create_graph=True)
    weight, bias = model.classifier.weight, model.classifier.bias
    doubled = weight.register_hook(lambda gradient: 2 * gradient)
    bias.register_post_accumulate_grad_hook(called.append)
    technique.epoch_start(run)
    model.zero_grad()
    model(**inputs).loss.backward()
    assert_near(weight.grad, 2 * wanted["classifier.weight"])
    assert called == [bias]
    doubled.remove()
    model.zero_grad()
    model(**inputs).loss.backward()
    assert_near(gradients(model), wanted)
    assert called == [bias, bias]


@pytest.mark.parametrize("segments", [1, 3, LAYERS])
def test_an_unpadded_model_is_cut_too(segments: int) -> None:
    reference, model = bert(), bert()
    unpad(model, 16)
    calls, technique = graphed(model, max_graphs=3, segments=segments), CUDAGraphs()
    for seed, lengths in enumerate([[12, 7, 9], [1, 16, 4], [3, 2, 1], [16, 15, 16]]):
        inputs = batch(lengths, 16, seed=seed)
        for network in (reference, model):
            network.zero_grad()
            with with_counted_rows(network, inputs, inputs):
                network(**inputs).loss.backward()
        assert_near(gradients(model), gradients(reference), what=f"{lengths}")
    assert (calls.graphs, calls.replays, calls.backward_segments) == (3, 4, segments)
    technique._calls = calls
    assert technique.summary(Run(torch.device("cpu"))).get("backward_segments") == (segments if segments > 1 else None)


def test_gradient_hooks_run_between_the_replays_of_segments() -> None:
    model, log = bert(BertForMaskedLM), []  # type: ignore[var-annotated]
    graphed(model, segments=3, recorder=lambda pool: Logged(log))
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: log.append(name))
    for _ in range(2):
        log.clear()
        model.zero_grad()
        model(**given(BertForMaskedLM, [5, 4], 0)).loss.backward()
        assert [entry for entry in log if isinstance(entry, int)] == [0, 1, 2, 3]
        parts = [set(log[log.index(i) + 1 : log.index(i + 1) if i < 3 else None]) for i in range(4)]
        names = {name for name, _ in model.named_parameters()}
        layers = [{n for n in names if f"layer.{i}." in n} for i in range(LAYERS)]
        embeddings = {n for n in names if "embeddings" in n}
        assert parts == [
            set(),
            layers[3] | layers[4] | {n for n in names if n.startswith("cls")},
            layers[1] | layers[2],
            layers[0] | embeddings,  # includes the word embeddings, which are tied to the head
        ]


# Where a model is cut: skip connections, and models that stay whole.


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
    ("run", "frozen", "segments"),
    [
        (from_a_cut, 0, 4),
        (from_a_cut, 1, 4),
        (from_a_cut, 2, 3),
        (from_a_cut, 4, 1),
        (every_state, 0, 4),
        (from_within_a_segment, 0, 1),
        (around_all_cuts, 0, 1),
        (twice, 0, 1),
        (backwards, 0, 1),
        (in_place, 0, 1),
        (unused, 0, 1),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_gradients_match_and_models_that_cannot_be_cut_have_one_segment(run: Any, frozen: int, segments: int) -> None:
    reference, model = Blocks(run), Blocks(run)
    for network in (reference, model):
        for module in (network.first, *network.blocks)[:frozen]:
            module.requires_grad_(False)
        network.blocks[-1].inner.bias.requires_grad_(frozen == 0)
    calls = graphed(model, segments=4)
    for seed in range(3):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
        for network in (reference, model):
            network.zero_grad()
            outputs = network(x)
            torch.stack([(i + 1) * output.square().sum() for i, output in enumerate(outputs)]).sum().backward()
        assert_near(gradients(model), gradients(reference), what=f"seed {seed}")
    assert (calls.replays, calls.backward_segments) == (3, segments)


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


def test_blocks_to_cut() -> None:
    model = Blocks(from_a_cut)
    blocks = list(model.blocks)
    size = sum(p.nbytes for p in blocks[0].parameters())
    assert blocks_to_cut(model, size) == blocks[:3]
    assert blocks_to_cut(model, size + 1) == blocks_to_cut(model, 2 * size) == [blocks[1]]
    assert blocks_to_cut(model) == [], "their gradients are too small"
    assert blocks_to_cut(nn.Linear(2, 2), 0) == []
    compiled = copy.deepcopy(model)
    compiled.compile()
    assert blocks_to_cut(compiled, size) == []


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
