"""What a swap keeps and refuses: settings, closures, hooks, schedulers, states; and the flags of torch's optimizers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from composer.optim import DecoupledAdamW
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, OneCycleLR, StepLR

from composer_speedups.algorithms.optimizers.swap import (
    UnfitOptimizerError,
    attach_schedulers,
    check_label,
    label_of,
    replaced,
    set_implementation,
)
from tests.algorithms.optimizers.cases import observed
from tests.helpers.ranks import on_ranks

pytestmark = pytest.mark.pins


class OtherAdamW(AdamW):
    """AdamW with another class name."""


class NoGradAdamW(AdamW):
    """Runs its closure without gradients, as the optimizers of some libraries do."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            loss = None if closure is None else closure()
        super().step()
        return loss


class NoOpAdamW(AdamW):
    """Its steps do not change any parameter."""

    def step(self, closure: Any = None) -> Any:
        return None if closure is None else closure()


def swapped(old: Optimizer, label: str = "other", cls: Any = OtherAdamW) -> Optimizer:
    return replaced(old, label, lambda groups, defaults, _: cls(groups, **defaults, foreach=False), nn.Module())


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def closure(model: nn.Module, optimizer: Optimizer) -> Any:
    def compute() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.arange(8.0).reshape(2, 4)).square().sum()
        loss.backward()
        return loss

    return compute


def stepped(optimizer: Optimizer) -> Optimizer:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def with_beta_tensors(optimizer: Optimizer) -> Optimizer:
    for group in optimizer.param_groups:  # torch's constructor accepts them from 2.8 on
        group["betas"] = (torch.tensor(0.9), torch.tensor(0.99))
    return optimizer


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: SGD(p, lr=1.0), r"torch\.optim\.sgd\.SGD is not AdamW.*; use torch\.optim\.AdamW"),
        (OtherAdamW, "OtherAdamW is not AdamW"),
        (lambda p: swapped(AdamW(p), "third"), "is already third, and other was requested; pass a new"),
        (lambda p: Adam(p, weight_decay=0.1), "mixes weight decay into the gradient"),
        (lambda p: AdamW(p, amsgrad=True), "amsgrad=True, which would be lost; set amsgrad=False"),
        (lambda p: AdamW(p, maximize=True), "maximize=True"),
        (lambda p: AdamW(p, differentiable=True, foreach=False), "differentiable=True"),
        (lambda p: AdamW(p, lr=torch.tensor(1e-3), foreach=False), "rate or betas in tensors; give them as floats"),
        (lambda p: with_beta_tensors(AdamW(p, foreach=False)), "rate or betas in tensors; give them as floats"),
        (lambda p: stepped(AdamW(p)), "has stepped, and its state would be lost; replace it before training"),
        (lambda p: DecoupledAdamW(p, lr=0.0), "DecoupledAdamW with a learning rate of 0"),
        (lambda p: AdamW([nn.Parameter(torch.zeros(2, dtype=torch.complex64))]), "complex64 parameters"),
    ],
)
def test_optimizers_whose_settings_or_state_would_be_lost_are_refused(build: Any, message: str) -> None:
    optimizer = build(list(linear().parameters()))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(UnfitOptimizerError, match=message) as error:
        swapped(optimizer)
    assert "\n" not in str(error.value)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]


@pytest.mark.parametrize("cls", [Adam, DecoupledAdamW])
def test_optimizers_equivalent_to_adamw_keep_their_trajectory(cls: Any) -> None:
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.0 if cls is Adam else 0.02}
    trained = []
    for swap in (False, True):
        model = linear()
        optimizer = cls([model.weight], **settings)
        optimizer = swapped(optimizer) if swap else optimizer
        optimizer.add_param_group({"params": [model.bias]})
        optimizer.param_groups[1].setdefault("initial_lr", 1e-2)  # DecoupledAdamW's new groups lack it
        for rate in (1e-2, 5e-3, 1e-3):  # DecoupledAdamW scales its decay by lr / initial_lr
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step(closure(model, optimizer))
        trained.append(model.state_dict())
    torch.testing.assert_close(trained[1], trained[0])


