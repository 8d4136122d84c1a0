"""The loss that Composer logs read as soon as it is known."""

from __future__ import annotations

from composer.devices import Device
from composer.utils import dist

from composer_speedups.core.trainer_state import ranks_meet_on_host, torch_device
from composer_speedups.distributed.host_scalars import CUDACopies, Interception, Readback

__all__ = ["apply_early_loss"]


HOW_TO_MEET = "before the Trainer is made, set its device's dist_backend to 'cpu:gloo,cuda:nccl'"


def apply_early_loss(device: Device) -> Interception:
    """Have a Composer Trainer on this device read each batch's loss as soon as the forward pass is done.

    For Composer's loop alone: a loop of one's own reads the loss later, or not at each batch.

    Args:
        device: The Trainer's, on a CUDA GPU; its ``tensor_to_device`` is replaced in place.

    Returns:
        What stands for the method; ``undo()`` gives the device its own back, and ``readback`` counts. Where losses
        are dicts now and tensors then, ``readback.forget()`` has to be called before each forward pass.

    Raises:
        ValueError: A device that is no GPU, ranks that have only GPUs to meet on, or a Composer whose loop is another.
    """
    inner = torch_device(device)
    if inner.type != "cuda":
        raise ValueError(f"early_loss gets ahead of a GPU, and this device is the {inner.type}")
    if dist.get_world_size() > 1 and not ranks_meet_on_host():
        raise ValueError(f"early_loss needs ranks that add up numbers on the host: {HOW_TO_MEET}")
    if isinstance(device.tensor_to_device, Interception):
        return device.tensor_to_device
    return _intercept(device, Readback(CUDACopies(inner)))


def _intercept(device: Device, readback: Readback) -> Interception:
    try:
        interception = Interception(device, readback)
    except AttributeError as error:
        raise ValueError(f"early_loss does not know this version of Composer: {error}") from error
    interception.install()
    return interception
