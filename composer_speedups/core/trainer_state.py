"""What Composer's State holds, without its wrappers, and what its ranks agree on; imports nothing of Composer."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from composer.core import State
    from composer.devices import Device

__all__ = [
    "autocast_dtype",
    "compute_dtype",
    "device_of",
    "is_compiled",
    "is_composer_model",
    "local_shard",
    "max_over_ranks",
    "model_of",
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


def ranks_meet_on_host() -> bool:
    """Whether numbers on the host can be added up over the ranks as they are: by gloo, or because there is one rank."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return True
    return "cpu:" in torch.distributed.get_backend_config()


def max_over_ranks(device: Device, number: int) -> int:
    """The largest of the ranks' numbers; every rank has to ask. They meet on the host, or else on ``device``."""
    if world_size() == 1:
        return number
    largest = torch.tensor([number])
    if not ranks_meet_on_host():  # which then waits for all that the device has to do
        largest = device.tensor_to_device(largest)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
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
