"""CUDA graphs on a GPU: replays train like plain PyTorch, and a step that cannot be captured is refused."""

from __future__ import annotations

import copy
import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.algorithms import GradientClipping
from composer.optim import CosineAnnealingWithWarmupScheduler
from torch import nn
from transformers import default_data_collator

from composer_speedups import (
    CUDAGraphs,
    FusedLayers,
    FusedOptimizer,
    SDPAAttention,
    TorchCompile,
    Unpadding,
    apply,
    with_row_lengths,
)
from composer_speedups.algorithms.cuda_graphs.graphed_calls import install
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.core.errors import Refusal
from composer_speedups.packing.encoder import with_counted_rows
from tests.algorithms.test_cuda_graphs_evaluation import Outputs
from tests.algorithms.test_cuda_graphs_segments import bert
from tests.helpers.common import (
    batch,
    data_spec,
    final_weights,
    make_trainer,
    microbatches,
    plain_batches,
    tiny_bert,
    trained,
)
from tests.helpers.rerun import cut_into
from tests.outside.test_trainers_of_others import trained_by_hf
from tests.reference.loop import gradients, no_waiting, on_gpu, train_plainly
from tests.reference.tolerance import assert_near

pytestmark = pytest.mark.gpu


# Their numbers of packed tokens, rounded up to a multiple of 16: 48, 64, 48, 32, 64, 48, 32
UNEVEN = [[12, 7, 16, 10], [16] * 4, [11, 8, 16, 9], [3, 2, 16, 1], [16, 16, 15, 9], [16, 1, 16, 1], [1, 9, 9, 9]]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("unpadded", [False, True])
def test_replays_train_like_plain_pytorch(unpadded: bool, compiled: bool) -> None:
    """An unpadded model has a graph for each number of packed tokens."""
    model, technique = tiny_bert(), CUDAGraphs()
    model.config.problem_type = "single_label_classification"
    batches = [batch(lengths, 16, seed=i) for i, lengths in enumerate(UNEVEN)] if unpadded else plain_batches(7)
    expected = train_plainly(model, batches)
    attention = Unpadding(16) if unpadded else SDPAAttention()
    algorithms: list[Any] = [technique, attention, *([TorchCompile()] if compiled else [])]
    trainer = trained(algorithms, model=copy.deepcopy(model), batches=batches, gpu=True)
    assert counted(technique) == [3 if unpadded else 1, 6, 1]
    assert_near({n.removeprefix("model."): w for n, w in final_weights(trainer).items()}, expected.weights)
    assert technique._calls.graphs == 0


def counted(technique: CUDAGraphs) -> list[int]:
    return [technique.evidence[name] for name in ("graphs", "replays", "eager_calls")]


def test_hf_trainer_replays_what_it_computes_without_graphs(tmp_path: Path) -> None:
    """In bf16 with dropout, whose masks are the same, and in evaluation."""
    data, results = batch([5, 12, 9, 3, 7, 12, 2, 8]), list[Any]()
    for graphs in ([], [CUDAGraphs(max_graphs=2)]):
        model: Any = tiny_bert(dropout=0.1)
        model.cuda()
        applied = apply(model, [Unpadding(64), FusedLayers(), *graphs])
        collate = with_row_lengths(default_data_collator, model)
        settings: dict[str, Any] = {"collate": collate, "use_cpu": False, "bf16": True, "learning_rate": 1e-3}
        results.append(trained_by_hf(model, data, tmp_path / "run", **settings))
    assert_near(results[1], results[0])
    evidence = applied.evidence["cuda_graphs"]
    assert (evidence["graphs"], evidence["replays"], evidence["eager_calls"]) == (1, 3, 1), (
        "the first batch is observed"
    )


