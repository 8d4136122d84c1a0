"""swap_optimizer and replace_parameters: settings, groups, state and schedulers that are kept, and refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from composer.optim import DecoupledAdamW
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, OneCycleLR, StepLR

from composer_speedups import AdafactorOptimizer, apply_adafactor
from composer_speedups.core.errors import NotEngagedError, TechniqueError
from composer_speedups.core.optimizer_evidence import StepWatch, state_bytes, state_dtypes
from composer_speedups.surgery.optimizer_swap import (
    UnfitOptimizerError,
    attach_schedulers,
    check_label,
    label_of,
    swap_optimizer,
)
from composer_speedups.surgery.parameter_groups import replace_parameters
from tests.helpers.common import make_trainer, trained

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
    return swap_optimizer(old, label, lambda groups: cls(groups, foreach=False))


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


def test_parameter_groups_keep_settings_parameters_and_custom_keys() -> None:
    model = linear()
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    groups: list[Any] = [
        {"params": [model.weight, frozen], "lr": 1e-2, "betas": (0.8, 0.9), "name": "matrices"},
        {"params": [model.bias], "weight_decay": 0.0, "eps": 1e-4},
        {"params": []},
    ]
    old = AdamW(groups, lr=1e-3, weight_decay=0.5, foreach=True, capturable=False)
    StepLR(old, 1)  # sets initial_lr
    new = swapped(old)
    assert type(new) is OtherAdamW
    for key in ("lr", "initial_lr", "betas", "eps", "weight_decay"):
        assert [g[key] for g in new.param_groups] == [g[key] for g in old.param_groups], key
    assert [len(g["params"]) for g in new.param_groups] == [2, 1, 0]
    assert new.param_groups[0]["params"][0] is model.weight
    assert new.param_groups[0]["name"] == "matrices"
    assert new.param_groups[0]["foreach"] is False, "the new optimizer chooses the implementation"
    before = copy.deepcopy(model.state_dict())
    new.step(closure(model, new))
    assert all((model.state_dict()[n] != w).any() for n, w in before.items())
    assert frozen.eq(0).all()


def test_a_second_swap_is_a_no_op_and_a_swap_to_a_third_optimizer_is_refused() -> None:
    new = swapped(AdamW(linear().parameters()))
    assert swapped(new) is new
    assert label_of(new) == "other"
    with pytest.raises(UnfitOptimizerError, match=r"is already other, and third was requested; pass a new"):
        swapped(new, "third")


def _stepped(optimizer: Optimizer) -> Optimizer:
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
        (lambda p: torch.optim.SGD(p, lr=1.0), r"torch\.optim\.sgd\.SGD is not AdamW.*; use torch\.optim\.AdamW"),
        (OtherAdamW, "OtherAdamW is not AdamW"),
        (lambda p: Adam(p, weight_decay=0.1), "mixes weight decay into the gradient"),
        (lambda p: AdamW(p, amsgrad=True), "amsgrad=True, which would be lost; set amsgrad=False"),
        (lambda p: AdamW(p, maximize=True), "maximize=True"),
        (lambda p: AdamW(p, differentiable=True, foreach=False), "differentiable=True"),
        (lambda p: AdamW(p, lr=torch.tensor(1e-3), foreach=False), "learning rate in a tensor; give it as a float"),
        (lambda p: with_beta_tensors(AdamW(p, foreach=False)), "betas in tensors; give them as floats"),
        (lambda p: _stepped(AdamW(p)), "has already stepped, and its state would be lost; replace it before training"),
        (lambda p: DecoupledAdamW(p, lr=0.0), "DecoupledAdamW with a learning rate of 0"),
        (lambda p: AdamW([nn.Parameter(torch.zeros(2, dtype=torch.complex64))]), "complex64 parameters"),
    ],
)
def test_optimizers_whose_settings_or_state_would_be_lost_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        swapped(build(list(linear().parameters())))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("cls", [Adam, DecoupledAdamW])
def test_optimizers_equivalent_to_adamw_keep_their_trajectory(cls: Any) -> None:
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.0 if cls is Adam else 0.02}
    trained = []
    for swap in (False, True):
        model = linear()
        optimizer = cls(model.parameters(), **settings)
        optimizer = swapped(optimizer) if swap else optimizer
        for rate in (1e-2, 5e-3, 1e-3):  # DecoupledAdamW scales its decay by lr / initial_lr
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step(closure(model, optimizer))
        trained.append(model.state_dict())
    torch.testing.assert_close(trained[1], trained[0])
    without_decay = cls(linear().parameters(), **{**settings, "weight_decay": 0.0})
    assert without_decay.param_groups[0]["weight_decay"] == 0


@pytest.mark.parametrize("positional", [True, False])
def test_closures_run_with_gradients_enabled(positional: bool) -> None:
    model = linear()
    new = swapped(AdamW(model.parameters(), weight_decay=0.0), cls=NoGradAdamW)
    before = model.weight.detach().clone()
    compute = closure(model, new)
    loss = new.step(compute) if positional else new.step(closure=compute)
    assert loss.requires_grad
    assert (model.weight != before).all()


@pytest.mark.parametrize("cls", [AdamW, DecoupledAdamW])
def test_a_group_that_is_added_later_has_the_old_optimizers_defaults(cls: Any) -> None:
    models = [linear(), linear()]
    olds = [cls([model.weight], lr=1e-2, betas=(0.8, 0.9), eps=1e-3, weight_decay=1e-3) for model in models]
    optimizers = [olds[0], swapped(olds[1])]
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.add_param_group({"params": [model.bias]})
        if cls is DecoupledAdamW:  # its own groups lack this one
            optimizer.param_groups[-1].setdefault("initial_lr", 1e-2)
        for _ in range(3):
            optimizer.step(closure(model, optimizer))
    torch.testing.assert_close([*models[1].parameters()], [*models[0].parameters()])
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))


def test_adafactors_later_groups_have_a_learning_rate() -> None:
    model = linear()
    optimizer = apply_adafactor(AdamW([model.weight], lr=1e-2))
    optimizer.add_param_group({"params": [model.bias]})
    before = model.bias.detach().clone()
    optimizer.step(closure(model, optimizer))
    assert not torch.equal(model.bias, before)


def test_hooks_move_to_the_new_optimizer() -> None:
    model, called = linear(), []
    old = AdamW(model.parameters(), lr=1e-3)
    handles = [
        old.register_step_pre_hook(lambda *_: called.append("pre")),
        old.register_step_post_hook(lambda *_: called.append("post")),
        old.register_state_dict_pre_hook(lambda *_: called.append("state dict")),
    ]
    new = swapped(old)
    new.step(closure(model, new))
    new.state_dict()
    assert called == ["pre", "post", "state dict"]
    for handle in handles:
        handle.remove()
    new.step(closure(model, new))
    new.state_dict()
    assert len(called) == 3


def test_load_state_dict_refuses_the_state_of_another_optimizer() -> None:
    old = AdamW((model := linear()).parameters())
    foreign = copy.deepcopy(old.state_dict())
    new = swapped(old)
    new.step(closure(model, new))
    own = copy.deepcopy(new.state_dict())
    with pytest.raises(ValueError, match=r"belongs to another optimizer, and this optimizer is other; load a"):
        new.load_state_dict(foreign)
    third = swapped(AdamW(model.parameters()), "third").state_dict()
    with pytest.raises(ValueError, match="belongs to third, and this optimizer is other"):
        new.load_state_dict(third)
    new.load_state_dict(own)
    check_label(new, "other")
    new.param_groups[0]["swapped_to"] = "third"  # as load_state_dict without its hooks does
    with pytest.raises(ValueError, match="belongs to third"):
        check_label(new, "other")


def test_attach_schedulers_moves_torch_schedulers_and_their_inner_schedulers() -> None:
    old = AdamW((model := linear()).parameters(), lr=1.0)
    inner = [ConstantLR(old, 0.5, 1), StepLR(old, 1, 0.1)]
    chained = ChainedScheduler(inner)
    foreign = StepLR(AdamW(linear().parameters()), 1)
    new = swapped(old)
    assert new.param_groups[0]["lr"] == 0.5
    assert attach_schedulers([chained, foreign], old, new) == ["ChainedScheduler", "ConstantLR", "StepLR"]
    assert attach_schedulers([chained], old, new) == []
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


def test_step_watch_counts_the_parameters_that_moved() -> None:
    for cls, expected in ((OtherAdamW, 2), (NoOpAdamW, 0)):
        model = linear()
        new = swapped(AdamW(model.parameters(), lr=0.0), cls=cls)
        watch = StepWatch(new)
        new.step(closure(model, new))
        assert (watch.steps, watch.moved) == (1, None), "unknown at a learning rate of 0"
        new.param_groups[0]["lr"] = 1e-3
        new.step(closure(model, new))
        assert (watch.steps, watch.moved, watch.watched) == (2, expected, 2)
        watch.remove()
        new.step(closure(model, new))
        assert watch.steps == 2


def test_state_bytes_and_state_dtypes() -> None:
    model = linear()
    new = swapped(AdamW(model.parameters()))
    new.step(closure(model, new))
    assert state_bytes(new) == 15 * 8 + 2 * 4  # two moments per element, one step count per parameter
    assert state_dtypes(new) == {"exp_avg": ["float32"], "exp_avg_sq": ["float32"]}


class NoOpTechnique(AdafactorOptimizer):
    """Swaps in NoOpAdamW."""

    def swap(self, state: Any) -> Optimizer:
        return swapped(state.optimizers[0], cls=NoOpAdamW)


def test_an_optimizer_that_moves_no_parameter_stops_the_run() -> None:
    with pytest.raises(NotEngagedError, match="a step of other moved no parameter"):
        trained([NoOpTechnique()])


def test_several_optimizers_are_refused() -> None:
    trainer = make_trainer()
    trainer.state.optimizers = [AdamW(linear().parameters()), AdamW(linear().parameters())]
    with pytest.raises(TechniqueError, match="there are 2 optimizers; give the Trainer one"):
        AdafactorOptimizer().engage(trainer.state)
    trainer.close()


def parameters(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((2,), float(i))) for i in range(count)]


@pytest.mark.parametrize("untrained", ["no group", "first group"])
def test_new_parameters_replace_old_ones(untrained: Any) -> None:
    kept, copied, split, removed, outside, *new = parameters(9)
    groups: list[dict[str, Any]] = [
        {"params": [("kept", kept), ("copied", copied)], "lr": 1.0},
        {"params": [("split", split), ("removed", removed)], "lr": 2.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    for p in (kept, copied, split, removed):
        p.grad = torch.ones(2)
    optimizer.step()
    moments = {p: optimizer.state[p] for p in (kept, copied)}
    old_groups = list(optimizer.param_groups)
    replacements = {copied: [new[0]], split: new[1:3], removed: [], outside: [new[3]]}
    names = {p: f"new{i}" for i, p in enumerate(new)}
    for _ in range(2):  # the second call changes nothing
        replace_parameters([optimizer], replacements, names, for_untrained=untrained)
        assert all(a is b for a, b in zip(optimizer.param_groups, old_groups, strict=True))
        more = [new[3]] if untrained == "first group" else []
        held = [[id(p) for p in group["params"]] for group in old_groups]
        assert held == [[id(p) for p in [kept, new[0], *more]], [id(p) for p in new[1:3]]]
        assert old_groups[0]["param_names"] == ["kept", "new0", *(["new3"] if more else [])]
        assert old_groups[1]["param_names"] == ["new1", "new2"]
        assert dict(optimizer.state) == {kept: moments[kept], new[0]: moments[copied]}
    replace_parameters(None, replacements, names)
