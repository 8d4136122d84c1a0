"""CUDA graphs on a CPU, with a stand-in recorder: captured, eager and refused calls. See also test_cuda_graphs_gpu."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composer_speedups import CUDAGraphs, untouched
from composer_speedups.algorithms.cuda_graphs.graphed_calls import CaptureError, GraphedCalls
from composer_speedups.core.errors import Refusal
from composer_speedups.core.run import Run
from tests.helpers.common import batch, make_trainer, plain_batches, tiny_bert
from tests.helpers.rerun import CannotRecord, graphed
from tests.reference.loop import gradients
from tests.reference.tolerance import assert_near


def grads_of(model: Any, *calls: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run all forward passes, then all backward passes, and return the gradients."""
    for loss in [model(**inputs).loss for inputs in calls]:
        loss.backward()
    return gradients(model)


def test_gradients_of_two_forward_passes_before_backward_accumulate() -> None:
    reference, model = tiny_bert(), tiny_bert()
    graphed(model)
    inputs = [batch([5, 4]), batch([8, 8]), batch([9])]  # the last exceeds max_graphs
    assert_near(grads_of(model, *inputs), grads_of(reference, *inputs))


def test_release_restores_the_forward_method() -> None:
    model = tiny_bert()
    original = model.forward
    calls = graphed(model)
    model(**batch([4, 4]))
    calls.release()
    assert model.forward == original
    assert calls.graphs == 0


def test_outputs_have_the_models_output_type_and_values() -> None:
    reference, model = tiny_bert(), tiny_bert()
    calls = graphed(model)
    one = plain_batches(1)[0]
    output, expected = model(**one), reference(**one)
    assert type(output) is type(expected)
    assert_near([output.loss, output.logits], [expected.loss, expected.logits])
    output.loss.backward()
    expected.loss.backward()
    assert_near(gradients(model), gradients(reference))
    assert (calls.graphs, calls.replays, calls.eager_calls) == (1, 1, 0)


def test_each_shape_is_captured_once_up_to_the_limit() -> None:
    model = tiny_bert()
    calls = graphed(model)
    for lengths in ([4, 4], [6, 6], [4, 4], [8, 8], [8, 8]):
        model(**batch(lengths))
    assert (calls.graphs, calls.replays, calls.eager_calls) == (2, 3, 2)


def test_evaluation_and_calls_without_gradients_are_not_captured() -> None:
    model = tiny_bert()
    calls = graphed(model)
    with torch.no_grad():
        model(**plain_batches(1)[0])
    model.eval()
    model(**plain_batches(1)[0])
    assert (calls.graphs, calls.replays, calls.eager_calls) == (0, 0, 0)


def test_arguments_are_compared_by_value_and_unknown_objects_run_eagerly() -> None:
    model = tiny_bert()
    calls = graphed(model, max_graphs=5)
    one = batch([4, 4])
    model(**one, output_hidden_states=True)
    assert model(**one, output_hidden_states=False).hidden_states is None
    assert calls.graphs == 2
    model(**one, output_hidden_states=torch.device("cpu"))
    assert (calls.graphs, calls.eager_calls) == (2, 1)
    embedded = torch.zeros(2, 4, 32, requires_grad=True)
    model(inputs_embeds=embedded)
    assert (calls.graphs, calls.eager_calls) == (2, 2)


def test_a_composer_batch_is_one_argument() -> None:
    trainer = make_trainer()
    composer_model: Any = trainer.state.model
    calls = graphed(composer_model)
    one = plain_batches(1)[0]
    for argument in (one, UserDict(one)):
        assert composer_model(argument).loss.isfinite()
    assert (calls.graphs, calls.replays) == (1, 2)
    trainer.close()


def test_capture_does_not_update_buffers() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    reference = copy.deepcopy(model)
    graphed(model)
    x = torch.randn(5, 3)
    model(x)
    reference(x)
    assert_near(dict(model.named_buffers()), dict(reference.named_buffers()))


def test_captures_draw_no_random_numbers() -> None:
    """With dropout, the run equals an eager one: a resumed run, which captures again, depends on this."""
    inputs = [batch([5, 4]), batch([8, 8]), batch([5, 4], seed=1)]
    results = []
    for captured in (False, True):
        model = tiny_bert(dropout=0.3)
        if captured:
            graphed(model)
        torch.manual_seed(3)
        losses = []
        for one in inputs:
            loss = model(**one).loss
            loss.backward()
            losses.append(loss.detach().clone())
        results.append([*losses, *gradients(model).values(), torch.rand(())])
    torch.testing.assert_close(results[1], results[0])


def test_observed_and_untouched_calls_are_eager() -> None:
    model, run = tiny_bert(), Run(torch.device("cpu"), observing=True)
    calls = graphed(model)
    calls.paused = lambda: run.observing
    for _ in range(3):
        model(**batch([4, 4]))
        run.observing = False
    with untouched(model):
        model(**batch([4, 4]))
    assert (calls.graphs, calls.replays, calls.eager_calls) == (1, 2, 1)


def test_a_failed_capture_raises_or_disables_capturing() -> None:
    model = tiny_bert()
    calls = GraphedCalls(model, model.forward, 2, recorder=CannotRecord)
    with pytest.raises(CaptureError, match=r"^operation not permitted when stream is capturing$"):
        calls(**batch([4, 4]))
    seen: list[CaptureError] = []
    calls.on_failure = seen.append
    for _ in range(2):
        assert calls(**batch([4, 4])).loss.isfinite()
    assert (len(seen), calls.graphs, calls.replays, calls.eager_calls) == (1, 0, 0, 2)


@pytest.mark.pins
def test_it_needs_a_gpu_and_a_fixed_microbatch_size() -> None:
    with pytest.raises(Refusal, match=r"cuda_graphs: capturing graphs needs a CUDA GPU"):
        make_trainer([CUDAGraphs()])
    with pytest.raises(ValueError, match="max_graphs must be greater than or equal to 1"):
        CUDAGraphs(max_graphs=0)
    cpu = torch.device("cpu")
    unmet = [
        [refusal.reason for refusal in CUDAGraphs().needs(run)]
        for run in (Run(cpu), Run(cpu, ranks=2), Run(cpu, microbatch_size="auto"))
    ]
    assert [len(reasons) for reasons in unmet] == [1, 1, 2], "several ranks are accepted"
    assert "automatic micro-batches" in unmet[2][1]
