"""Optimizer state and step on the CPU: parity with AdamW under clipping, changed weights and loaded states."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from composer_speedups import OffloadedOptimizer, apply_offloaded_optimizer
from composer_speedups.algorithms.offloaded_optimizer import host_adamw
from composer_speedups.core.errors import TechniqueError
from tests.helpers.common import assert_not_engaged, make_trainer, plain_batches, tiny_bert
from tests.reference.loop import EPS
from tests.reference.tolerance import assert_near

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def pair(device: str) -> list[tuple[Any, Any]]:
    """Return two equal models, with plain AdamW and with the offloaded AdamW."""
    result = []
    for offload in (False, True):
        model = tiny_bert().to(device)
        parameters = list(model.parameters())
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.0}, {"params": []}]
        optimizer = AdamW(groups, lr=1e-3, eps=EPS, weight_decay=0.1, foreach=False)
        result.append((model, apply_offloaded_optimizer(optimizer) if offload else optimizer))
    return result


def train(model: Any, optimizer: Any, device: str, steps: int = 3, *, start: int = 0) -> None:
    """Train with two micro-batches per step and clipping; one parameter has no gradient in the first step."""
    for step in range(start, start + steps):
        optimizer.zero_grad()
        for inputs in plain_batches(2):
            model(**{k: v.to(device) for k, v in inputs.items()}).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if step == 0:
            model.classifier.bias.grad = None
        optimizer.param_groups[0]["lr"] = 1e-3 / (1 + step)
        optimizer.step()


@devices
@pytest.mark.parametrize("chunk", [1, 2**10, 2**30])
def test_it_equals_adamw_with_clipping_micro_batches_and_missing_gradients(
    device: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_adamw, "_CHUNK_BYTES", chunk)
    (model, plain), (other, offloaded) = pair(device)
    for network, optimizer in ((model, plain), (other, offloaded)):
        train(network, optimizer, device)
    assert_near(dict(other.named_parameters()), dict(model.named_parameters()), what="weights")
    states = [value for state in offloaded.state.values() for value in state.values()]
    assert {value.device.type for value in states} == {"cpu"}
    assert offloaded.copied_bytes == 2 * sum(p.nbytes for p in other.parameters())


def test_a_chunk_has_parameters_of_one_device_only() -> None:
    parameters = [nn.Parameter(torch.ones(2, device=device)) for device in ("cpu", "cpu", "meta", "cpu")]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    chunks = host_adamw.HostAdamW([{"params": parameters}])._chunks()
    assert [[p.device.type for p in chunk] for _, chunk in chunks] == [["cpu", "cpu"], ["meta"], ["cpu"]]


@devices
def test_weights_changed_between_steps_are_used(device: str) -> None:
    (model, plain), (other, offloaded) = pair(device)
    for network, optimizer in ((model, plain), (other, offloaded)):
        train(network, optimizer, device, 1)
        network.classifier.weight.data.fill_(0.25)
        network.load_state_dict({**network.state_dict(), "classifier.bias": torch.full((2,), 0.5, device=device)})
        train(network, optimizer, device, 1, start=1)
    assert_near(dict(other.named_parameters()), dict(model.named_parameters()), what="weights")


@devices
def test_a_loaded_state_is_on_the_cpu_and_training_continues_exactly(device: str) -> None:
    (model, optimizer), _ = pair(device)
    optimizer = apply_offloaded_optimizer(AdamW(model.parameters(), lr=1e-3, eps=EPS))
    train(model, optimizer, device, 2)
    twin = copy.deepcopy(model)
    loaded = apply_offloaded_optimizer(AdamW(twin.parameters(), lr=1e-3, eps=EPS))
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {v.device.type for s in loaded.state.values() for v in s.values()} == {"cpu"}
    train(model, optimizer, device, 2, start=2)
    train(twin, loaded, device, 2, start=2)
    expected = dict(model.named_parameters())
    torch.testing.assert_close(dict(twin.named_parameters()), expected, rtol=0, atol=0)


def test_a_second_call_returns_the_same_optimizer() -> None:
    _, (_, offloaded) = pair("cpu")
    assert apply_offloaded_optimizer(offloaded) is offloaded


def test_the_cpu_is_refused_unless_allowed() -> None:
    with pytest.raises(TechniqueError, match="offloading the optimizer needs a CUDA GPU, and this"):
        make_trainer([OffloadedOptimizer()])


def test_state_that_is_not_on_the_cpu_is_detected() -> None:
    trainer = make_trainer([OffloadedOptimizer(allow_cpu=True)])
    optimizer = trainer.state.optimizers[0]

    def move(*_: Any) -> None:
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].to("meta")  # a device other than the CPU that every machine has

    optimizer.register_step_post_hook(move)
    assert_not_engaged(trainer, "its state is on meta")


@pytest.mark.gpu
def test_the_state_is_on_the_cpu_and_the_weights_on_the_gpu() -> None:
    technique = OffloadedOptimizer()
    trainer = make_trainer([technique], gpu=True)
    trainer.fit()
    assert technique.evidence["weights_on"] == ["cuda"]
    assert technique.evidence["state_on"] == "cpu"
    assert {p.device.type for p in trainer.state.model.parameters()} == {"cuda"}
    trainer.close()


@pytest.mark.gpu
def test_torchaos_offloaded_optimizer_ignores_clipping() -> None:
    torchao = pytest.importorskip("torchao.optim")
    (model, plain), (other, _) = pair("cuda")
    theirs = torchao.CPUOffloadOptimizer(other.parameters(), AdamW, minimal_size=0, lr=1e-3, eps=EPS, weight_decay=0.0)
    for group in plain.param_groups:
        group["weight_decay"] = 0.0
    for network, optimizer in ((model, plain), (other, theirs)):
        network(**{k: v.cuda() for k, v in plain_batches(1)[0].items()}).loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1e-4)
        optimizer.step()
    torch.cuda.synchronize()
    apart = [(a - b).abs().max() for a, b in zip(other.parameters(), model.parameters(), strict=True)]
    assert max(apart) > 1e-4, "torchao's class now supports clipping, so it could be used"


def test_a_loaded_state_is_copied_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No GPU is needed: the test records the tensors whose ``cpu()`` is called."""
    (model, _), (_, optimizer) = pair("cpu")
    model.zero_grad()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moved: list[int] = []
    copied = torch.Tensor.cpu

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor.data_ptr())
        return copied(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    held = {value.data_ptr() for state in optimizer.state.values() for value in state.values()}
    assert held
    assert held == set(moved)
