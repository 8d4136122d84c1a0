"""CUDA graphs on a CPU, with a stand-in recorder: captured, eager and refused calls. See also test_cuda_graphs_gpu."""

from __future__ import annotations

import contextlib
import copy
import re
import sys
from collections import UserDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from composer.models import HuggingFaceModel
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from transformers import BertForSequenceClassification
from transformers.utils import ModelOutput

from composer_speedups import CUDAGraphs, Unpadding, untouched, with_row_lengths
from composer_speedups.algorithms.cuda_graphs.graphed_calls import CaptureError, GraphedCalls
from composer_speedups.algorithms.cuda_graphs.optimizer_step import OptimizerStep
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.core.compile_counts import graphs_so_far
from composer_speedups.core.errors import Refusal
from composer_speedups.core.run import Run
from composer_speedups.kernels.common import gradient_buffer
from composer_speedups.packing.encoder import Packing, unpadded_encoders, with_counted_rows
from tests.helpers.common import Batch, Recorder, batch, fit_and_close, make_trainer, tiny_bert, tiny_config
from tests.helpers.rerun import CannotRecord, Rerun, graphed, in_composer
from tests.helpers.unpadded import compared
from tests.reference.loop import gradients, train_plainly
from tests.reference.tolerance import assert_near


def counts(calls: GraphedCalls) -> tuple[int, int, int]:
    return calls.graphs, calls.replays, calls.eager_calls


