"""Read the scalars of Composer's training loop without making the host wait for unrelated GPU work.

Composer's ``Trainer`` creates small tensors on the device for these values: the loss, the numbers of rows, samples and
tokens, the time, and whether the epoch or the evaluation is over. It reads them with ``.item()``, which waits for
everything launched before. The loss is known after the forward pass, so its copy to the host starts then, concurrently
with the backward pass and the optimizer's step. The other values are created on the host and stay there.
Several ranks reduce all of them on the host with gloo: with the default process group if it has a CPU backend,
otherwise with an additional group.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Any

import torch
from composer import Trainer
from composer.devices import Device
from composer.trainer import trainer as composer_trainer
from composer.utils import dist
from torch import Tensor

from composer_speedups.core.trainer_state import (
    close_host_group,
    host_group,
    open_host_group,
    ranks_meet_on_host,
    torch_device,
)
from composer_speedups.distributed.composer_loop import TESTED_COMPOSER, is_defined_in_composer, other_composer


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def mark(device: torch.device) -> Any:
    """Mark a point in a GPU's work, which is reached when everything launched so far is done; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def is_busy(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.cuda.current_stream(device).query()


class HostCopy:
    """A scalar that is being copied to the host, without waiting for work that the device does later.

    The device has computed it at the :func:`mark` ``known``, by default one that is set now. On a GPU, it is copied to
    pinned memory on a separate stream.
    """

    def __init__(self, value: Tensor, known: Any = None) -> None:
        self._value = value  # its memory must not be reused before it is copied
        self._done: torch.cuda.Event | None = None
        if value.device.type != "cuda":
            self._host = value.detach().clone()
            return
        known, stream = known or mark(value.device), _copy_stream(value.device)
        self._host = torch.empty((), dtype=torch.float32, pin_memory=True)
        with torch.cuda.stream(stream):
            stream.wait_event(known)
            self._host.copy_(value.float(), non_blocking=True)
            self._done = stream.record_event()

    def receive(self) -> float:
        if self._done is not None:
            self._done.synchronize()
        return float(self._host)


@dataclass
class Readback:
    reads: int = 0  # one per batch and named loss
    early_reads: int = 0  # how many of them were read while the device was still computing the batch
    first: tuple[float, Tensor] | None = None  # the first loss read, and the sum that the device computed
    backward_mark: Any = None  # the mark at which this micro-batch's backward pass begins, if it was seen

    def begin_microbatch(self) -> None:
        self.backward_mark = None


class _LoopScalar(Tensor):
    """A loss of a micro-batch, or the sum of a batch's losses, as Composer's loop uses them.

    ``backward`` marks the point from which the loss can be copied. ``+=`` copies what it adds, and ``item`` and ``cpu``
    compute the sum from the copies.
    """

    __torch_function__: Any = torch._C._disabled_torch_function_impl  # operations return plain tensors
    readback: Readback
    sent: list[HostCopy]
    value: float | None

    def backward(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.readback.backward_mark = mark(self.device)
        super().backward(*args, **kwargs)

    def __iadd__(self, other: Tensor) -> _LoopScalar:  # type: ignore[misc, override]
        self.sent.append(HostCopy(other, self.readback.backward_mark))
        self.value = None
        self.add_(other)
        return self

    def item(self) -> float:
        if self.value is None:
            total = torch.zeros((), dtype=torch.float32)  # summed as on the device: in float32, one after another
            for copy in self.sent:
                total += copy.receive()
            self.value = float(total)
            self.readback.reads += 1
            self.readback.early_reads += is_busy(self.device)
        return self.value

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        """The sum over all ranks, which Composer requests after it has reduced this tensor."""
        total = torch.full(self.shape, self.item(), dtype=self.dtype)
        if dist.get_world_size() > 1:
            dist.all_reduce(total, group=host_group())
        if self.readback.first is None:
            self.readback.first = float(total), self.detach().clone()
        return total


# Methods of the Trainer that create losses, as float32 tensors of shape (1,), and those that create counts and times.
_LOSSES = ("_train_batch", "_train_microbatches", "_train_microbatch")
_COUNTS = ("_train_microbatches", "_accumulate_time_across_ranks", "_iter_dataloader")


class Interception:
    """Replaces a device's ``tensor_to_device`` and handles the calls of Composer's training loop only.

    It recognizes that loop by the stack frames of its functions, because a Trainer of the user's own cannot be replaced
    by a subclass. It depends on how they use the values, and therefore supports only one version of Composer.

    Raises:
        ValueError: It is another version, or other code has replaced one of the functions.
    """

    def __init__(self, device: Device) -> None:
        if version := other_composer():
            raise ValueError(f"supports the training loop of composer {TESTED_COMPOSER}, and this is {version}")
        for name in ("_train_loop", *_LOSSES, *_COUNTS):
            if not is_defined_in_composer(getattr(Trainer, name)):
                raise ValueError(f"supports Composer's own training loop, and other code has replaced Trainer.{name}")
        self.readback = Readback()
        self._device, self._original = device, device.tensor_to_device
        methods = {name: getattr(Trainer, name) for name in (*_LOSSES, *_COUNTS)}
        codes = {name: getattr(m, "composers", m).__code__ for name, m in methods.items()}  # lean_dispatch replaces one
        self._losses, self._counts = ({codes[name] for name in names} for names in (_LOSSES, _COUNTS))

    def __call__(self, tensor: Tensor) -> Tensor:
        caller = sys._getframe(1).f_code
        if caller in self._losses and tensor.shape == (1,) and tensor.dtype == torch.float32:
            scalar = self._move(tensor).as_subclass(_LoopScalar)
            scalar.readback, scalar.sent, scalar.value = self.readback, [], None
            return scalar
        return tensor if caller in self._counts and ranks_meet_on_host() else self._original(tensor)

    def _move(self, tensor: Tensor) -> Tensor:
        if float(tensor) == 0:  # created on the device, because a copy from pageable memory makes the host wait
            return torch.zeros_like(tensor, device=torch_device(self._device))
        return self._original(tensor)

    def install(self) -> None:
        """Install it on the device, and make ranks reduce host tensors on the host; see :func:`.open_host_group`."""
        open_host_group(self._device)
        if host_group() is not None:
            composer_trainer.dist = _HostReductions()  # type: ignore[assignment]
        self._device.tensor_to_device = self  # type: ignore[method-assign, assignment]

    def undo(self) -> None:
        if vars(self._device).get("tensor_to_device") is not self:
            return
        del self._device.tensor_to_device  # type: ignore[method-assign]
        close_host_group()
        if host_group() is None:
            composer_trainer.dist = dist


class _HostReductions:
    """``composer.utils.dist`` for Composer's Trainer, with host tensors reduced by the host's process group.

    NCCL refuses host tensors, so this changes no reduction that worked before.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, tensor: Tensor, reduce_operation: str = "SUM", group: Any = None) -> None:
        dist.all_reduce(tensor, reduce_operation, group or _group_of(tensor))

    def broadcast(self, tensor: Tensor, src: int, group: Any = None) -> None:
        dist.broadcast(tensor, src, group or _group_of(tensor))


def _group_of(tensor: Tensor) -> Any:
    return host_group() if tensor.device.type == "cpu" else None
