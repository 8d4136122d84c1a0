"""The loss read early on two ranks: added up on the host, to what Composer's own loop makes of it."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from composer.devices import DeviceCPU, DeviceGPU
from composer.utils import dist

from composer_speedups import EarlyLoss, apply_early_loss
from composer_speedups.algorithms.early_loss import early_loss as module
from composer_speedups.algorithms.early_loss import functional
from composer_speedups.core.requirements import Context
from composer_speedups.core.trainer_state import max_over_ranks, ranks_meet_on_host
from composer_speedups.distributed.host_scalars import HostCopies, Readback
from composer_speedups.train.config.schema import TrainerConfig
from composer_speedups.train.trainer import open_device
from tests.algorithms.test_early_loss import train
from tests.helpers.common import final_weights
from tests.helpers.ranks import on_ranks


def _both() -> dict[str, Any]:
    """On each rank: what was logged and the weights, with the technique and without, and what was read."""
    EarlyLoss.requirements = lambda *_: ()  # type: ignore[method-assign, assignment, return-value]  # on the CPU
    module.apply_early_loss = lambda device: functional._intercept(device, Readback(HostCopies()))
    technique, found = EarlyLoss(), {}
    for name, algorithms in (("early", [technique]), ("stock", [])):
        trainer, logged = train("dict", 3, algorithms)
        found[name] = {name: values for name, values in logged.items() if "wct" not in name}, final_weights(trainer)
    return {**found, "read": technique.evidence["losses_read"]}


def test_ranks_read_what_composer_reads_and_train_alike() -> None:
    ranks = on_ranks(_both)
    for found in ranks:
        (logged, weights), (expected, reference) = found["early"], found["stock"]
        assert logged == expected
        assert len(logged["loss/train/total"]) == 4
        torch.testing.assert_close(weights, reference, rtol=0, atol=0)
        assert found["read"] == 8
    assert ranks[0]["early"][0] == ranks[1]["early"][0], "the losses of both together"


def test_ranks_that_have_only_gpus_to_meet_on_are_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "cuda:nccl")
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert not ranks_meet_on_host()
    context = Context(torch.device("cpu"), ranks=2)
    (unmet,) = [r for r in EarlyLoss().requirements(context) if not r.met and "GPUs" in r.reason]
    assert unmet.fix == "before the Trainer is made, set its device's dist_backend to 'cpu:gloo,cuda:nccl'"
    monkeypatch.setattr(functional, "torch_device", lambda _: torch.device("cuda"))
    with pytest.raises(ValueError, match="needs ranks that add up numbers on the host: before the Trainer is made"):
        apply_early_loss(DeviceCPU())
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    assert ranks_meet_on_host()
    assert all(r.met for r in EarlyLoss().requirements(context) if "GPUs" in r.reason)


@pytest.mark.parametrize(("config", "moved"), [("cuda:nccl", 1), ("cpu:gloo,cuda:nccl", 0)])
def test_the_largest_number_of_ranks_waits_for_no_gpu_where_they_meet_on_the_host(
    config: str, moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: config)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, reduce_operation: tensor.add_(1))
    device = DeviceCPU()
    monkeypatch.setattr(device, "tensor_to_device", send := Mock(side_effect=lambda tensor: tensor))
    assert max_over_ranks(device, 4) == 5
    assert send.call_count == moved


@pytest.mark.parametrize(
    ("world", "interface", "backend"), [(2, None, True), (4, None, False), (4, "eth0", True)], ids=str
)
def test_ranks_of_one_node_meet_on_the_host_and_those_of_several_where_gloo_knows_the_interface(
    world: int, interface: str | None, backend: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(DeviceGPU, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(dist, "get_local_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    if interface:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    device = open_device(TrainerConfig())
    assert device.dist_backend == ("cpu:gloo,cuda:nccl" if backend else "nccl")
