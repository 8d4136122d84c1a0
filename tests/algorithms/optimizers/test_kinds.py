"""Every kind equals its reference step by step, with groups, schedules, loaded states and missing gradients; and what a
replacement keeps and refuses."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from composer.optim import DecoupledAdamW
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from composer_speedups.algorithms.optimizers.swap import attach_schedulers, replaced, set_implementation
from composer_speedups.core.errors import Refusal
from composer_speedups.core.requirements import needs_apex
from tests.algorithms.optimizers.cases import CASES, OptimizerCase, engaged, network, observed, technique, use_stand_in
from tests.helpers.common import tiny_bert

pytestmark = pytest.mark.pins

RATES = [1.0, 0.5, 0.25, 0.1, 0.05]


def params(*devices: str) -> Any:
    """Cases × devices; skipped without the package, on a GPU marked so."""
    return [
        pytest.param(
            case,
            device,
            id=f"{case.id}-{device}",
            marks=[
                *([pytest.mark.gpu] if device == "cuda" else []),
                pytest.mark.skipif(
                    case.package is not None and importlib.util.find_spec(case.package) is None,
                    reason=f"needs the package {case.package}, and it is not installed",
                ),
            ],
        )
        for case in CASES
        for device in devices
        if device in case.devices
    ]


@pytest.fixture(autouse=True)
def _prepared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "apex" in request.node.name and [*needs_apex("", "apex.optimizers")]:
        use_stand_in(monkeypatch)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Three groups, one of them empty, whose settings all differ."""
    settings = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.1}
    parameters = list(model.parameters())
    return [
        {**settings, "params": parameters[::2], "name": "mine"},
        {**settings, "params": []},
        {**settings, "params": parameters[1::2], "lr": 1e-3, "weight_decay": 0.0},
    ]


def step(model: nn.Module, optimizer: Optimizer, number: int, *, every: bool = False) -> None:
    """Step with random gradients; unless ``every`` has one, the last parameter has none in the first step."""
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
    if number == 0 and not every:
        parameter.grad = None
    with torch.compiler.set_stance("default" if parameter.is_cuda else "force_eager"):  # of torchao's own step
        optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


class Swapped:
    """A model whose AdamW was swapped, with a scheduler that was built before."""

    def __init__(self, case: OptimizerCase, device: str) -> None:
        self.model, self.technique, self.every = network(device, case.hidden), case.build(), case.counts_by_group
        old = AdamW(groups_of(self.model), foreach=False)
        self.scheduler = LambdaLR(old, lambda k: RATES[k])
        self.run, self.optimizer = engaged(self.technique, old, self.model)
        attach_schedulers([self.scheduler], old, self.optimizer)

    def step(self, number: int) -> None:
        step(self.model, self.optimizer, number, every=self.every)
        self.scheduler.step()


@pytest.mark.parametrize(("case", "device"), params("cpu", "cuda"))
def test_each_step_equals_the_references(case: OptimizerCase, device: str) -> None:
    ours, model = Swapped(case, device), network(device, case.hidden)
    optimizer = case.reference(groups_of(model))
    exact = {"rtol": 0, "atol": 0} if case.exact else {"rtol": 1e-5, "atol": 1e-6}

    def both(number: int) -> None:
        rates = [float(group["lr"]) for group in ours.optimizer.param_groups]
        assert rates == pytest.approx([RATES[number] * rate for rate in (1e-2, 1e-2, 1e-3)])
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = torch.tensor(rate) if isinstance(group["lr"], Tensor) else rate  # torchao's is a tensor
        step(model, optimizer, number, every=case.counts_by_group)
        ours.step(number)
        torch.testing.assert_close(values(ours.model), values(model), **exact)

    both(0)
    seen = observed(ours.run, lambda: both(1))
    both(2)
    both(3)
    assert [g["initial_lr"] for g in ours.optimizer.param_groups] == pytest.approx([1e-2, 1e-2, 1e-3])
    assert ours.optimizer.param_groups[0]["name"] == "mine"
    evidence = ours.technique.proof(ours.run, seen)
    assert evidence["parameters_moved"] in ("5 of 5", "6 of 6")
    assert evidence["state_bytes"] > 0


# What only one kind does


