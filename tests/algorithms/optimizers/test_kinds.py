"""Every kind equals its reference step by step, with groups, schedules, loaded states and missing gradients; and what a
replacement keeps and refuses."""

from __future__ import annotations

import copy
import importlib.util
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from composer.optim import DecoupledAdamW
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, LambdaLR, StepLR

from composer_speedups.algorithms.optimizers.optimizers import apex_installed
from composer_speedups.algorithms.optimizers.swap import attach_schedulers, replaced, set_implementation
from composer_speedups.core.errors import Refusal
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
def _prepared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if "apex" in request.node.name and not apex_installed():
        use_stand_in(monkeypatch)
    yield
    torch._dynamo.reset()  # torchao compiles its step


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


def saved(optimizer: Optimizer) -> dict[str, Any]:
    """Its state dict, written and read; torchao's tensors cannot be copied."""
    torch.save(optimizer.state_dict(), file := io.BytesIO())
    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=False)
    return state


class Swapped:
    """A model whose AdamW was swapped, with a scheduler that was built before."""

    def __init__(self, case: OptimizerCase, device: str) -> None:
        self.model, self.technique, self.every = network(device), case.build(), case.counts_by_group
        old = AdamW(groups_of(self.model), foreach=False)
        self.scheduler = LambdaLR(old, lambda k: RATES[k])
        self.run, self.optimizer = engaged(self.technique, old, self.model)
        attach_schedulers([self.scheduler], old, self.optimizer)

    def step(self, number: int) -> None:
        step(self.model, self.optimizer, number, every=self.every)
        self.scheduler.step()


@pytest.mark.parametrize(("case", "device"), params("cpu", "cuda"))
def test_each_step_equals_the_references(case: OptimizerCase, device: str) -> None:
    ours, model = Swapped(case, device), network(device)
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


@pytest.mark.parametrize(("case", "device"), params("cpu", "cuda"))
def test_a_loaded_state_continues_exactly(case: OptimizerCase, device: str) -> None:
    first, second = Swapped(case, device), Swapped(case, device)
    for number in range(2):
        first.step(number)
    second.optimizer.load_state_dict(saved(first.optimizer))
    if hasattr(second.technique, "after_load"):
        second.technique.after_load(second.run)
    second.model.load_state_dict(first.model.state_dict())
    second.scheduler.load_state_dict(first.scheduler.state_dict())
    seen = [observed(one.run, lambda: one.step(2)) for one in (first, second)]  # noqa: B023
    first.step(3)
    second.step(3)
    torch.testing.assert_close(values(second.model), values(first.model), rtol=0, atol=0)
    proofs = [one.technique.proof(one.run, what) for one, what in zip((first, second), seen, strict=True)]
    assert proofs[0] == proofs[1]


# What only one kind does


def test_adafactor_scales_by_the_parameters_rms_if_requested() -> None:
    for scale, expected in ((False, 1e-3), (True, 0.05e-3)):
        model = nn.Linear(4, 6, bias=False)
        nn.init.constant_(model.weight, 0.05)
        built = technique("adafactor", scale_parameter=scale)
        _, optimizer = engaged(built, AdamW(model.parameters(), lr=1e-3, weight_decay=0.0), model)
        model.weight.grad = torch.full_like(model.weight, 1e-4)
        optimizer.step()
        torch.testing.assert_close(model.weight.detach(), torch.full((6, 4), 0.05 - expected))


def test_kahan_summation_keeps_updates_that_bfloat16_loses() -> None:
    """Weights of 1.0 with a gradient of 1, in steps of a thirtieth of bfloat16's resolution at 1.0."""
    final = {}
    for name in ("float32", "bfloat16", "kahan"):
        model = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16 if name == "bfloat16" else torch.float32)
        nn.init.ones_(model.weight)
        optimizer: Optimizer = AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, foreach=False)
        if name == "kahan":
            pytest.importorskip("optimi")
            _, optimizer = engaged(technique("kahan_optimizer"), optimizer, model)
        for _ in range(200):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        final[name] = model.weight.detach().float()
    torch.testing.assert_close(final["float32"], torch.full((8, 8), 0.98))
    assert final["bfloat16"].eq(1).all(), "without Kahan summation every update rounds away"
    torch.testing.assert_close(final["kahan"], final["float32"], rtol=0, atol=2**-8)  # half of the resolution below 1


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


@pytest.mark.parametrize("bits", [8, "fp8"])
def test_a_word_that_is_absent_from_a_batch_does_not_jump(bits: Any) -> None:
    """Its quantised second moment would be zero while its first is not, and the update moment / eps. See the card."""
    pytest.importorskip("torchao")
    moved = []
    for embedding in (True, False):
        model = nn.Embedding(16, 256) if embedding else nn.Linear(256, 16, bias=False)
        nn.init.zeros_(model.weight)
        old = AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, foreach=False)
        _, optimizer = engaged(technique("lowbit_optimizer", bits=bits), old, model)
        for gradient in (3e-4, 0.0):
            before = model.weight.detach()[0, 1].clone()
            model.weight.grad = torch.full_like(model.weight, gradient)
            model.weight.grad[:, 0] = 1.0
            optimizer.step()
        moved.append(float((model.weight.detach()[0, 1] - before).abs()))
    assert moved[0] < 1e-3
    assert moved[1] > 1, "torchao's state no longer jumps, so embeddings need no exception"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_offloaded_state_stays_on_the_cpu_and_changed_weights_are_used(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in CASES if case.name == "offloaded_optimizer")
    ours, model = Swapped(case, device), network(device)
    optimizer = AdamW(groups_of(model), foreach=False)
    for number in range(2):
        for one, other in ((ours.model, ours.optimizer), (model, optimizer)):
            step(one, other, number)
            one[0].weight.data.fill_(0.25)
    torch.testing.assert_close(values(ours.model), values(model), rtol=1e-5, atol=1e-6)
    moved: list[Tensor] = []  # a loaded state is moved, which a run on a CPU shows only here
    copied = Tensor.cpu

    def cpu(tensor: Tensor) -> Tensor:
        moved.append(tensor)
        return copied(tensor)

    state = saved(ours.optimizer)
    monkeypatch.setattr(Tensor, "cpu", cpu)
    ours.optimizer.load_state_dict(state)
    assert len(moved) == sum(map(len, ours.optimizer.state.values()))
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


@pytest.mark.parametrize("positional", [True, False])
def test_closures_run_with_gradients_enabled(positional: bool) -> None:
    new = swapped(AdamW((model := linear()).parameters()), NoGradAdamW)
    compute = closure(model, new)
    loss = new.step(compute) if positional else new.step(closure=compute)
    assert loss.requires_grad


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
    set_implementation(optimizers[1], flag)
    for optimizer in optimizers:
        stepped(optimizer)
    torch.testing.assert_close([*models[1].parameters()], [*models[0].parameters()])
    assert {group[flag] for group in optimizers[1].param_groups} == {True}


@pytest.mark.parametrize(("build", "flag"), [(DecoupledAdamW, "fused"), (torch.optim.LBFGS, "foreach")])
def test_optimizers_without_an_implementation_are_refused(build: Any, flag: str) -> None:
    with pytest.raises(ValueError, match=f"{build.__name__} has no {flag} implementation"):
        set_implementation(build(linear().parameters(), lr=1e-3), flag)