@pytest.mark.parametrize("positional", [True, False])
def test_closures_run_with_gradients_enabled(positional: bool) -> None:
    model = linear()
    new = swapped(AdamW(model.parameters(), weight_decay=0.0), cls=NoGradAdamW)
    before = model.weight.detach().clone()
    compute = closure(model, new)
    loss = new.step(compute) if positional else new.step(closure=compute)
    assert loss.requires_grad
    assert (model.weight != before).all()


def test_hooks_move_to_the_new_optimizer() -> None:
    model, called = linear(), []
    old = AdamW(model.parameters(), lr=1e-3)
    handles = [
        old.register_step_pre_hook(lambda *_: called.append("pre")),
        old.register_step_post_hook(lambda *_: called.append("post")),
        old.register_state_dict_pre_hook(lambda *_: called.append("state dict")),
    ]
    new = swapped(old)
    for _ in range(2):  # the second time without the hooks
        new.step(closure(model, new))
        new.state_dict()
        assert called == ["pre", "post", "state dict"]
        for handle in handles:
            handle.remove()


def test_load_state_dict_refuses_the_state_of_another_optimizer() -> None:
    old = AdamW((model := linear()).parameters())
    foreign = copy.deepcopy(old.state_dict())
    new = swapped(old)
    new.step(closure(model, new))
    with pytest.raises(ValueError, match=r"belongs to another optimizer, and this optimizer is other; load a"):
        new.load_state_dict(foreign)
    third = swapped(AdamW(model.parameters()), "third").state_dict()
    with pytest.raises(ValueError, match="belongs to third, and this optimizer is other"):
        new.load_state_dict(third)
    new.load_state_dict(copy.deepcopy(new.state_dict()))
    new.param_groups[0]["swapped_to"] = "third"  # as a load_state_dict that runs no hooks does
    with pytest.raises(ValueError, match="belongs to third"):
        check_label(new, "other")


def test_a_state_that_is_adamws_has_no_label_and_is_loaded_without_one() -> None:
    def build(groups: Any, defaults: Any, model: Any) -> Optimizer:
        return OtherAdamW(groups, **defaults)

    new = replaced(AdamW((model := linear()).parameters()), "other", build, model, stock_state=True)
    new.step(closure(model, new))
    state = copy.deepcopy(new.state_dict())
    assert all("swapped_to" not in group for group in state["param_groups"])
    new.load_state_dict(state)
    assert label_of(new) == "other"
    state["param_groups"][0]["swapped_to"] = "Adafactor"
    with pytest.raises(ValueError, match="belongs to Adafactor, and this optimizer is other"):
        new.load_state_dict(state)


def test_torch_schedulers_and_their_inner_schedulers_move() -> None:
    old = AdamW((model := linear()).parameters(), lr=1.0)
    inner = [ConstantLR(old, 0.5, 1), StepLR(old, 1, 0.1)]
    chained, foreign = ChainedScheduler(inner), StepLR(AdamW(linear().parameters()), 1)
    new = swapped(old)
    for _ in range(2):  # a second call changes nothing
        attach_schedulers([chained, foreign], old, new)
        assert all(scheduler.optimizer is new for scheduler in (chained, *inner))
        assert foreign.optimizer is not new
        assert new.param_groups[0]["lr"] == 0.5, "attaching must not change the learning rate"
    new.step(closure(model, new))
    chained.step()  # torch warns, which fails this test, if it has not seen the optimizer step
    assert new.param_groups[0]["lr"] == pytest.approx(0.1)
    assert old.param_groups[0]["lr"] == 0.5


def test_a_scheduler_that_cycles_betas_is_refused_for_an_optimizer_without_betas() -> None:
    old = AdamW(linear().parameters())
    scheduler = OneCycleLR(old, 1e-3, total_steps=4)
    new = swapped(old)
    del new.param_groups[0]["betas"]  # as in optimi's and transformers' optimizers
    with pytest.raises(ValueError, match=r"OneCycleLR cycles betas.*set cycle_momentum=False"):
        attach_schedulers([scheduler], old, new)


def swap_a_shard() -> str:
    tensor = distribute_tensor(torch.ones(4), DeviceMesh("cpu", [0, 1]), [Replicate()])
    with pytest.raises(UnfitOptimizerError) as error:
        swapped(AdamW([nn.Parameter(tensor)], fused=False))
    return str(error.value)


