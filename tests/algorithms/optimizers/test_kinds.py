"""Every kind equals its reference step by step, with groups, schedules, loaded states and missing gradients."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from composer_speedups.algorithms.optimizers.kinds import apex_installed
from composer_speedups.algorithms.optimizers.proof import prove
from composer_speedups.algorithms.optimizers.swap import UnfitOptimizerError, attach_schedulers
from tests.algorithms.optimizers.cases import CASES, OptimizerCase, network, observed, technique, use_stand_in
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
        self.model, self.kind, self.every = network(device), case.kind(), case.counts_by_group
        old = AdamW(groups_of(self.model), foreach=False)
        self.scheduler = LambdaLR(old, lambda k: RATES[k])
        self.optimizer = self.kind.build(old, self.model)
        attach_schedulers([self.scheduler], old, self.optimizer)

    def step(self, number: int) -> None:
        step(self.model, self.optimizer, number, every=self.every)
        self.scheduler.step()


@pytest.mark.parametrize(("case", "device"), params("cpu", "cuda"))
def test_each_step_equals_the_references(case: OptimizerCase, device: str) -> None:
    ours, model = Swapped(case, device), network(device)
    assert case.kind().build(ours.optimizer, ours.model) is ours.optimizer, "a second call changes nothing"
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
    seen, _ = observed(ours.model, ours.optimizer, lambda: both(1))
    both(2)
    both(3)
    assert [g["initial_lr"] for g in ours.optimizer.param_groups] == pytest.approx([1e-2, 1e-2, 1e-3])
    assert ours.optimizer.param_groups[0]["name"] == "mine"
    if case.too_large:
        with pytest.raises(UnfitOptimizerError, match="no parameter has 8-bit state"):
            prove(ours.kind, seen, ours.optimizer, ours.model)
        return
    evidence = prove(ours.kind, seen, ours.optimizer, ours.model)
    assert evidence["parameters_moved"] in ("5 of 5", "6 of 6")
    assert evidence["state_bytes"] > 0


@pytest.mark.parametrize(("case", "device"), params("cpu", "cuda"))
def test_a_loaded_state_continues_exactly(case: OptimizerCase, device: str) -> None:
    first, second = Swapped(case, device), Swapped(case, device)
    for number in range(2):
        first.step(number)
    second.optimizer.load_state_dict(saved(first.optimizer))
    second.kind.loaded(second.optimizer)
    second.model.load_state_dict(first.model.state_dict())
    second.scheduler.load_state_dict(first.scheduler.state_dict())
    for number in range(2, 4):
        first.step(number)
        second.step(number)
    torch.testing.assert_close(values(second.model), values(first.model), rtol=0, atol=0)
    if not case.too_large:
        assert second.kind.check(second.optimizer, second.model) == first.kind.check(first.optimizer, first.model)


@pytest.mark.parametrize(("case", "device"), params("cpu"))
def test_a_group_that_is_added_later_has_adamws_defaults(case: OptimizerCase, device: str) -> None:
    weights = [nn.Parameter(torch.ones(64, 64)) for _ in range(3)]
    old = AdamW(weights[:1], lr=1e-2, weight_decay=0.5, betas=(0.8, 0.9), eps=1e-4, foreach=False)
    optimizer = case.kind().build(old, nn.ParameterList(weights))
    optimizer.add_param_group({"params": weights[1:2]})
    for number in range(3):
        for weight in weights[:2]:
            weight.grad = torch.full_like(weight, float(number + 1))
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)
    assert (weights[1] < 1).all()
    torch.testing.assert_close(weights[2].float(), torch.ones(64, 64))


# What only one kind does


def test_adafactor_scales_by_the_parameters_rms_if_requested() -> None:
    for scale, expected in ((False, 1e-3), (True, 0.05e-3)):
        weight = nn.Parameter(torch.full((6, 4), 0.05))
        kind = technique("adafactor", scale_parameter=scale).kind
        optimizer = kind.build(AdamW([weight], lr=1e-3, weight_decay=0.0), nn.Module())
        weight.grad = torch.full_like(weight, 1e-4)
        optimizer.step()
        torch.testing.assert_close(weight.detach(), torch.full((6, 4), 0.05 - expected))


def test_adafactor_without_a_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="no matrix whose second moments could be factored; use AdamW"):
        technique("adafactor").kind.build(AdamW([nn.Parameter(torch.zeros(3))]), nn.Module())


def test_kahan_summation_keeps_updates_that_bfloat16_loses() -> None:
    """Weights of 1.0 with a gradient of 1, in steps of a thirtieth of bfloat16's resolution at 1.0."""
    final = {}
    for name in ("float32", "bfloat16", "kahan"):
        model = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16 if name == "bfloat16" else torch.float32)
        nn.init.ones_(model.weight)
        optimizer: Optimizer = AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, foreach=False)
        if name == "kahan":
            pytest.importorskip("optimi")
            optimizer = technique("kahan_optimizer").kind.build(optimizer, model)
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
    kind = technique("kahan_optimizer").kind
    optimizer = kind.build(AdamW([p for p in model.parameters() if p.requires_grad]), model)
    assert all(p is before[n] for n, p in model.named_parameters())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}, "including frozen ones"
    assert model.scale.dtype == torch.float32
    assert not model.bert.pooler.dense.weight.requires_grad
    embeddings = torch.ones(1, 2, 32)
    assert model(inputs_embeds=embeddings).logits.dtype == torch.bfloat16, "float32 inputs are cast"
    assert type(optimizer).__qualname__ != "AdamW", "Composer's checkpoints identify optimizers by class name"
    for build, said in (
        (lambda: nn.Linear(2, 2, dtype=torch.float16), r"torch\.float16 parameters; load it in float32 or bfloat16"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "BatchNorm keeps its statistics in float32"),
    ):
        other: Any = build()
        with pytest.raises(ValueError, match=said):
            kind.build(AdamW(other.parameters()), other)
        assert torch.bfloat16 not in {p.dtype for p in other.parameters()}, "a refusal changes nothing"


