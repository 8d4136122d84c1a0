"""Backward passes in segments, with a stand-in for the capture: parity with an untouched model, and gradient order."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertForMaskedLM, BertForSequenceClassification

from composer_speedups import CUDAGraphs
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.core.run import Run
from composer_speedups.packing.encoder import with_counted_rows
from tests.helpers.common import batch, tiny_config
from tests.helpers.rerun import Logged, graphed
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
    model = bert()
    graphed(model, accumulate=True)
    inputs = given(None, [5, 4], 0)
    model(**inputs).loss.backward()
    wanted, called = gradients(model), list[Any]()
    model.zero_grad()
    with pytest.raises(RuntimeError, match="no second derivative"):
        model(**inputs).loss.backward(create_graph=True)
    weight, bias = model.classifier.weight, model.classifier.bias
    doubled = weight.register_hook(lambda gradient: 2 * gradient)
    bias.register_post_accumulate_grad_hook(called.append)
    model.zero_grad()
    model(**inputs).loss.backward()
    assert_near(weight.grad, 2 * wanted["classifier.weight"])
    assert called == [bias]
    doubled.remove()
    model.zero_grad()
    model(**inputs).loss.backward()
    assert_near(gradients(model), wanted)
    assert called == [bias, bias]


@pytest.mark.parametrize("segments", [3, LAYERS])
def test_an_unpadded_model_is_cut_too(segments: int) -> None:
    reference, model = bert(), bert()
    unpad(model, 16)
    calls = graphed(model, max_graphs=3, segments=segments)
    for seed, lengths in enumerate([[12, 7, 9], [1, 16, 4], [3, 2, 1], [16, 15, 16]]):
        inputs = batch(lengths, 16, seed=seed)
        for network in (reference, model):
            network.zero_grad()
            with with_counted_rows(network, inputs, inputs):
                network(**inputs).loss.backward()
        assert_near(gradients(model), gradients(reference), what=f"{lengths}")
    assert (calls.graphs, calls.replays, calls.backward_segments) == (3, 4, segments)


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


def test_the_evidence_counts_segments() -> None:
    model, technique = bert(), CUDAGraphs()
    for segments, expected in ((1, None), (3, 3)):
        technique._calls = graphed(copy.deepcopy(model), segments=segments)
        technique._calls.model(**given(None, [5, 4], 0))
        assert technique.summary(Run(torch.device("cpu"))).get("backward_segments") == expected