@pytest.mark.exhaustive
def test_sharded_parameters_are_refused() -> None:
    assert all(said.endswith("sharded across ranks; train without FSDP") for said in on_ranks(swap_a_shard))


def test_the_parameters_that_moved_are_counted_and_steps_without_gradients_ignored() -> None:
    for cls, expected in ((OtherAdamW, 2), (NoOpAdamW, 0)):
        model = linear()
        new = swapped(AdamW(model.parameters(), lr=0.0), cls=cls)
        seen, taken = observed(model, new, new.step)
        assert (taken, seen.moved) == (False, None), "a skipped batch leaves no gradients"
        seen, taken = observed(model, new, lambda: new.step(closure(model, new)))  # noqa: B023
        assert (taken, seen.steps, seen.moved) == (True, 1, None), "unknown at a learning rate of 0"
        new.param_groups[0]["lr"] = 1e-3
        seen, taken = observed(model, new, lambda: new.step(closure(model, new)))  # noqa: B023
        assert (taken, seen.moved, seen.trained) == (True, expected, 2)


# The flags of torch's optimizers

FLAGS = pytest.mark.parametrize("flag", ["foreach", "fused"])


@FLAGS
def test_the_flags_operators_run(flag: str) -> None:
    optimizer = set_implementation(AdamW((model := linear()).parameters(), foreach=False), flag)
    seen, _ = observed(model, optimizer, lambda: optimizer.step(closure(model, optimizer)))
    assert any(name.startswith(f"_{flag}_") for name in seen.operators)


@FLAGS
def test_a_flag_can_be_set_after_steps_of_another_implementation(flag: str) -> None:
    models, other = [linear(), linear()], "foreach" if flag == "fused" else "fused"
    optimizers = [set_implementation(AdamW(model.parameters(), foreach=False), other) for model in models]
    for optimizer in optimizers:
        stepped(optimizer)
    state = copy.deepcopy(optimizers[1].state_dict())
    set_implementation(optimizers[1], flag)
    optimizers[1].load_state_dict(state)
    assert not optimizers[1].param_groups[0][flag], "loading resets the flags"
    set_implementation(optimizers[1], flag)
    for optimizer in optimizers:
        stepped(optimizer)
    torch.testing.assert_close([*models[1].parameters()], [*models[0].parameters()])
    assert {group[flag] for group in optimizers[1].param_groups} == {True}


def test_what_torch_refuses_with_the_flag_is_refused() -> None:
    def adamw(parameter: Any = None, **settings: Any) -> AdamW:
        return AdamW([nn.Parameter(torch.ones(4) if parameter is None else parameter)], **settings)

    later = adamw()
    later.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": torch.tensor(1e-4)})
    complex64 = torch.zeros(2, dtype=torch.complex64)
    for optimizer, flag, said in (
        (adamw(lr=torch.tensor(1e-3)), "foreach", r"AdamW refuses foreach=True \(lr as a Tensor is not supported"),
        (later, "foreach", "lr as a Tensor is not supported"),  # torch checks only the defaults of all groups
        (adamw(differentiable=True), "foreach", "does not support foreach with differentiable=True; set it to False"),
        (adamw(differentiable=True), "fused", "does not support fused with differentiable=True; set it to False"),
        (adamw(complex64, foreach=False), "fused", "train floating-point parameters"),
        (DecoupledAdamW(linear().parameters(), lr=1e-3), "fused", r"DecoupledAdamW has no fused .*; use torch\.optim"),
        (torch.optim.LBFGS(linear().parameters()), "foreach", "LBFGS has no foreach implementation"),
    ):
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(UnfitOptimizerError, match=said):
            set_implementation(optimizer, flag)
        assert optimizer.state_dict() == before, "a refusal changes nothing"
    set_implementation(adamw(lr=torch.tensor(1e-3), capturable=True), "foreach")
    set_implementation(adamw(lr=torch.tensor(1e-3)), "fused")
    set_implementation(SGD([{"params": []}, {"params": linear().parameters()}], lr=1.0), "foreach")