@pytest.mark.parametrize(
    ("name", "settings", "package"),
    [
        ("bnb_optimizer", {"bits": 8, "min_8bit_size": 1024}, "bitsandbytes"),
        ("lowbit_optimizer", {"bits": 8, "min_size": 1024}, "torchao"),
        ("lowbit_optimizer", {"bits": 4, "min_size": 1024}, "torchao"),
        ("lowbit_optimizer", {"bits": "fp8", "min_size": 1024}, "torchao"),
    ],
)
def test_state_is_quantised_except_for_embeddings_and_small_tensors(
    name: str, settings: dict[str, Any], package: str
) -> None:
    pytest.importorskip(package)
    model, kind = tiny_bert(), technique(name, **settings).kind
    optimizer: Any = kind.build(AdamW(model.parameters(), lr=1e-3), model)
    step(model, optimizer, 1)
    evidence, bits = kind.check(optimizer, model), str(settings["bits"]).replace("fp8", "8")
    matrices = [p for n, p in model.named_parameters() if "embeddings" not in n and p.numel() >= 1024]
    assert evidence["tensors_by_state_bits"] == {bits: len(matrices), "32": len([*model.parameters()]) - len(matrices)}
    assert evidence["values_by_state_bits"][bits] == sum(p.numel() for p in matrices)
    assert evidence["embedding_state_bits"] == [32]
    kept = 8 * sum(p.numel() for p in model.parameters()) - prove(kind, *stepped(optimizer, model))["state_bytes"]
    at_most = evidence["values_by_state_bits"][bits] * (8 - int(bits) / 4)  # before scales and look-up tables
    assert 0.6 * at_most < kept < at_most


def stepped(optimizer: Optimizer, model: nn.Module) -> Any:
    seen, _ = observed(model, optimizer, lambda: step(model, optimizer, 2))
    return seen, optimizer, model