def test_a_loop_of_ones_own_may_call_twice_and_keep_outputs() -> None:
    """A replay between a call and its backward pass would overwrite what this reads; outputs are copies."""
    results, batches = [], [on_gpu(batch([5, 4], seed=seed)) for seed in range(6)]
    for graphs in ([], [CUDAGraphs()]):
        model: Any = tiny_bert()
        model.cuda()
        applied = apply(model, [SDPAAttention(), *graphs])
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), list[Any]()
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            pair = [model(**first).loss, model(**second).loss]
            (pair[0] + 2 * pair[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses += [loss.detach() for loss in pair]
        results.append([*losses, *model.parameters()])
    assert_near(results[1], results[0])
    assert applied.evidence["cuda_graphs"]["replays"] == 2


@pytest.mark.parametrize("clipped", [False, True])
def test_replayed_optimizer_steps_equal_eager_ones(clipped: bool) -> None:
    """Bit by bit, with a schedule of the learning rate; a hook makes the steps eager."""
    weights, replays = [], []
    for hooked in (False, True):
        technique = CUDAGraphs()
        algorithms: list[Any] = [technique, SDPAAttention(), FusedOptimizer()]
        if clipped:
            algorithms.append(GradientClipping("norm", clipping_threshold=0.1))
        trainer = make_trainer(
            algorithms,
            model=tiny_bert(dropout=0.1),
            batches=plain_batches(9),
            schedulers=CosineAnnealingWithWarmupScheduler("2ba"),
            gpu=True,
        )
        if hooked:
            trainer.state.optimizers[0].register_step_post_hook(lambda *_: None)
        trainer.fit()
        weights.append(final_weights(trainer))
        replays.append(technique.evidence["step_replays"])
        assert all(isinstance(group["lr"], float) for group in trainer.state.optimizers[0].param_groups)
        trainer.close()
    assert replays[0] >= 4, "all but the observed batches and the first with captured gradients"
    assert replays[1] == 0
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


def test_another_thread_may_pin_memory_during_a_capture() -> None:
    """As a DataLoader's thread does. In the default mode of a capture, that thread and the capture fail."""
    technique, over, pinned, errors = CUDAGraphs(), threading.Event(), list[Any](), list[Exception]()

    def pin() -> None:
        try:
            while not over.is_set():
                pinned.append(torch.empty(8).pin_memory())  # kept, so that each call allocates
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        trained([technique, Unpadding(16)], batches=[batch(lengths, 16) for lengths in UNEVEN], gpu=True)
    finally:
        over.set()
        thread.join()
    assert not errors
    assert counted(technique) == [3, 6, 1]


def test_a_closed_trainers_graphs_are_freed() -> None:
    """Composer keeps the State, and with it the last loss, until the process ends."""

    def in_pools() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] != (0, 0))

    before = in_pools()
    trained([CUDAGraphs(), SDPAAttention()], batches=plain_batches(3), gpu=True)
    assert in_pools() - before <= 4 * 2**20  # the last loss and logits


@pytest.mark.parametrize("compiled", [False, True])
def test_micro_batches_train_the_same_with_and_without_graphs(compiled: bool) -> None:
    """Two replays per step write their gradients to the same buffers; neither may overwrite the other."""
    weights, technique = [], CUDAGraphs()
    for algorithms in ([], [technique]):
        others: list[Any] = [SDPAAttention(), *([TorchCompile()] if compiled else [])]
        weights.append(final_weights(trained([*algorithms, *others], gpu=True, **microbatches(plain_batches(4), 2))))
    assert counted(technique) == [1, 6, 2], "two replays per batch, except for the first batch, which is observed"
    assert_near(weights[1], weights[0], what="weights")


def test_a_forward_pass_that_waits_for_the_gpu_is_refused_by_name() -> None:
    with pytest.raises(Refusal, match=r"cuda_graphs: the step cannot be captured \(.*copy between CPU and CUDA"):
        trained([CUDAGraphs()], gpu=True)  # eager attention
    trainer = make_trainer([CUDAGraphs(), SDPAAttention()], gpu=True)
    bert: Any = trainer.state.model.model
    original = bert.bert.pooler.forward
    bert.bert.pooler.forward = lambda hidden: original(hidden * float(hidden.abs().max().item() > -1))
    with pytest.raises(Refusal, match=r"cuda_graphs: the step cannot be captured"):
        trainer.fit()
    trainer.close()


def test_with_warn_a_run_that_cannot_be_captured_continues_with_dropout() -> None:
    technique, model = CUDAGraphs(on_unavailable="warn"), tiny_bert(dropout=0.1)  # eager attention
    with pytest.warns(UserWarning, match="continuing although cuda_graphs: the step cannot be captured"):
        trainer = trained([technique], model=model, batches=plain_batches(4), gpu=True)
    assert technique.engaged is False
    assert all(w.isfinite().all() for w in final_weights(trainer).values())
    assert torch.rand(3, device="cuda").isfinite().all()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_a_run_of_one_batch_is_too_short() -> None:
    with pytest.raises(Refusal, match=r"no training batch replayed a graph; train longer"):
        trained([CUDAGraphs(), SDPAAttention()], batches=plain_batches(1), gpu=True)