def test_kahan_keeps_parameters_ties_and_buffers() -> None:
    pytest.importorskip("optimi")
    model: Any = tiny_bert()
    model.register_buffer("scale", torch.ones(3))
    model.extra = nn.Linear(32, 64, bias=False)
    model.extra.weight = model.bert.embeddings.word_embeddings.weight
    model.bert.pooler.requires_grad_(False)
    before = dict(model.named_parameters())
    engaged(technique("kahan_optimizer"), AdamW([p for p in model.parameters() if p.requires_grad]), model)
    assert all(p is before[n] for n, p in model.named_parameters())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}, "including frozen ones"
    assert model.scale.dtype == torch.float32
    embeddings = torch.ones(1, 2, 32)
    assert model(inputs_embeds=embeddings).logits.dtype == torch.bfloat16, "float32 inputs are cast"
    half = tiny_bert().half()
    with pytest.raises(Refusal, match=r"kahan_optimizer: bert\..* is torch\.float16, and only float32 weights become"):
        engaged(technique("kahan_optimizer"), AdamW(half.parameters()), half)


@pytest.mark.parametrize(
    ("name", "bits", "size", "package"),
    [
        ("bnb_optimizer", 8, "min_8bit_size", "bitsandbytes"),
        ("lowbit_optimizer", 8, "min_size", "torchao"),
        ("lowbit_optimizer", 4, "min_size", "torchao"),
        ("lowbit_optimizer", "fp8", "min_size", "torchao"),
    ],
)
def test_state_is_quantised_except_for_embeddings_and_small_tensors(
    name: str, bits: Any, size: str, package: str
) -> None:
    pytest.importorskip(package)
    model, built = tiny_bert(), technique(name, bits=bits, **{size: 1024})
    run, optimizer = engaged(built, AdamW(model.parameters(), lr=1e-3), model)
    evidence = built.proof(run, observed(run, lambda: step(model, optimizer, 1)))
    number = 8 if bits == "fp8" else bits
    matrices = [p for n, p in model.named_parameters() if "embeddings" not in n and p.numel() >= 1024]
    others = len([*model.parameters()]) - len(matrices)
    assert evidence["tensors_by_state_bits"] == {str(number): len(matrices), "32": others}
    kept = 8 * sum(p.numel() for p in model.parameters()) - evidence["state_bytes"]
    at_most = sum(p.numel() for p in matrices) * (8 - number / 4)  # before scales and look-up tables
    assert 0.6 * at_most < kept < at_most
    model, built = tiny_bert(), technique(name, bits=bits)
    run, optimizer = engaged(built, AdamW(model.parameters(), lr=1e-3), model)
    with pytest.raises(Refusal, match=f"no parameter has {number}-bit state; lower {size}"):
        built.proof(run, observed(run, lambda: step(model, optimizer, 1)))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_offloaded_state_stays_on_the_cpu_and_changed_weights_are_used(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Swapped(next(case for case in CASES if case.name == "offloaded_optimizer"), device)
    optimizer = AdamW(groups_of(model := network(device)), foreach=False)
    for number in range(2):
        for one, other in ((ours.model, ours.optimizer), (model, optimizer)):
            step(one, other, number)
            one[0].weight.data.fill_(0.25)
    torch.testing.assert_close(values(ours.model), values(model), rtol=1e-5, atol=1e-6)
    state, moved, copied = copy.deepcopy(ours.optimizer.state_dict()), list[Tensor](), Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: moved.append(tensor) or copied(tensor))  # type: ignore[func-returns-value]
    ours.optimizer.load_state_dict(state)
    assert len(moved) == sum(map(len, ours.optimizer.state.values())), "which a run on a CPU shows only here"
    evidence = ours.technique.proof(ours.run, observed(ours.run, lambda: ours.step(2)))
    assert evidence["state_on"] == ["cpu"]


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [8, 32])
def test_paged_state_is_paged_and_paged_again_after_loading(bits: Any) -> None:
    pytest.importorskip("bitsandbytes")
    built, model = technique("bnb_optimizer", bits=bits, paged=True), nn.Linear(512, 256, bias=False, device="cuda")
    run, optimizer = engaged(built, AdamW(model.parameters(), foreach=False), model)
    seen = observed(run, lambda: step(model, optimizer, 1))
    moments = optimizer.state[model.weight]["state1"].clone()
    assert built.proof(run, seen)["paged_tensors"] == 2
    optimizer.state[model.weight]["state1"] = moments.cuda()
    assert built.proof(run, seen)["paged_tensors"] == 1
    built.after_load(run)
    assert built.proof(run, seen)["paged_tensors"] == 2
    torch.testing.assert_close(optimizer.state[model.weight]["state1"].clone(), moments, rtol=0, atol=0)