@pytest.mark.parametrize("name", ["bnb_optimizer", "lowbit_optimizer"])
def test_quantised_embeddings_and_models_that_are_too_small_are_detected(name: str) -> None:
    pytest.importorskip({"bnb_optimizer": "bitsandbytes", "lowbit_optimizer": "torchao"}[name])
    size = "min_8bit_size" if name == "bnb_optimizer" else "min_size"
    for settings, said in (
        ({size: 1024}, f"embeddings have 8-bit state; lower {size}"),
        ({}, rf"no parameter has 8-bit state; lower {size} \(4096 now\)"),
    ):
        model, kind = tiny_bert(), technique(name, **settings).kind
        optimizer: Any = kind.build(AdamW(model.parameters(), lr=1e-3), model)
        if settings and name == "bnb_optimizer":
            optimizer.mng.initialize()  # forgets the exceptions
        optimizer.full_precision = frozenset()
        step(model, optimizer, 1)
        with pytest.raises(UnfitOptimizerError, match=said):
            kind.check(optimizer, model)


@pytest.mark.parametrize("bits", [8, "fp8"])
def test_a_word_that_is_absent_from_a_batch_does_not_jump(bits: Any) -> None:
    """Its quantised second moment would be zero while its first is not, and the update moment / eps. See the card."""
    pytest.importorskip("torchao")
    moved = []
    for embedding in (True, False):
        model = nn.Embedding(16, 256) if embedding else nn.Linear(256, 16, bias=False)
        nn.init.zeros_(model.weight)
        kind = technique("lowbit_optimizer", bits=bits).kind
        optimizer = kind.build(AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, foreach=False), model)
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
    assert ours.kind.check(ours.optimizer, ours.model) == {"state_on": "cpu", "weights_on": [device]}
    entry = next(iter(ours.optimizer.state.values()))
    entry["exp_avg"] = entry["exp_avg"].to("meta")  # a device other than the CPU that every machine has
    with pytest.raises(UnfitOptimizerError, match="its state is on meta"):
        ours.kind.check(ours.optimizer, ours.model)


@pytest.mark.gpu
def test_torchaos_offloaded_optimizer_ignores_clipping() -> None:
    torchao = pytest.importorskip("torchao.optim")
    models = [network("cuda") for _ in range(2)]
    settings: dict[str, Any] = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.0}
    theirs = torchao.CPUOffloadOptimizer(models[0].parameters(), AdamW, minimal_size=0, **settings)
    for model, optimizer in zip(models, (theirs, AdamW(models[1].parameters(), **settings)), strict=True):
        model(torch.ones(2, 64, device="cuda")).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
        optimizer.step()
    torch.cuda.synchronize()
    apart = [(a - b).abs().max() for a, b in zip(values(models[0]), values(models[1]), strict=True)]
    assert max(apart) > 1e-4, "torchao's class now supports clipping, so it could be used"
    assert not hasattr(theirs, "state"), "torchao's class now has a state, so Composer could save it"


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [8, 32])
def test_paged_state_is_paged_and_paged_again_after_loading(bits: Any) -> None:
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.functional import GlobalPageManager

    before = len(GlobalPageManager.get_instance().paged_tensors)
    kind = technique("bnb_optimizer", bits=bits, paged=True).kind
    model = nn.Linear(512, 256, bias=False, device="cuda")
    optimizer: Any = kind.build(AdamW(model.parameters(), foreach=False), model)
    step(model, optimizer, 1)
    moments = optimizer.state[model.weight]["state1"].clone()
    assert kind.check(optimizer, model)["paged_tensors"] == 2
    optimizer.state[model.weight]["state1"] = moments.cuda()
    assert kind.check(optimizer, model)["paged_tensors"] == 1
    kind.loaded(optimizer)
    assert kind.check(optimizer, model)["paged_tensors"] == 2
    torch.testing.assert_close(optimizer.state[model.weight]["state1"].clone(), moments, rtol=0, atol=0)
    assert len(GlobalPageManager.get_instance().paged_tensors) == before
    small = nn.Linear(64, 64, bias=False, device="cuda")
    optimizer = kind.build(AdamW(small.parameters(), foreach=False), small)
    step(small, optimizer, 1)
    with pytest.raises(UnfitOptimizerError, match=r"no state tensor is paged|no parameter has 8-bit"):
        kind.check(optimizer, small)
