"""The loss that Composer logs read as soon as it is known."""

from __future__ import annotations

from composer.devices import Device

from composer_speedups.core.trainer_state import torch_device
from composer_speedups.distributed.host_scalars import CUDACopies, Interception, Readback

__all__ = ["apply_early_loss"]


def apply_early_loss(device: Device) -> Interception:
    """Have a Composer Trainer on this device read each batch's loss as soon as the forward pass is done.

    For Composer's loop alone: a loop of one's own reads the loss later, or not at each batch. On several ranks, every
    one of them has to call it, for they make a gloo group of their own where the default group is NCCL's alone.

    Args:
        device: The Trainer's, on a CUDA GPU; its ``tensor_to_device`` is replaced in place.

    Returns:
        What stands for the method; ``undo()`` gives the device its own back and closes the group, and ``readback``
        counts. Where losses are dicts now and tensors then, ``readback.forget()`` has to be called before each forward
        pass.

    Raises:
        ValueError: A device that is no GPU, a Composer whose loop is another than those it was tested with, or ranks
            that gloo cannot connect; see :func:`.open_host_group`.
    """
    inner = torch_device(device)
    if inner.type != "cuda":
        raise ValueError(f"early_loss gets ahead of a GPU, and this device is the {inner.type}")
    if isinstance(device.tensor_to_device, Interception):
        return device.tensor_to_device
    return _intercept(device, Readback(CUDACopies(inner)))


def _intercept(device: Device, readback: Readback) -> Interception:
    try:
        interception = Interception(device, readback)
        interception.install()
    except ValueError as error:
        raise ValueError(f"early_loss {error}") from error
    return interception
