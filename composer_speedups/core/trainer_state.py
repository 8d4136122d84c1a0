"""What Composer's State holds, without its wrappers, and what its ranks agree on; imports nothing of Composer."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from composer.core import State
    from composer.devices import Device

__all__ = [
    "autocast_dtype",
    "close_host_group",
    "compute_dtype",
    "device_of",
    "host_group",
    "is_compiled",
    "is_composer_model",
    "local_shard",
    "loss_of_this_rank",
    "loss_ranks",
    "max_over_ranks",
    "model_of",
    "open_host_group",
    "ranks_meet_on_host",
    "torch_device",
    "world_size",
]


def torch_device(device: Device) -> torch.device:
    """The torch device behind a Composer device, which keeps it in a private attribute."""
    inner = device._device
    assert isinstance(inner, torch.device)
    return inner


def device_of(state: State) -> torch.device:
    """The device this rank trains on."""
    return torch_device(state.device)


def is_composer_model(model: Any) -> bool:
    """Whether a model is a ComposerModel, which it cannot be before Composer was imported."""
    models = sys.modules.get("composer.models")
    return models is not None and isinstance(model, models.ComposerModel)


def model_of(state: State) -> Any:
    """The ComposerModel, out of its DistributedDataParallel wrapper where it has one."""
    return state.model.module if state.is_model_ddp else state.model


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor that FSDP shares out; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def world_size() -> int:
    """Processes that train together, before torch.distributed is initialised too."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


_alone = False


@contextlib.contextmanager
def loss_of_this_rank() -> Iterator[None]:
    """Inside, losses take nothing of other ranks, which may not be computing theirs: see :func:`loss_ranks`."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def loss_ranks() -> int:
    """Ranks whose samples a loss that gathers them may take: all, or this one inside :func:`loss_of_this_rank`."""
    return 1 if _alone else world_size()


_host_groups: list[Any] = []  # the one process group, once for each of its users


def ranks_meet_on_host() -> bool:
    """Whether host tensors can be reduced over the ranks as they are: with gloo, or because there is one rank."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return True
    return bool(_host_groups) or "cpu:" in torch.distributed.get_backend_config()


def host_group() -> Any:
    """The process group to reduce host tensors with; None for the default group. See :func:`open_host_group`."""
    return _host_groups[-1] if _host_groups else None


def open_host_group(device: Device) -> None:
    """Let the ranks reduce host tensors: where the default group is NCCL's alone, with a gloo group of their own.

    Every rank has to call it, at the same point of the program, as for ``torch.distributed.new_group``. The group is
    shared by all who open it, and destroyed when as many have called :func:`close_host_group`. Gloo connects over the
    network interface named by ``GLOO_SOCKET_IFNAME``, or else the one that this host's name resolves to.

    Args:
        device: Of the Trainer; the ranks agree on it whether all can connect.

    Raises:
        ValueError: On every rank, when one of them cannot: torch was built without gloo, or, of several nodes, the
            host's name resolves to an address that the others do not reach. After a semicolon comes what to do.
    """
    if _host_groups or not ranks_meet_on_host():
        _host_groups.append(host_group() or _new_host_group(device))


def close_host_group() -> None:
    """The counterpart of :func:`open_host_group`; does nothing where no group was made."""
    if _host_groups and (group := _host_groups.pop()) not in _host_groups:
        with contextlib.suppress(ValueError):  # the process has left the default group, and all others with it
            torch.distributed.destroy_process_group(group)


def _new_host_group(device: Device) -> Any:
    lacking = f"{world_size()} ranks have only their GPUs to add up numbers on"
    problem = _gloo_connection_problem()
    if max_over_ranks(device, int(problem is not None)):
        raise ValueError(f"{lacking}, since {problem or 'another rank cannot connect; see what it says'}")
    whole = torch.distributed.distributed_c10d._get_default_group()
    # As patient as the ranks are with one another on the device, and never less than Composer is.
    patience = max(timedelta(seconds=300), whole._get_backend(torch_device(device)).options._timeout)
    try:
        return torch.distributed.new_group(timeout=patience, backend="gloo")
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{lacking}, since gloo cannot connect them ({reason}); {_NAME_INTERFACE}") from error


_NAME_INTERFACE = "set GLOO_SOCKET_IFNAME to the network interface that the nodes reach one another by"


def _gloo_connection_problem() -> str | None:
    if not torch.distributed.is_gloo_available():
        return "torch was built without gloo; take it out"
    if world_size() == int(os.environ.get("LOCAL_WORLD_SIZE", "1")) or os.environ.get("GLOO_SOCKET_IFNAME"):
        return None
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "127.0.0.1"  # which gloo falls back to
    if address.startswith("127."):
        return f"this host's name resolves to {address}, which other nodes do not reach; {_NAME_INTERFACE}"
    return None


def max_over_ranks(device: Device, number: int) -> int:
    """The largest of the ranks' numbers; every rank has to ask. They meet on the host, or else on ``device``."""
    if world_size() == 1:
        return number
    largest = torch.tensor([number])
    if not ranks_meet_on_host():  # which then waits for all that the device has to do
        largest = device.tensor_to_device(largest)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=host_group())
    return int(largest.item())


def autocast_dtype(device_type: str, otherwise: torch.dtype) -> torch.dtype:
    """What autocast computes matrix products in on a kind of device; ``otherwise`` where it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else otherwise


def compute_dtype(state: State) -> torch.dtype:
    """What a matmul of the model computes in: autocast's dtype, or that of its weights; call it under autocast."""
    dtypes = (p.dtype for p in state.model.parameters() if p.is_floating_point())
    return autocast_dtype(device_of(state).type, next(dtypes, torch.float32))


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether torch.compile was applied in place to the model or to a module in it: hooks would change its graph."""
    return any(module._compiled_call_impl is not None for module in model.modules())
