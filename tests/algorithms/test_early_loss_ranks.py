"""Reading the loss early on two ranks: host reductions give the same numbers as Composer's loop."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from composer.devices import DeviceCPU, DeviceGPU
from composer.trainer import trainer as composer_trainer
from composer.utils import dist

from composer_speedups import EarlyLoss
from composer_speedups.core import trainer_state
from composer_speedups.core.errors import Refusal
from composer_speedups.core.trainer_state import host_group, max_over_ranks, ranks_meet_on_host
from composer_speedups.train.config.schema import TrainerConfig
from composer_speedups.train.trainer import open_device
from tests.algorithms.test_early_loss import train
from tests.helpers.common import final_weights
from tests.helpers.ranks import on_ranks


def _train_both() -> dict[str, Any]:
    """Train with and without the technique; return this rank's logs and weights, and the number of losses read."""
    EarlyLoss.needs = lambda *_: ()  # type: ignore[method-assign, assignment, return-value]  # on the CPU
    technique, runs = EarlyLoss(), {}
    for name, algorithms in (("early", [technique]), ("stock", [])):
        trainer, logged = train("dict", 3, algorithms)
        runs[name] = {name: values for name, values in logged.items() if "wct" not in name}, final_weights(trainer)
    return {**runs, "read": technique.evidence["losses_read"]}


def _refuse_host_tensors() -> None:
    """Make the default group refuse host tensors, as NCCL does."""
    config = torch.distributed.get_backend_config
    torch.distributed.get_backend_config = lambda group=None: "cuda:nccl" if group is None else config(group)

    def refusing(original: Any) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("group") is None and not getattr(args[0], "on_device", False):
                raise RuntimeError("No backend type associated with device type cpu")
            return original(*args, **kwargs)

        return collective

    for name in ("all_reduce", "broadcast"):
        setattr(torch.distributed, name, refusing(getattr(torch.distributed, name)))
    move = DeviceCPU.tensor_to_device

    def moved(self: DeviceCPU, tensor: Any) -> Any:
        tensor = move(self, tensor)
        tensor.on_device = True
        return tensor

    DeviceCPU.tensor_to_device = moved  # type: ignore[method-assign]


def _both_without_host_group() -> dict[str, Any]:
    _refuse_host_tensors()
    before = len(torch.distributed.distributed_c10d._world.pg_map)
    outcome = _train_both()
    assert len(torch.distributed.distributed_c10d._world.pg_map) == before
    assert host_group() is None
    assert composer_trainer.dist is dist
    return outcome


@pytest.mark.parametrize("train_both", [_train_both, _both_without_host_group], ids=["gloo", "nccl only"])
def test_ranks_log_the_same_losses_and_weights_as_composer(train_both: Any) -> None:
    """With NCCL only, they open and close a gloo group."""
    ranks = on_ranks(train_both)
    for outcome in ranks:
        (logged, weights), (expected, reference) = outcome["early"], outcome["stock"]
        assert logged == expected
        assert len(logged["loss/train/total"]) == 4
        torch.testing.assert_close(weights, reference, rtol=0, atol=0)
        assert outcome["read"] == 8
    assert ranks[0]["early"][0] == ranks[1]["early"][0], "losses are averaged over both ranks"


def _refusals() -> list[str]:
    """Return each rank's errors: if one rank lacks gloo, and if host names resolve to a loopback address."""
    _refuse_host_tensors()
    said = []
    EarlyLoss.needs = lambda *_: ()  # type: ignore[method-assign, assignment, return-value]
    available = torch.distributed.is_gloo_available
    torch.distributed.is_gloo_available = lambda: dist.get_global_rank() == 0 and available()
    with pytest.raises(Refusal) as error:
        train("tensor", 4, [EarlyLoss()])
    said.append(str(error.value))
    torch.distributed.is_gloo_available = available
    trainer_state.socket.gethostbyname = lambda _: "127.0.1.1"  # type: ignore[attr-defined]
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    with pytest.warns(UserWarning, match="continuing without early_loss"):
        train("tensor", 4, [EarlyLoss(on_unavailable="warn")])
    with pytest.raises(Refusal) as error:
        train("tensor", 4, [EarlyLoss()])
    return [*said, str(error.value)]


def test_all_ranks_refuse_if_one_cannot_connect() -> None:
    lacking = "early_loss: 2 ranks can reduce only tensors on their GPUs, since"
    name = "this host's name resolves to 127.0.1.1, which other nodes cannot reach; set GLOO_SOCKET_IFNAME to the"
    other, without = on_ranks(_refusals)
    assert other[0] == f"{lacking} another rank cannot connect; see its message"
    assert without[0] == f"{lacking} torch was built without gloo; remove it"
    assert other[1].startswith(f"{lacking} {name}")
    assert without[1] == other[1]


def _opened(made: list[str]) -> list[str]:
    made.append("group")
    return made


def test_the_host_group_is_shared_and_destroyed_by_its_last_user(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(trainer_state, "_new_host_group", lambda _: _opened(made))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda group: made.append("destroyed"))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "cuda:nccl")
    assert not ranks_meet_on_host()
    for _ in range(2):
        trainer_state.open_host_group(DeviceCPU())
    assert ranks_meet_on_host()
    trainer_state.close_host_group()
    assert made == ["group"]
    trainer_state.close_host_group()
    trainer_state.close_host_group()
    assert made == ["group", "destroyed"]
    assert not ranks_meet_on_host()
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    assert ranks_meet_on_host()
    trainer_state.open_host_group(DeviceCPU())
    assert host_group() is None, "the default group can reduce host tensors"


@pytest.mark.parametrize(("config", "moved"), [("cuda:nccl", 1), ("cpu:gloo,cuda:nccl", 0)])
def test_max_over_ranks_uses_the_gpu_only_without_a_host_group(
    config: str, moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: config)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, operation, group: tensor.add_(1))
    device = DeviceCPU()
    monkeypatch.setattr(device, "tensor_to_device", send := Mock(side_effect=lambda tensor: tensor))
    assert max_over_ranks(device, 4) == 5
    assert send.call_count == moved


@pytest.mark.parametrize(
    ("world", "interface", "backend"), [(2, None, True), (4, None, False), (4, "eth0", True)], ids=str
)
def test_gloo_is_added_on_one_node_or_with_a_known_interface(
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
