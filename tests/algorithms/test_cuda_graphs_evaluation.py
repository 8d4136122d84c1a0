"""Captured evaluation on a CPU, with a stand-in recorder: values, copies, and calls that stay eager."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from composer import Callback, Logger, State
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

from composer_speedups import CUDAGraphs, Unpadding, untouched
from composer_speedups.algorithms.cuda_graphs.graphed_calls import GraphedCalls
from composer_speedups.core.run import Run
from composer_speedups.packing.encoder import unpadded_encoders
from tests.helpers.common import batch, data_spec, make_trainer, tiny_bert
from tests.helpers.rerun import Rerun, graphed, in_composer
from tests.reference.loop import gradients
from tests.reference.tolerance import assert_near

ONE, TWO = batch([5, 4], 6), batch([8, 8, 2], seed=1)


def counts(calls: GraphedCalls) -> tuple[int, int]:
    return calls.eval_graphs, calls.eval_replays


BATCHES = [ONE, TWO, batch([6, 3], seed=2), batch([1, 7, 5], 8, seed=3), batch([6, 6], seed=4), ONE]


def test_evaluation_between_training_and_its_backward_pass() -> None:
    results: list[Any] = []
    for captured in (False, True):
        model = tiny_bert()
        calls = graphed(model) if captured else None
        optimizer, collected = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(3):
            loss = model.train()(**TWO).loss
            model.eval()
            with torch.no_grad():
                collected += [model(**inputs).logits for inputs in BATCHES]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert not any(logits.requires_grad for logits in collected)
        results.append([collected, gradients(model)])
        if calls is not None:
            assert counts(calls) == (2, 16)
            assert (calls.graphs, calls.replays, calls.eager_calls) == (1, 3, 0)
    assert_near(results[1][0], results[0][0])
    assert_near(results[1][1], results[0][1])


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_later_calls_do_not_change_outputs(context: Any) -> None:
    model = tiny_bert().eval()
    with torch.no_grad():
        expected = [model(**inputs).logits for inputs in BATCHES]
    calls = graphed(model)
    with context():
        collected = [model(**inputs).logits for inputs in BATCHES]
    assert_near(collected, expected)
    assert counts(calls) == (2, 4), "all but the first call of each shape"
    with torch.no_grad() if context is torch.inference_mode else torch.inference_mode():
        assert_near([model(**inputs).logits for inputs in BATCHES], expected)
    assert counts(calls) == (2, 10)


def test_as_many_shapes_are_captured_as_for_training() -> None:
    model = tiny_bert()
    calls = graphed(model, max_graphs=2)
    for n in (4, 5):
        model(**batch([n, n])).loss.backward()
    model.eval()
    with torch.no_grad():
        for n in (4, 5, 6, 4, 5, 6, 4, 5, 6):
            model(**batch([n, n]))
    assert counts(calls) == (2, 4)
    assert calls.graphs == 2
    calls.forget()
    assert (calls.graphs, *counts(calls)) == (0, 0, 4)


def test_a_later_fit_and_release_drop_the_graphs() -> None:
    model, technique = tiny_bert(), CUDAGraphs()
    original = model.forward
    technique._calls = calls = graphed(model)
    for drop in (lambda: technique.fit_start(in_composer(model)), calls.release):
        model.train()(**ONE).loss.backward()
        with torch.no_grad():
            for expected in (0, 1, 1):
                model.eval()(**ONE)
                assert (calls.graphs, calls.eval_graphs) == (1, expected)
        drop()
        assert (calls.graphs, calls.eval_graphs) == (0, 0)
    assert model.forward == original


def test_evidence_tells_of_evaluation() -> None:
    model, technique, run = tiny_bert(), CUDAGraphs(), Run(torch.device("cpu"))
    technique._calls = graphed(model)
    model(**ONE).loss.backward()
    trained = {"graphs": 1, "replays": 1, "eager_calls": 0}
    assert technique.summary(run) == trained
    model.eval()
    with torch.no_grad():
        for _ in range(3):
            model(**ONE)
    assert technique.summary(run) == {**trained, "eval_graphs": 1, "eval_replays": 2}


# What a replay would not do: a model is captured, changed, and called twice more, within the context that the change
# returns if it is one. What is expected is the number of captured shapes, and of replays.


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def bert_of(model: Any) -> Any:
    return model.base_model.model.bert


@contextlib.contextmanager
def hooked(model: Any) -> Iterator[None]:
    seen: list[Any] = []
    handle = model.base_model.model.classifier.register_forward_hook(lambda *_: seen.append(1))
    yield
    handle.remove()
    assert len(seen) == 2


@contextlib.contextmanager
def hooked_globally(_: Any) -> Iterator[None]:
    """As profilers and loggers of activations hook all modules of a process."""
    seen: list[Any] = []
    handle = register_module_forward_hook(lambda *_: seen.append(1))
    yield
    handle.remove()
    assert len(seen) > 2


def with_another_parameter(model: Any) -> None:
    dense = bert_of(model).pooler.dense
    dense.bias = nn.Parameter(dense.bias + 1)


def with_another_buffer(model: Any) -> None:
    embeddings = bert_of(model).embeddings
    embeddings.position_ids = embeddings.position_ids.clone()


EAGER, CAPTURED_AGAIN, REPLAYED = (1, 1), (2, 2), (1, 3)
CHANGES: dict[str, tuple[Callable[[Any], Any], tuple[int, int]]] = {
    "drops out": (lambda model: model.base_model.model.dropout.train(), EAGER),
    "hooked": (hooked, EAGER),
    "hooked globally": (hooked_globally, EAGER),
    "hidden states were requested": (lambda model: model(**ONE, output_hidden_states=True), EAGER),  # hooks stay
    "in a mode": (lambda _: Mode(), EAGER),
    "as untouched": (untouched, EAGER),
    "with gradients": (lambda _: torch.enable_grad(), EAGER),
    "in training mode": (lambda model: model.train(), EAGER),
    "other memory": (lambda model: bert_of(model).pooler.dense.bias.set_(torch.ones(32)), CAPTURED_AGAIN),
    "another parameter": (with_another_parameter, CAPTURED_AGAIN),
    "another buffer": (with_another_buffer, CAPTURED_AGAIN),
    "without adapter": (lambda model: model.disable_adapter(), CAPTURED_AGAIN),
    "merged": (lambda model: model.merge_adapter(), CAPTURED_AGAIN),
    "updated": (lambda model: [parameter.add_(1) for parameter in model.parameters()], REPLAYED),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_does_not_replay_what_it_was(name: str) -> None:
    model: Any = get_peft_model(tiny_bert(), LoraConfig(target_modules=["query"], task_type="SEQ_CLS"))
    calls, (change, expected) = graphed(model.eval(), max_graphs=4), CHANGES[name]
    with torch.no_grad():
        for context in (lambda _: None, change):
            result = context(model)
            with result if isinstance(result, contextlib.AbstractContextManager) else contextlib.nullcontext():
                model(**ONE)
                model(**ONE)
    assert counts(calls) == expected


def test_calls_of_other_threads_are_eager() -> None:
    model = tiny_bert().eval()
    calls = graphed(model)
    thread = threading.Thread(target=torch.no_grad()(lambda: [model(**ONE) for _ in range(3)]))
    thread.start()
    thread.join()
    assert counts(calls) == (0, 0)


def test_tracing_sees_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    calls = graphed(model.eval())
    x = torch.ones(2, 3)
    with torch.no_grad():
        expected = [model(x) for _ in range(3)][-1]
        traced = torch.jit.trace(model, (x,), check_trace=False)
        assert_near([traced(2 * x)], [model[0](2 * x)])
        assert_near([torch.func.vmap(model)(x.unsqueeze(0))[0]], [expected])
        compiled: Any = torch.compile(nn.Sequential(model, nn.Identity()), backend="eager", fullgraph=True)
        assert_near([compiled(x)], [expected])
    assert counts(calls) == (1, 2)


@pytest.mark.parametrize("reason", ["operation not permitted when stream is capturing", "an output is not a tensor"])
def test_evaluation_that_cannot_be_captured_stays_eager(reason: str) -> None:
    """Training continues. Its graphs are captured again, because their generator's state was replaced."""

    class InTraining(Rerun):
        def record(self, run: Any) -> Any:
            if not torch.is_grad_enabled():
                raise RuntimeError(reason)
            return super().record(run)

    model: Any = tiny_bert()
    technique = CUDAGraphs()
    if reason == "an output is not a tensor":
        inner = model.forward
        model.forward = lambda **given: (inner(**given).logits, object())
        technique._calls = calls = graphed(model)
    else:
        technique._calls = calls = graphed(model, recorder=InTraining)
    for expected in (0, 1):
        model.train()(**ONE)[0].sum().backward()
        assert calls.graphs == 1
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                assert model(**ONE)[0].isfinite().all()
        assert calls.graphs == expected
    assert counts(calls) == (0, 0)
    evidence = technique.summary(Run(torch.device("cpu")))
    assert evidence["eval_note"].startswith(f"evaluation cannot be captured ({reason}")
    assert (calls.graphs, calls.replays) == (1, 2)


