"""The loss that Composer logs read as soon as it is known."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from composer.core import Event, State
from composer.devices import Device
from composer.loggers import Logger
from composer.utils import dist

from composer_speedups.algorithms.early_loss.readback import CUDACopies, Interception, Readback
from composer_speedups.algorithms.requirements import Context, Requirement, needs_cuda
from composer_speedups.algorithms.technique import OnUnavailable, Stage, Technique
from composer_speedups.errors import TechniqueError
from composer_speedups.state import ranks_meet_on_host, torch_device

__all__ = ["EarlyLoss", "apply_early_loss"]


_HOW_TO_MEET = "before the Trainer is made, set its device's dist_backend to 'cpu:gloo,cuda:nccl'"


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
        raise ValueError(f"early_loss needs ranks that add up numbers on the host: {_HOW_TO_MEET}")
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


class EarlyLoss(Technique):
    """The loss that Composer reads at each batch is read when it is known, and not when the batch is over.

    The host then prepares the next batch while the GPU computes gradients. Values stay as they are.

    Args:
        on_unavailable: See :class:`Technique`.

    Raises:
        TechniqueError: At INIT, without a GPU, on ranks with nccl alone, which waits for the GPU, or with another
            training loop than Composer 0.32's.
    """

    name = "early_loss"
    stage = Stage.FLAGS

    def __init__(self, *, on_unavailable: OnUnavailable = "stop") -> None:
        super().__init__(on_unavailable=on_unavailable)
        self._interception: Interception | None = None
        self._ended = False

    def requirements(self, context: Context) -> Iterable[Requirement]:
        yield needs_cuda(context, "reading the loss before the batch is over")
        yield Requirement(
            context.ranks == 1 or ranks_meet_on_host(),
            f"{context.ranks} ranks have only their GPUs to add up numbers on",
            _HOW_TO_MEET,
        )

    def engage(self, state: State) -> dict[str, Any]:
        try:
            self._interception = apply_early_loss(state.device)
        except ValueError as error:
            raise TechniqueError(self.name, str(error).removeprefix("early_loss "), "take it out") from error
        return {}

    def match(self, event: Event, state: State) -> bool:
        return super().match(event, state) or (bool(self.engaged) and event == Event.BEFORE_FORWARD)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.BEFORE_FORWARD and self._interception is not None:
            self._interception.readback.forget()
        self._ended = event == Event.FIT_END
        super().apply(event, state, logger)

    def verify(self, state: State) -> dict[str, Any]:
        assert self._interception is not None
        readback = self._interception.readback
        if readback.first is None:
            raise self.not_engaged("Composer read no loss through it", "take out what replaces the Trainer's loop")
        value, on_device = readback.first
        if not math.isclose(value, float(on_device), rel_tol=1e-6):  # ranks may be added up in another order
            raise self.not_engaged(f"it read {value}, and the GPU has {float(on_device)}", "report this as a bug")
        found: dict[str, Any] = {"losses_read": readback.reads, "read_before_the_batch_was_over": readback.ahead}
        if self._ended and 2 * readback.ahead < readback.reads:
            found["note"] = "most batches were over when the host asked: it does not keep this GPU waiting"
        return found

    def close(self) -> None:
        if self._interception is not None:
            self._interception.undo()
