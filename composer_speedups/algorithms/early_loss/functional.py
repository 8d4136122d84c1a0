"""Make a Composer Trainer read each batch's loss early."""

from __future__ import annotations

from composer.devices import Device

from composer_speedups.core.trainer_state import torch_device
from composer_speedups.distributed.host_scalars import Interception

__all__ = ["apply_early_loss"]


def apply_early_loss(device: Device) -> Interception:
    """Make a Composer Trainer on this device read each batch's loss as soon as the forward pass has ended.

    It is only for Composer's loop; your own loop can read the loss later, or not in every batch. A collective: every
    rank must call it, because the ranks create a gloo group if the default group has only NCCL.

    Args:
        device: The Trainer's device, on a CUDA GPU; its ``tensor_to_device`` is replaced in place.

    Returns:
        The replacement of the method. ``undo()`` restores the device and closes the group; ``readback`` has counts. If
        losses are sometimes dicts and sometimes tensors, call ``readback.begin_microbatch()`` before each forward pass.

    Raises:
        ValueError: The device is not a GPU, Composer's loop differs from the tested versions, or gloo cannot connect
            the ranks; see :func:`.open_host_group`.
    """
    inner = torch_device(device)
    if inner.type != "cuda":
        raise ValueError(f"early_loss needs a CUDA GPU, and this device is the {inner.type}")
    if isinstance(device.tensor_to_device, Interception):
        return device.tensor_to_device
    return _intercept(device)


def _intercept(device: Device) -> Interception:
    try:
        interception = Interception(device)
        interception.install()
    except ValueError as error:
        raise ValueError(f"early_loss {error}") from error
    return interception