def test_an_error_of_the_model_is_raised() -> None:
    model = tiny_bert().eval()
    calls = graphed(model)
    for _ in range(3):
        with torch.no_grad(), pytest.raises(IndexError):
            model(torch.full((2, 3), 1000))
    assert calls.eval_graphs == 0


class Outputs(Callback):
    """Collects the outputs of evaluation, as users do, without copying them."""

    def __init__(self) -> None:
        self.logits: list[Any] = []

    def eval_after_forward(self, state: State, logger: Logger) -> None:
        self.logits.append(state.outputs)


@pytest.mark.parametrize("unpadded", [False, True])
def test_composers_evaluation_and_predict(unpadded: bool) -> None:
    evaluated = [batch(lengths, 16, seed=i) for i, lengths in enumerate([[12, 7, 9], [1, 16, 4], [3, 2, 1], [9, 9, 9]])]
    results = []
    for captured in (False, True):
        model, outputs = tiny_bert(), Outputs()
        settings: dict[str, Any] = {"eval_dataloader": data_spec(evaluated), "eval_interval": "2ba"}
        trainer = make_trainer([Unpadding(16)] if unpadded else [], model=model, callbacks=[outputs], **settings)
        calls = graphed(trainer.state.model)
        calls.reads_known_batch = bool(unpadded_encoders(model))
        if not captured:
            calls.release()
        trainer.fit()
        if captured:
            assert counts(calls) == ((2, 6) if unpadded else (1, 7))
        predicted = [output["logits"] for output in trainer.predict(data_spec(evaluated))]
        trainer.close()
        results.append(outputs.logits + predicted)
        if captured:
            assert counts(calls) == ((2, 6) if unpadded else (2, 10)), "predict does not count the rows of batches"
    assert_near(results[1], results[0])