def test_another_shape_allocates_no_further_gradients() -> None:
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)).cuda()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    calls = install(model)
    calls.pool = torch.cuda.graph_pool_handle()
    allocated = []
    for rows in (8, 8, 16, 24):
        model.zero_grad()
        model(torch.randn(rows, 2048, device="cuda")).square().mean().backward()
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert calls.graphs == 3
    assert allocated[1] - allocated[0] < weights / 10
    assert allocated[3] - allocated[1] < weights / 10


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")  # torch warns once per process
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("segments", [1, 3, 5])
def test_graphs_of_the_flash_kernel_accumulate_gradients_without_synchronizing(segments: int, shared: bool) -> None:
    """In bf16, with micro-batches of several sizes, compared with the same unpadded model without graphs."""
    eager, model = (nn.Module.cuda(bert()) for _ in range(2))
    for each in (eager, model):
        unpad(each, 16)
    calls = install(model)
    calls.cut_behind = cut_into(model, segments)
    calls.pool = torch.cuda.graph_pool_handle() if shared else None
    for turn in range(3):  # graphs are captured in the first
        for each in (eager, model):
            each.zero_grad()
            for i, lengths in enumerate(UNEVEN):
                one = batch(lengths, 16, seed=10 * turn + i)
                inputs = {k: v.cuda() for k, v in one.items()}
                with no_waiting(strict=turn > 0):
                    with torch.autocast("cuda", torch.bfloat16), with_counted_rows(each, one, inputs):
                        loss = each(**inputs).loss
                    loss.backward()
        assert_near(gradients(model), gradients(eager), torch.bfloat16, f"turn {turn}")
    assert (calls.graphs, calls.replays, calls.eager_calls, calls.backward_segments) == (3, 21, 0, segments)
    calls.release()


# Evaluation: graphs of the forward pass alone, and copies of their outputs.


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_replays_graphs_of_its_own(context: Any) -> None:
    """Outputs of three shapes are collected, between training calls and their backward passes."""
    eager, model = (nn.Module.cuda(bert()) for _ in range(2))
    for each in (eager, model):
        unpad(each, 16)
    calls = install(model)
    calls.pool = torch.cuda.graph_pool_handle()

    def call(model: Any, lengths: list[int], seed: int) -> Any:
        one = batch(lengths, 16, seed=seed)
        inputs = on_gpu(one)
        with torch.autocast("cuda", torch.bfloat16), with_counted_rows(model, one, inputs):
            return model(**inputs)

    results: list[Any] = []
    for each in (eager, model):
        optimizer, collected = torch.optim.SGD(each.parameters(), lr=0.01), []
        for turn in range(3):
            loss = call(each.train(), UNEVEN[turn], turn).loss
            each.eval()
            with context():
                collected += [call(each, lengths, 10 + i).logits for i, lengths in enumerate(UNEVEN)]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        results.append((collected, gradients(each)))
    assert (calls.graphs, calls.replays, calls.eager_calls) == (2, 3, 0)
    assert (calls.eval_graphs, calls.eval_replays, calls.eval_note) == (3, 18, "")
    assert_near(results[1][0], results[0][0], torch.bfloat16, "logits")
    assert_near(results[1][1], results[0][1], torch.bfloat16, "gradients")
    calls.release()


def trained_with_dropout(technique: CUDAGraphs, *, evaluated: bool, waiting: bool = False) -> tuple[Any, list[Any]]:
    """The weights after six batches, and the outputs of three evaluations of two shapes."""
    model, outputs = tiny_bert(dropout=0.1), Outputs()
    if waiting:  # for the GPU, in evaluation
        pooler: Any = model.bert.pooler
        original = pooler.forward
        pooler.forward = lambda h: original(h if pooler.training else h * float(h.abs().max().item() > -1))
    data = data_spec([*plain_batches(2), {name: value[:1] for name, value in plain_batches(1)[0].items()}])
    settings: dict[str, Any] = {"eval_dataloader": data, "eval_interval": "2ba"} if evaluated else {}
    algorithms = [technique, SDPAAttention()]
    trainer = trained(algorithms, model=model, batches=plain_batches(6), gpu=True, callbacks=[outputs], **settings)
    assert counted(technique) == [1, 5, 1]
    return final_weights(trainer), outputs.logits


@pytest.mark.parametrize("waiting", [False, True])
def test_evaluation_leaves_training_as_it_is_captured_or_not(waiting: bool) -> None:
    expected, _ = trained_with_dropout(CUDAGraphs(), evaluated=False)
    technique = CUDAGraphs()
    weights, outputs = trained_with_dropout(technique, evaluated=True, waiting=waiting)
    if waiting:
        assert technique.evidence["eval_note"].startswith("evaluation cannot be captured (")
        assert "eval_graphs" not in technique.evidence
    else:
        assert technique.evidence["eval_graphs"] == 2
        assert technique.evidence["eval_replays"] >= 4
    assert len(outputs) >= 9
    assert all(logits.isfinite().all() for logits in outputs)
    assert_near(weights, expected, what="weights")