# What a replacement keeps and refuses


class NoGradAdamW(AdamW):
    """Runs its closure without gradients, as the optimizers of some libraries do."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            loss = None if closure is None else closure()
        super().step()
        return loss


def swapped(old: Optimizer, cls: Any = AdamW) -> Optimizer:
    return replaced(old, lambda groups, defaults: cls(groups, **defaults, foreach=False))


def test_the_replaced_optimizer_keeps_no_hook_of_the_new_one() -> None:
    old = AdamW(linear().parameters(), foreach=False)
    called: list[int] = []
    handle = old.register_step_post_hook(lambda *_: called.append(1))
    new = swapped(old)
    assert not old._optimizer_step_pre_hooks
    assert not old._optimizer_step_post_hooks
    new.step()
    handle.remove()
    new.step()
    assert called == [1]


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


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: SGD(p, lr=1.0), r"torch\.optim\.sgd\.SGD is not AdamW"),
        (NoGradAdamW, "NoGradAdamW is not AdamW"),
        (lambda p: AdamW(p, amsgrad=True), "amsgrad=True, which would be lost"),
        (lambda p: AdamW(p, maximize=True), "maximize=True"),
        (lambda p: stepped(AdamW(p)), "has stepped, and its state would be lost"),
    ],
)
def test_optimizers_whose_settings_or_state_would_be_lost_are_refused(build: Any, message: str) -> None:
    model = linear()
    with pytest.raises(Refusal, match=f"^adafactor: .*{message}.*; use a new torch.optim.AdamW, or remove it$"):
        engaged(technique("adafactor"), build(list(model.parameters())), model)


def test_decoupled_adamw_keeps_its_trajectory() -> None:
    trained = []
    for swap in (False, True):
        model = linear()
        optimizer: Optimizer = DecoupledAdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.02)
        optimizer = swapped(optimizer) if swap else optimizer
        for rate in (1e-2, 5e-3, 1e-3):  # DecoupledAdamW scales its decay by lr / initial_lr
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step(closure(model, optimizer))
        trained.append(model.state_dict())
    torch.testing.assert_close(trained[1], trained[0])


def test_closures_run_with_gradients_enabled() -> None:
    new = swapped(AdamW((model := linear()).parameters()), NoGradAdamW)
    compute = closure(model, new)
    assert new.step(compute).requires_grad
    assert new.step(closure=compute).requires_grad


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


@pytest.mark.parametrize("flag", ["foreach", "fused"])
def test_a_flag_can_be_set_after_steps_of_another_implementation(flag: str) -> None:
    models, other = [linear(), linear()], "foreach" if flag == "fused" else "fused"
    optimizers = [set_implementation(AdamW(model.parameters(), foreach=False), other) for model in models]
    for optimizer in optimizers:
        stepped(optimizer)
    state = copy.deepcopy(optimizers[1].state_dict())
    set_implementation(optimizers[1], flag)
    optimizers[1].load_state_dict(state)
    assert not optimizers[1].param_groups[0][flag], "loading resets the flags"
    for of_parameter in optimizers[1].state.values():
        of_parameter["step"] = of_parameter["step"].double()
    set_implementation(optimizers[1], flag)
    assert {of_parameter["step"].dtype for of_parameter in optimizers[1].state.values()} == {torch.float32}
    for optimizer in optimizers:
        stepped(optimizer)
    torch.testing.assert_close([*models[1].parameters()], [*models[0].parameters()])
    assert {group[flag] for group in optimizers[1].param_groups} == {True}


@pytest.mark.parametrize(("flag", "device"), [("foreach", "cpu"), ("fused", "meta")])
def test_a_fused_implementation_counts_steps_on_the_device_of_the_parameter(flag: str, device: str) -> None:
    parameter = nn.Parameter(torch.empty(2, device="meta"))
    optimizer = AdamW([parameter])
    optimizer.state[parameter]["step"] = torch.tensor(3.0)
    set_implementation(optimizer, flag)
    assert optimizer.state[parameter]["step"].device.type == device


@pytest.mark.parametrize(("build", "flag"), [(DecoupledAdamW, "fused"), (torch.optim.LBFGS, "foreach")])
def test_optimizers_without_an_implementation_are_refused(build: Any, flag: str) -> None:
    with pytest.raises(ValueError, match=f"{build.__name__} has no {flag} implementation"):
        set_implementation(build(linear().parameters(), lr=1e-3), flag)