# Calls of one model, at most two or three graphs, and what is counted: graphs, replays and eager calls.
EMBEDDED = {"inputs_embeds": torch.zeros(2, 4, 32, requires_grad=True)}
ONE = batch([4, 4])
CALLS: dict[str, tuple[list[dict[str, Any]], tuple[int, int, int]]] = {
    "each shape once, up to the limit": ([batch([n, n]) for n in (4, 6, 4, 8, 9, 8, 9)], (3, 5, 2)),
    "arguments by value": ([{**ONE, "output_hidden_states": asked} for asked in (True, False, True)], (2, 3, 0)),
    "an unknown object": ([ONE, {**ONE, "output_hidden_states": torch.device("cpu")}], (1, 1, 1)),
    "an argument with a gradient": ([ONE, EMBEDDED], (1, 1, 1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_replayed_or_eager(name: str) -> None:
    given, expected = CALLS[name]
    model = tiny_bert()
    calls = graphed(model, max_graphs=3)
    for inputs in given:
        output = model(**inputs)
        assert isinstance(output, ModelOutput)
        assert (output.get("hidden_states") is not None) == bool(inputs.get("output_hidden_states"))
        del output  # so that no backward pass can follow
    assert counts(calls) == expected
    with torch.no_grad():
        model(**batch([5, 5]))
    model.eval()
    model(**batch([5, 5]))
    assert counts(calls) == expected, "without gradients or in eval mode, nothing is captured"


def test_gradients_of_two_forward_passes_before_backward_accumulate() -> None:
    results = []
    for captured in (False, True):
        model = tiny_bert()
        if captured:
            graphed(model)
        # the last exceeds max_graphs
        for loss in [model(**inputs).loss for inputs in (batch([5, 4]), batch([8, 8]), batch([9]))]:
            loss.backward()
        results.append(gradients(model))
    assert_near(results[1], results[0])


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("widths", [(4, 4, 4), (4, 6, 4), (4, 6, 6)])
def test_a_call_before_the_backward_pass_of_the_last_one_is_eager(widths: tuple[int, ...], segments: int) -> None:
    """Its replay or capture would overwrite what that backward pass reads."""
    results = []
    for captured in (False, True):
        model = tiny_bert()
        calls = graphed(model, segments=segments) if captured else None
        for seed in (1, 2):
            first, second, third = (model(**batch([width, 3], seed=seed + width)).loss for width in widths)
            (first + 2 * second).backward()
            third.backward()
        results.append(gradients(model))
        if calls is not None:
            assert counts(calls) == (1, 2, 4)
            for _ in range(2):
                model(**batch([4, 3]))  # whose outputs are dropped without a backward pass
            assert counts(calls) == (1, 4, 4)
    assert_near(results[1], results[0])


@pytest.mark.parametrize("accumulate", [False, True])
def test_in_ones_own_loop_outputs_stay_as_they_are(accumulate: bool) -> None:
    reference, model = tiny_bert(), tiny_bert()
    calls = graphed(model, accumulate=accumulate)
    kept: list[Any] = []
    for seed in range(3):
        outputs = model(**batch([5, 4], seed=seed))
        outputs.loss.backward()
        kept.append((outputs.loss.detach(), outputs.logits))
    expected = [reference(**batch([5, 4], seed=seed)) for seed in range(3)]
    assert_near([loss for loss, _ in kept], [outputs.loss for outputs in expected])
    assert_near([logits for _, logits in kept], [outputs.logits for outputs in expected])
    assert counts(calls) == (1, 3, 0)
    for composers in (False, True):  # which keeps no outputs
        model = tiny_bert()
        graphed(model).in_other_loop = not composers
        addresses = []
        for _ in range(2):
            outputs = model(**ONE)
            outputs.loss.backward()
            addresses.append(outputs.logits.data_ptr())
            kept.append(outputs)
        assert (addresses[0] == addresses[1]) == composers


class TakesADict(nn.Module):
    """As a SentenceTransformer does, whose batches the collator does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_bert()

    def forward(self, features: Batch) -> Any:
        return self.inner(**features)


EAGER_CALLS = {
    "uncounted": lambda model: model(**batch([5, 4])),
    "positional": lambda model: model(ONE["input_ids"], ONE["attention_mask"], labels=ONE["labels"]),
    "without a mask": lambda model: model(input_ids=batch([5, 5])["input_ids"], labels=torch.tensor([0, 1])),
    "in a dict": lambda model: model(batch([5, 4])),
    "in evaluation mode": lambda model: model.eval()(**ONE),
    "of other types": lambda model: model(**ONE, output_attentions=torch.tensor(False).numpy()),
}


@pytest.mark.parametrize("kind", EAGER_CALLS)
def test_a_loop_of_ones_own_in_which_no_call_is_captured_is_refused(kind: str) -> None:
    model: Any = TakesADict() if kind == "in a dict" else tiny_bert()
    if kind in ("uncounted", "positional", "without a mask", "in a dict"):
        unpad(model, 16)
    technique, call = CUDAGraphs(), EAGER_CALLS[kind]
    technique._control(calls := graphed(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps(count: int) -> None:
        for _ in range(count):
            call(model).loss.backward()
            if kind == "in evaluation mode":  # in train mode, calls alone count, whatever the optimizer
                optimizer.step()

    calls.paused = lambda: True  # observed batches are always eager
    steps(20)
    calls.paused = bool
    model.eval()
    for _ in range(30):
        call(model)  # an evaluation that computes gradients, before and after weights are loaded
    model.load_state_dict(model.state_dict())
    for _ in range(30):
        call(model)
    with torch.no_grad():
        for _ in range(30):
            call(model)
            model.load_state_dict(model.state_dict())  # as one that averages weights does
    model.train()
    fix = "call model(**batch) in train mode; unpadding needs a mask and with_row_lengths(collate, model)"
    reason = "the step cannot be captured (training goes on, and no call was captured)"
    with pytest.raises(Refusal, match=f"^{re.escape(f'cuda_graphs: {reason}; {fix}')}$"):
        steps(20)
    technique.on_unavailable = "warn"
    with pytest.warns(UserWarning, match="no call was captured"):
        steps(20)
    technique.on_unavailable = "stop"
    with untouched(model):
        steps(20)
    calls.in_other_loop = False  # Composer has an error of its own
    steps(20)
    calls.in_other_loop = True
    calls.release()
    model.forward = calls  # as a wrapper keeps it
    steps(20)
    assert calls.replays == 0


def test_a_composer_batch_is_one_argument() -> None:
    trainer = make_trainer()
    composer_model: Any = trainer.state.model
    calls = graphed(composer_model)
    for argument in (ONE, UserDict(ONE)):
        assert composer_model(argument).loss.isfinite()
    assert (calls.graphs, calls.replays) == (1, 2)
    trainer.close()


class Takes(nn.Module):
    """Takes any arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor]:
        leaves = tree_flatten((args, kwargs))[0]
        weighted = [(i + 1) * leaf.float().sum() for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        return (self.weight * sum(weighted) * (2 if any(leaf is True for leaf in leaves) else 1),)


class Pair(NamedTuple):
    first: Any
    second: Any


X, Y, INTEGERS = torch.arange(3.0), torch.ones(3), torch.ones(3, dtype=torch.long)
# Each has a graph of its own.
ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "by position": ((X, Y), {}),
    "by name": ((X,), {"y": Y}),
    "another name": ((X,), {"z": Y}),
    "another dtype": ((X, INTEGERS), {}),
    "another shape": ((X, Y[:2]), {}),
    "the same twice": ((X, X), {}),
    "a tuple": (((X, Y),), {}),
    "a list": (([X, Y],), {}),
    "a named tuple": ((Pair(X, Y),), {}),
    "a dict": (({"x": X, "y": {"z": Y}},), {}),
    "names in another order": (({"y": {"z": Y}, "x": X},), {}),
    "one and true": ((X, 1, True), {}),
    "one twice": ((X, 1, 1), {}),
}


def test_other_arguments_have_graphs_of_their_own() -> None:
    model, given = Takes(), [*ARGUMENTS.values()]
    expected = [model(*args, **kwargs)[0] for args, kwargs in given]
    calls = graphed(model, max_graphs=len(given))
    for turn in range(1, 3):
        outputs = [model(*args, **kwargs)[0].detach().clone() for args, kwargs in given]
        assert counts(calls) == (len(given), turn * len(given), 0)
        torch.testing.assert_close(outputs, expected)
    assert model(X, Y)[0].grad_fn is not None
    for unsupported in ((X, object()), (X, {"y": [object()]}), (X, Y.clone().requires_grad_()), (X, {1, 2})):
        model(*unsupported)
    assert calls.eager_calls == 4


@pytest.mark.parametrize("by_event", [False, True])
def test_frozen_and_thawed_parameters_drop_the_graphs(by_event: bool) -> None:
    """A call looks for them; in Composer, the start of an epoch does."""
    model, technique = tiny_bert(), CUDAGraphs()
    technique._control(calls := graphed(model))
    calls.in_other_loop = not by_event
    run = in_composer(model)
    technique.fit_start(run)
    model(**ONE).loss.backward()
    frozen = model.bert.embeddings
    for trains in (False, True):
        frozen.requires_grad_(trains)
        model.zero_grad()
        for epoch in range(2):
            if by_event:
                technique.epoch_start(run)
                assert calls.graphs == epoch
            model(**ONE).loss.backward()
            assert calls.graphs == 1
        reference = tiny_bert()
        reference.bert.embeddings.requires_grad_(trains)
        for _ in range(2):
            reference(**ONE).loss.backward()
        assert_near(gradients(model), gradients(reference))
        assert (frozen.word_embeddings.weight.grad is not None) == trains


@contextlib.contextmanager
def python_calls() -> Iterator[list[str]]:
    seen: list[str] = []
    sys.setprofile(lambda frame, kind, _: seen.append(frame.f_code.co_qualname) if kind == "call" else None)
    try:
        yield seen
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("accumulate", [True, False])
def test_python_calls_of_a_step_depend_neither_on_layers_nor_on_parameters(accumulate: bool) -> None:
    """Of the replays of forward and backward pass and of the optimizer's step, and few of them."""

    class Nothing(Rerun):
        def record(self, run: Any) -> Any:
            return run(), lambda: None

    numbers = []
    for layers in (1, 4):
        config = tiny_config()
        config.num_hidden_layers, config.problem_type = layers, "single_label_classification"
        model = BertForSequenceClassification._from_config(config, attn_implementation="eager")
        calls = graphed(model, recorder=Nothing, accumulate=accumulate)
        calls.in_other_loop = not accumulate  # as without Composer
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        step = OptimizerStep(optimizer, Nothing)
        for _ in range(4):
            optimizer.zero_grad()
            with python_calls() as seen:
                model(**ONE).loss.backward()
                optimizer.step()
        assert (calls.replays, step.replays) == (4, 3)
        numbers.append(len(seen))
    assert numbers[0] == numbers[1] <= 150


def test_captures_change_no_buffers_and_draw_no_random_numbers() -> None:
    """With dropout, the run equals an eager one: a resumed run, which captures again, depends on this."""
    results = []
    for captured in (False, True):
        model, norm = tiny_bert(dropout=0.3), nn.BatchNorm1d(3)
        if captured:
            graphed(model)
            graphed(norm)
        torch.manual_seed(3)
        losses = []
        for one in (batch([5, 4]), batch([8, 8]), batch([5, 4], seed=1)):
            loss = model(**one).loss
            loss.backward()
            losses.append(loss.detach().clone())
        norm(torch.arange(15.0).view(5, 3))
        results.append([*losses, *gradients(model).values(), *norm.buffers(), torch.rand(())])
    torch.testing.assert_close(results[1], results[0])


class Scaled(torch.autograd.Function):
    """A backward pass that writes the weight's gradient to its buffer, as the fused layers do.

    Its gradients do not depend on the output's, which is zero when the pass is recorded.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, buffer: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.buffer = buffer
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        found = x.sum(0)
        return weight.expand_as(x), found if ctx.buffer is None else ctx.buffer.copy_(found), None


class Scales(nn.Module):
    """Uses its weight some times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.weight = times, nn.Parameter(torch.linspace(0.5, 2.0, 8))
        self.buffers_seen: list[Tensor | None] = []

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            self.buffers_seen.append(gradient_buffer(self.weight))
            x = Scaled.apply(x, self.weight, self.buffers_seen[-1])
        return x.square().sum()


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_captured_gradient_is_written_to_its_buffer(times: int) -> None:
    class Once(Rerun):
        def record(self, run: Any) -> Any:
            return super().record(run)[0], lambda: None

    model, x = Scales(times), torch.arange(24.0).view(3, 8)
    untouched_model = copy.deepcopy(model)
    untouched_model(x).backward()
    graphed(model, recorder=Once, accumulate=True)
    model(x).backward()
    torch.testing.assert_close(model.weight.grad, untouched_model.weight.grad)
    warm_up, captured = model.buffers_seen[:times], model.buffers_seen[times:]
    assert warm_up == [None] * times
    assert [buffer is not None for buffer in captured] == [True, *[False] * (times - 1)]
    assert captured[0] is model.weight.grad
    assert "gradient_buffer" not in vars(model.weight)


def test_a_failed_capture_raises_or_disables_capturing() -> None:
    model = tiny_bert()
    calls = GraphedCalls(model, model.forward, 2, recorder=CannotRecord)
    with pytest.raises(CaptureError, match=r"^operation not permitted when stream is capturing$"):
        calls(**ONE)
    seen: list[Any] = []
    calls.on_failure = lambda *reason_and_fix: seen.append(reason_and_fix)
    for _ in range(2):
        assert calls(**ONE).loss.isfinite()
    assert (len(seen), *counts(calls)) == (1, 0, 0, 2)
    linear = nn.Linear(3, 3)
    weight = linear.weight
    linear.forward = lambda x: x @ weight  # type: ignore[method-assign]
    graphed(linear)
    with pytest.raises(CaptureError, match="the call uses a parameter that is not registered in a module"):
        linear(torch.ones(2, 3))


@pytest.mark.pins
def test_it_needs_a_gpu_and_a_fixed_microbatch_size() -> None:
    cpu = torch.device("cpu")
    unmet = [
        [refusal.reason for refusal in CUDAGraphs().needs(run)]
        for run in (Run(cpu), Run(cpu, ranks=2), Run(cpu, microbatch_size="auto"))
    ]
    assert [len(reasons) for reasons in unmet] == [1, 1, 2], "several ranks are accepted"
    assert "automatic micro-batches" in unmet[2][1]


# Capturing: parameters, gradients, warm-up and timing.


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
    calls, pointers = graphed(model), set()
    for length in (3, 5):
        for network in (reference, model):
            network.zero_grad()
            network(torch.arange(length).unsqueeze(1))[0].square().mean().backward()
        assert_near(gradients(model), gradients(reference))
        pointers.add(tuple(p.grad.data_ptr() for p in model.parameters()))  # type: ignore[union-attr]
    assert calls.replays == 2
    assert len(pointers) == 1, "both shapes have the same gradient buffers"
    assert all(own[name] is p for name, p in model.named_parameters(remove_duplicate=False))


def test_warming_up_ends_with_a_call_that_compiles_nothing_and_is_counted() -> None:
    model = nn.Linear(3, 3)
    linear, stats = model.forward, torch._dynamo.utils.counters["stats"]
    before, graphs = stats["unique_graphs"], graphs_so_far()
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
    calls = GraphedCalls(model, forward, 1, recorder=Recorder)
    calls(torch.ones(2, 3))
    assert warmed_up[0] == [1, 2, 2]
    calls(torch.ones(2, 3))
    assert graphs_so_far() == graphs + 3, "two were compiled and one captured"


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


@pytest.mark.parametrize("accumulate", [True, False])
def test_a_gradient_that_is_given_again_is_the_one_of_that_time(accumulate: bool) -> None:
    """The same tensor, then changed in place, then others, and none."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    reference = copy.deepcopy(model)
    for network in (model, reference):
        forward = network.forward
        network.forward = lambda x, forward=forward: (forward(x).square().sum(), forward(x))  # type: ignore
    calls = graphed(model, accumulate=accumulate)
    one, two, rows = torch.tensor(1.0), torch.tensor(2.0), torch.ones(4, 2)
    for given in (
        (one, None),
        (one, None),
        (one, rows),
        (two, rows),
        (two, None),
        (None, rows),
        (one, rows),
        (one, None),
    ):
        for network in (model, reference):
            network.zero_grad()
            pairs = [(o, g) for o, g in zip(network(torch.ones(4, 3)), given, strict=True) if g is not None]
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        assert_near(gradients(model), gradients(reference))
        one.mul_(3)
        rows.mul_(2)
        assert_near(gradients(model), gradients(reference))
    assert calls.replays == 8


@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_whose_data_was_set_are_written_again(microbatches: int) -> None:
    class Pinned(Rerun):
        """Replays with the memory of the capture, as a graph does."""

        def record(self, run: Any) -> tuple[Any, Any]:
            result, replay = super().record(run)
            assert calls._gradients is not None
            written = [(buffer, buffer.detach()) for buffer in calls._gradients._buffers.values()]

            def pinned() -> None:
                now = [(buffer, buffer.data) for buffer, _ in written]
                for buffer, memory in written:
                    buffer.data = memory
                replay()
                for buffer, memory in now:
                    buffer.data = memory

            return result, pinned

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    reference = copy.deepcopy(model)
    calls = graphed(model, recorder=Pinned, accumulate=True)
    for _ in range(3):
        for network in (model, reference):
            network.zero_grad()
        for _ in range(microbatches):
            inputs = torch.randn(4, 3)
            for network in (model, reference):
                network(inputs).square().sum().backward()
            assert_near(gradients(model), gradients(reference))
            for parameter in (*model.parameters(), *reference.parameters()):
                assert parameter.grad is not None
                parameter.grad.data = parameter.grad.data.sign()
    assert calls.replays == 3 * microbatches


def test_autograd_grad_gets_the_gradients_of_a_replay() -> None:
    results = []
    for captured in (False, True):
        model = tiny_bert()
        if captured:
            graphed(model)
        wanted = [*model.parameters()]
        found = [torch.autograd.grad(model(**batch([5, 4], seed=i)).loss, wanted) for i in range(2)]
        assert all(parameter.grad is None for parameter in wanted)
        results.append(found[-1])  # a replay overwrites earlier ones
    assert_near(results[1], results[0])
    weights, inputs = {name: p.detach() for name, p in model.named_parameters()}, batch([5, 4])
    with pytest.raises(RuntimeError, match="with functorch transforms"):
        torch.func.grad(lambda named: torch.func.functional_call(model, named, (), inputs).loss)(weights)


@pytest.mark.parametrize("training", [True, False])
def test_a_forward_that_changes_its_batch_changes_no_graph(training: bool) -> None:
    class Popping(nn.Linear):
        def forward(self, batch: Any) -> Any:
            weight = batch.pop("weight", None)
            output = super().forward(batch["x"]).squeeze(-1)
            return (output if weight is None else output * weight).sum()

    torch.manual_seed(0)
    model = Popping(4, 1).train(training)
    reference, calls = copy.deepcopy(model), graphed(model)
    with torch.set_grad_enabled(training):
        for step in range(3):
            inputs = {"x": torch.full((3, 4), step + 1.0), "weight": torch.tensor([0.0, 0.0, 5.0])}
            outputs = [network(dict(inputs)) for network in (model, reference)]
            torch.testing.assert_close(*outputs)
            if training:
                sum(outputs).backward()
    assert calls.replays + calls.eval_replays >= 2
    if training:
        assert_near(gradients(model), gradients(reference))


# Graphs of an unpadded model: one set per number of packed tokens.


def left_padded(inputs: Batch) -> Batch:
    return {**inputs, "attention_mask": inputs["attention_mask"].flip(-1)}


LENGTHS = [[12, 7, 9], [1, 16, 4], [3, 2, 1], [16, 15, 2], [10, 10, 1], [1, 1, 1]]  # 32, 32, 16, 48, 32, 16 tokens
SHAPES: dict[str, tuple[int, list[Batch], tuple[int, int, int]]] = {
    "other masks": (3, [batch(lengths, 16, seed=i) for i, lengths in enumerate(LENGTHS)], (3, 6, 0)),
    "above max_graphs": (1, [batch([12, 7, 9], 16), batch([16, 16, 9], 16, seed=1)], (1, 1, 1)),
    "padded": (3, [left_padded(batch([12, 7, 9], 16)), batch([12, 7, 9], 16)], (2, 2, 0)),
}


@pytest.mark.parametrize("collated", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_each_number_of_packed_tokens_is_captured_once(
    name: str, collated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    max_graphs, batches, expected = SHAPES[name]
    reference, model = tiny_bert(), tiny_bert()
    for network in (reference, model):
        network.config.problem_type = "single_label_classification"
    unpad(model, 16)
    calls, collate = graphed(model, max_graphs), with_row_lengths(lambda given: given, model)
    with monkeypatch.context() as patch:
        patch.setattr(Packing, "_count_and_lay_out", lambda *_: pytest.fail("counted inside the forward pass"))
        for inputs in batches:
            counted = collate(inputs)
            with contextlib.nullcontext() if collated else with_counted_rows(model, inputs, inputs):
                compared(
                    reference,
                    model,
                    lambda n: n(**(counted if collated and n is model else inputs)).loss,  # noqa: B023
                )
    assert counts(calls) == expected
    assert compared(reference, model, lambda network: network(**batch([12, 7, 9], 16)).loss) == "packed"
    assert counts(calls) == (*expected[:2], expected[2] + 1), "without row lengths"
    with untouched(model):
        assert compared(reference, model, lambda network: network(**batch([12, 7, 9], 16)).loss) == "padded"
    assert counts(calls)[:2] == expected[:2]


@pytest.mark.parametrize("check", ["never", "always"])
def test_composers_batches_are_counted_before_their_replays(check: Any) -> None:
    batches = [batch(lengths, 16, seed=i) for i, lengths in enumerate([[12, 7, 9], [1, 16, 4], [3, 2, 1], [9, 9, 9]])]
    recorder, technique, model = Recorder(), Unpadding(16, check=check), HuggingFaceModel(tiny_bert())
    trainer = make_trainer([technique], model=model, batches=batches, callbacks=[recorder])
    calls = graphed(trainer.state.model)
    calls.reads_known_batch = bool(unpadded_encoders(model))
    fit_and_close(trainer)
    assert_near(recorder.losses, train_plainly(tiny_bert(), batches).losses)
    assert calls.graphs == 2
    assert technique.engaged
