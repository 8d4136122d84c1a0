"""Access to Composer's State and agreement between ranks; does not import Composer."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from composer_speedups.core.errors import first_line

if TYPE_CHECKING:
    from composer.core import State
    from composer.devices import Device


def torch_device(device: Device) -> torch.device:
    inner: Any = device._device
    return inner  # type: ignore[no-any-return]


def device_of(state: State) -> torch.device:
    return torch_device(state.device)


def is_composer_model(model: Any) -> bool:
    """Whether a model is a ComposerModel, without importing Composer."""
    models = sys.modules.get("composer.models")
    return models is not None and isinstance(model, models.ComposerModel)


def model_of(state: State) -> Any:
    """The ComposerModel inside a DistributedDataParallel wrapper, or the model itself."""
    return state.model.module if state.is_model_ddp else state.model


def last_batch(state: State) -> int | None:
    """The number of the last batch of ``fit``, if it is known."""
    until, length = state.max_duration, state.dataloader_len
    if until is None:
        return None
    batches = {"ba": 1, "ep": None if length is None else length.value}.get(until.unit.value)
    return None if batches is None else until.value * batches


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor sharded by FSDP; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def world_size() -> int:
    """Number of processes that train together; also valid before torch.distributed is initialized."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


_alone = False


@contextlib.contextmanager
def loss_of_this_rank() -> Iterator[None]:
    """Make losses in the block use this rank's samples alone, because other ranks may not be computing theirs."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def loss_ranks() -> int:
    """Number of ranks whose samples a loss may gather: all of them, or 1 inside :func:`loss_of_this_rank`."""
    return 1 if _alone else world_size()


_host_groups: list[Any] = []  # the shared process group, once per user


def ranks_meet_on_host() -> bool:
    """Whether host tensors can be reduced across ranks: the default group has gloo, or there is one rank."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return True
    return bool(_host_groups) or "cpu:" in torch.distributed.get_backend_config()


def host_group() -> Any:
    """The process group for reductions of host tensors; None for the default group."""
    return _host_groups[-1] if _host_groups else None


def open_host_group(device: Device) -> None:
    """Enable reductions of host tensors, with a gloo group if the default group only has NCCL, until as many calls of
    :func:`close_host_group`. Collective; a ValueError, with the fix after the semicolon, if gloo cannot connect."""
    if _host_groups or not ranks_meet_on_host():
        _host_groups.append(host_group() or _new_host_group(device))


def close_host_group() -> None:
    if _host_groups and (group := _host_groups.pop()) not in _host_groups:
        with contextlib.suppress(ValueError):  # the process has already left the default group and all others
            torch.distributed.destroy_process_group(group)


def _new_host_group(device: Device) -> Any:
    whole = torch.distributed.distributed_c10d._get_default_group()
    # The same timeout as on the device, and at least Composer's.
    patience = max(timedelta(seconds=300), whole._get_backend(torch_device(device)).options._timeout)
    try:
        return torch.distributed.new_group(timeout=patience, backend="gloo")
    except RuntimeError as error:
        raise ValueError(
            f"gloo cannot connect the {world_size()} ranks ({first_line(error)}); set GLOO_SOCKET_IFNAME to the "
            "network interface that connects the nodes"
        ) from error


def max_over_ranks(device: Device, number: int) -> int:
    """The maximum over ranks. Collective; it is computed on the host if possible, otherwise on ``device``."""
    if world_size() == 1:
        return number
    largest = torch.tensor([number])
    if not ranks_meet_on_host():  # this waits for all work queued on the device
        largest = device.tensor_to_device(largest)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=host_group())
    return int(largest.item())


def any_rank(device: Device, here: bool) -> bool:
    """Whether ``here`` is true on any rank, so that all ranks continue in the same way. Collective."""
    return bool(max_over_ranks(device, int(here)))


def weight_dtypes(model: torch.nn.Module) -> Counter[torch.dtype]:
    """The dtypes of a model's floating-point parameters, each with its number of values."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    return sizes


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether torch.compile was applied to the model or one of its modules; hooks would change its graph."""
    return any(m._compiled_call_impl is not None or "_orig_mod" in m._modules for m in model.modules())
