"""Training experts: the load-balancing loss, diverging experts, sabotage, and other techniques."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from composer.core import Algorithm, Event, State
from composer.loggers import InMemoryLogger, Logger
from composer.models import HuggingFaceModel
from torch import Tensor

from composer_speedups import (
    Float8Linear,
    MixedPrecision,
    SparseUpcycling,
    TorchCompile,
    apply_sparse_upcycling,
    load_balancing_loss,
)
from composer_speedups.algorithms.float8_linear.modules import RowPaddedFloat8Linear
from composer_speedups.algorithms.sparse_upcycling.loss import add_to_loss, sparse_layers
from composer_speedups.core.errors import NotEngagedError
from tests.algorithms.test_sparse_upcycling import upcycled
from tests.helpers.common import (
    Recorder,
    awkward_batches,
    batch,
    learnable_batches,
    make_trainer,
    plain_batches,
    tiny_bert,
    trained,
)
from tests.helpers.exhaustive import SCOPES
from tests.helpers.models import tiny_model
from tests.reference.tolerance import assert_near


def train(technique: SparseUpcycling, *others: Any, **kwargs: Any) -> Any:
    return trained([technique, *others], **kwargs)


@pytest.mark.parametrize("rows", [100, 2], ids=["whole batch", "microbatches"])
def test_the_loss_of_a_batch_includes_the_load_balancing_loss(rows: int) -> None:
    recorder = Recorder()
    logger = InMemoryLogger()
    model, batches = tiny_bert(), plain_batches(1)
    trainer = make_trainer(
        [SparseUpcycling(every=1, load_balancing=0.5)],
        model=copy.deepcopy(model),
        batches=batches,
        callbacks=[recorder],
        loggers=[logger],
    )
    if rows < 100:
        trainer._train_data_spec.split_batch = lambda b, n: [
            {k: v[i : i + n] for k, v in b.items()} for i in range(0, len(b["labels"]), n)
        ]
        trainer.state.device_train_microbatch_size = rows
    sparse = copy.deepcopy(trainer.state.model.model).train()
    trainer.fit()
    trainer.close()
    expected, balances = 0.0, []
    for start in range(0, 4, rows):
        micro = {k: v[start : start + rows] for k, v in batches[0].items()}
        task = sparse(**micro).loss
        balances.append(load_balancing_loss(sparse))
        loss = (task + 0.5 * balances[-1]) * len(micro["labels"]) / 4
        loss.backward()
        expected += float(loss.detach())
    assert recorder.losses == pytest.approx([expected], rel=1e-5)
    gradients = {n: p.grad for n, p in sparse.named_parameters()}
    assert_near(recorder.first_gradients, gradients, what="gradients")
    router = next(g for n, g in gradients.items() if "router" in n)
    assert router.abs().max() > 1e-4, "at first, routers get gradients from the load-balancing loss only"
    ((_, logged),) = logger.data["sparse_upcycling/load_balancing_loss"]
    assert logged == pytest.approx(float(torch.stack(balances).mean().detach()) / 2, rel=1e-5)


def test_it_is_added_to_losses_of_any_form() -> None:
    one, extra = torch.tensor(1.0), torch.tensor(0.25)
    assert float(add_to_loss(one, extra)) == 1.25
    assert [float(x) for x in add_to_loss((one, one), extra)] == [1, 1, 0.25]
    assert add_to_loss({"a": one}, extra) == {"a": one, "load_balancing": extra}
    assert float(add_to_loss({"a": one, "total": one}, extra)["total"]) == 1.25


def test_experts_diverge_and_all_get_tokens() -> None:
    technique = SparseUpcycling(every=1)
    trainer = train(technique, batches=learnable_batches(12))
    for layer in sparse_layers(trainer.state.model):
        first, *others = [e.up.weight.detach() for e in layer.experts]
        assert all((first - other).abs().max() > 1e-4 for other in others)
    assert all(n > 0 for n in technique.evidence["rows_per_expert"]), "every expert got tokens"
    assert sum(technique.evidence["rows_per_expert"]) == 2 * 2 * 16 * 16  # layers · top_k · rows · tokens
    assert "share_in_last_batch" in technique.evidence
    assert technique.evidence["parameters_added"] == sum(
        3 * sum(p.numel() for p in layer.experts[0].parameters()) + layer.router.weight.numel()
        for layer in sparse_layers(trainer.state.model)
    )


def test_a_coefficient_of_zero_keeps_the_task_loss() -> None:
    recorder = Recorder()
    train(SparseUpcycling(load_balancing=0.0), batches=plain_batches(1), callbacks=[recorder])
    (task,) = [tiny_bert()(**b).loss.item() for b in plain_batches(1)]
    assert recorder.losses == pytest.approx([task], rel=1e-5)


def test_experts_that_do_not_run_are_detected() -> None:
    technique = SparseUpcycling()
    trainer = make_trainer([technique])
    (layer,) = sparse_layers(trainer.state.model)
    layer._dispatch = lambda x, chosen: layer.experts[0](x)[:, None].expand(*chosen.shape, -1)  # type: ignore
    with pytest.raises(NotEngagedError, match=r"only 1 experts of .*layer\.1 ran in the first batch"):
        trainer.fit()
    trainer.close()


def test_bypassed_routers_are_detected() -> None:
    technique = SparseUpcycling()
    trainer = make_trainer([technique])
    (layer,) = sparse_layers(trainer.state.model)
    layer.forward = lambda hidden: layer.experts[0](hidden)  # type: ignore[method-assign]
    with pytest.raises(NotEngagedError, match="routers recorded nothing"):
        trainer.fit()
    trainer.close()


class DropsTheLoss(Algorithm):
    """Replace the sum of losses by the task's loss."""

    def match(self, event: Event, state: State) -> bool:
        return event == Event.BEFORE_BACKWARD

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        outputs: Any = state.outputs
        state.loss = outputs["loss"]


def test_a_lost_load_balancing_loss_is_detected() -> None:
    with pytest.raises(NotEngagedError, match="was not part of the backward pass"):
        trained([SparseUpcycling(), DropsTheLoss()])
    train(SparseUpcycling(load_balancing=0.0), DropsTheLoss())


def test_experts_outside_the_optimizer_are_detected() -> None:
    technique = SparseUpcycling()
    trainer = make_trainer([technique])
    group = trainer.state.optimizers[0].param_groups[0]
    router = sparse_layers(trainer.state.model)[0].router.weight
    group["params"] = [p for p in group["params"] if p is not router]
    with pytest.raises(NotEngagedError, match="optimizer does not train the experts"):
        trainer.fit()
    trainer.close()


@pytest.mark.parametrize("scope", SCOPES)
def test_it_works_with_torch_compile(scope: Any) -> None:
    _check_compiled(scope, "aot_eager", gpu=False)


@pytest.mark.gpu
@pytest.mark.parametrize("scope", SCOPES)
def test_it_works_with_inductor_on_a_gpu(scope: Any) -> None:
    _check_compiled(scope, "inductor", gpu=True)


def _check_compiled(scope: Any, backend: str, *, gpu: bool) -> None:
    losses = []
    for others in ([], [TorchCompile(scope=scope, backend=backend)]):
        recorder, technique = Recorder(), SparseUpcycling(every=1)
        model, batches = tiny_model("bert", layers=1), plain_batches(2)
        train(technique, *others, model=model, batches=batches, callbacks=[recorder], gpu=gpu)
        losses.append(recorder.losses)
        assert technique.engaged
    assert_near(losses[1], losses[0], what="losses")


def test_gradient_checkpointing_does_not_change_loss_and_gradients() -> None:
    results = []
    for checkpointing in (False, True):
        model = upcycled().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        losses = []
        for tokens in (batch([5, 9]), batch([3, 7, 2])):  # two forward passes before one backward pass
            losses.append(model(**tokens).loss + load_balancing_loss(model))
        sum(losses).backward()
        results.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        assert load_balancing_loss(model).requires_grad
    assert_near(results[1], results[0], what="gradients")


def test_reentrant_checkpointing_is_refused_in_the_first_batch() -> None:
    model = tiny_bert()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(NotEngagedError, match="without use_reentrant"):
        trained([SparseUpcycling()], model=model)


def test_under_autocast_the_router_computes_in_float32() -> None:
    model = upcycled().eval()
    dense = tiny_bert().eval()
    (layer, *_) = sparse_layers(model)
    seen: list[Tensor] = []
    layer.experts[0].register_forward_hook(lambda _m, _i, output: seen.append(output))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        sparse, plain = (m(**batch([5, 9])).logits for m in (model, dense))
        assert layer(torch.randn(1, 3, 32)).dtype == torch.bfloat16
    assert seen[0].dtype == torch.bfloat16
    assert_near([sparse], [plain], torch.bfloat16, "logits")


@pytest.mark.gpu
def test_losses_on_a_gpu_match_the_cpu() -> None:
    losses = []
    for gpu in (False, True):
        recorder = Recorder()
        train(SparseUpcycling(every=1), batches=awkward_batches(), callbacks=[recorder], gpu=gpu)
        losses.append(recorder.losses)
    assert_near(losses[1], losses[0], what="losses")


def test_a_composer_model_is_accepted() -> None:
    model = HuggingFaceModel(tiny_bert(), use_logits=True)
    assert apply_sparse_upcycling(model) == ["model.bert.encoder.layer.1"]


def test_float8_linear_converts_experts() -> None:
    float8, sparse = Float8Linear(emulate=True), SparseUpcycling(every=1)
    trainer = trained([sparse, float8, MixedPrecision("bf16", allow_cpu=True)], batches=awkward_batches())
    assert float8.engaged
    assert sparse.engaged
    experts = [m for n, m in trainer.state.model.named_modules() if n.endswith((".up", ".down"))]
    assert len(experts) == 16
    assert all(isinstance(m, RowPaddedFloat8Linear) for m in experts)
