"""Read the scalars of Composer's training loop without making the host wait for unrelated GPU work.

Composer's ``Trainer`` creates small tensors on the device for these values: the loss, the numbers of rows, samples and
tokens, the time, and whether the epoch or the evaluation is over. It computes with them on the device, and reads them
with ``.item()``, which waits for everything launched before. The loss is known after the forward pass, so its copy to
the host starts then, before the backward pass, and the host computes with the copy. The other values are created on the
host and stay there. Several ranks reduce all of them on the host with gloo: with the default process group if it has a
CPU backend, otherwise with an additional group.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import torch
from composer import Trainer
from composer.core import Event, get_precision_context
from composer.devices import Device
from composer.distributed import ddp_sync_context
from composer.trainer import trainer as composer_trainer
from composer.utils import dist, ensure_tuple
from torch import Tensor

from composer_speedups.core.trainer_state import (
    close_host_group,
    host_group,
    open_host_group,
    ranks_meet_on_host,
    torch_device,
    world_size,
)
from composer_speedups.distributed.composer_loop import (
    TESTED_COMPOSER,
    is_defined_in_composer,
    other_composer,
    reads_no_gradients,
)

# By GPU, on whose streams alone an event can be recorded again: pinned memory of scalars that were received.
_free: dict[torch.device, list[tuple[Tensor, torch.cuda.Event]]] = defaultdict(list)


def is_busy(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.cuda.current_stream(device).query()


class HostCopy:
    """A scalar that is copied to the host as soon as the work launched before is done, on a GPU to pinned memory."""

    def __init__(self, value: Tensor) -> None:
        self._memory: tuple[Tensor, torch.cuda.Event] | None = None
        if value.device.type != "cuda":
            self._value = float(value)
            return
        self._free = _free[value.device]
        self._memory = self._free.pop() if self._free else (torch.empty((), pin_memory=True), torch.cuda.Event())
        host, done = self._memory
        host.copy_(value.detach().reshape(()), non_blocking=True)
        done.record(torch.cuda.current_stream(value.device))

    def receive(self) -> float:
        if self._memory is not None:
            host, done = self._memory
            done.synchronize()
            self._value, self._memory = host.item(), None
            self._free.append((host, done))
        return self._value


class _Part:
    """A loss of a micro-batch, as a share of the batch's. It is sent to the host when this object is made."""

    def __init__(self, loss: Tensor, share: float = 1.0) -> None:
        loss = loss.detach()
        if loss.numel() != 1 or loss.dtype != torch.float32:
            loss, share = loss.mean() * share, 1.0
        self.loss, self._share, self._sent = loss, np.float32(share), HostCopy(loss)

    def value(self, on_device: bool = False) -> Any:
        """The share in float32, as the device would compute it, of the loss that was sent, or that is on the device."""
        return np.float32(self.loss.item() if on_device else self._sent.receive()) * self._share


@dataclass
class Readback:
    device: torch.device  # of the losses
    alone: bool  # whether there is only one rank
    reads: int = 0  # one per batch and named loss
    early_reads: int = 0  # how many of them were read while the device was still computing the batch
    first: tuple[float, float] | None = None  # the first loss read, and its value on the device


class _BatchLoss(Tensor):
    """A loss of a batch, as Composer's loop uses it: the sum over micro-batches, on the CPU.

    ``+=`` takes a part, and ``item`` and ``cpu`` compute the sum. The tensor itself gets it before any other operation,
    such as those of an optimizer that asks for its closure's loss.
    """

    readback: Readback
    parts: list[_Part]
    value: float | None

    def __iadd__(self, other: _Part | Tensor) -> _BatchLoss:  # type: ignore[misc, override]
        self.parts.append(other if isinstance(other, _Part) else _Part(other))
        self.value = None
        return self

    def zero_(self) -> _BatchLoss:
        self.parts, self.value = [], None
        return self

    def item(self) -> float:
        if self.value is None:
            self.value = float(sum((part.value() for part in self.parts), np.float32(0)))
            self.readback.reads += 1
            self.readback.early_reads += is_busy(self.readback.device)
            if self.readback.first is None:
                on_device = sum((part.value(on_device=True) for part in self.parts), np.float32(0))
                self.readback.first = self.value, float(on_device)
        return self.value

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            for loss in (value for value in args if isinstance(value, _BatchLoss)):
                loss.fill_(loss.item())
            return function(*args, **(kwargs or {}))

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        """The sum over all ranks."""
        total = torch.full((1,), self.item(), dtype=torch.float32)
        if not self.readback.alone:
            dist.all_reduce(total, group=host_group())
        return total


@reads_no_gradients
def _train_microbatch(
    self: Any, use_grad_scaling: bool, current_batch_size: float, is_final_microbatch: bool
) -> dict[str, _Part]:
    """Replaces Composer's method, without automatic micro-batches. The losses to log are sent to the host before the
    backward pass, which runs on this thread, with the micro-batch's share of the batch as its initial gradient."""
    state, engine, data = self.state, self.engine, self._train_data_spec
    if state.auto_microbatching:  # ranks agree between the passes
        return type(self)._train_microbatch(self, use_grad_scaling, current_batch_size, is_final_microbatch)  # type: ignore[no-any-return]
    copied = composer_trainer.deepcopy(state.batch) if state.train_metrics else None
    size: float = data.get_num_samples_in_batch(state.batch)
    if self.accumulate_train_batch_on_tokens:
        size = data.get_num_tokens_in_batch(state.batch, token_type="loss_generating")
    share = size / current_batch_size
    with ddp_sync_context(state, is_final_microbatch, self._ddp_sync_strategy):
        engine.run_event(Event.BEFORE_FORWARD)
        with get_precision_context(state.precision, state.precision_config):
            state.outputs = state.model(state.batch)
        engine.run_event(Event.AFTER_FORWARD)
        engine.run_event(Event.BEFORE_LOSS)
        with get_precision_context(state.precision, state.precision_config):
            state.loss = self._original_model.loss(state.outputs, state.batch)
        assert state.loss is not None
        engine.run_event(Event.AFTER_LOSS)
        engine.run_event(Event.BEFORE_BACKWARD)

        total, named = _named_losses(state.loss)
        if not self.first_train_batch_complete:  # a callback may change losses before they are compared
            named = {name: loss.detach().clone() for name, loss in named.items()}
        parts = {name: _Part(loss, share) for name, loss in named.items()}
        if use_grad_scaling:
            total, share = state.scaler.scale(total).mul_(share), 1.0
        elif isinstance(state.loss, dict) and total is state.loss.get("total"):
            total, share = total.mul_(share), 1.0  # in the model's own tensor, as in Composer
        _differentiate(total, share, create_graph=self._backwards_create_graph)
        engine.run_event(Event.AFTER_BACKWARD)
        if state.train_metrics:
            state.train_metrics = self._ensure_metrics_device_and_dtype(state.train_metrics)
            self._eval_train_metrics(copied)
    return parts


def _differentiate(loss: Tensor, share: float, *, create_graph: bool) -> None:
    """``loss.backward`` with the gradient ``share``, on this thread: waking autograd's thread takes as long as
    launching the pass. A replayed graph whose loss has no hooks is launched without autograd."""
    replay = getattr(loss.grad_fn, "differentiate", None)
    if replay is None or create_graph or loss._backward_hooks or loss.retains_grad:
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward(None if share == 1 else torch.full_like(loss, share), create_graph=create_graph)
    else:
        with torch.no_grad():
            replay(loss.output_nr, _filled(share, loss.shape, loss.dtype, loss.device))


def _named_losses(loss: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss to differentiate, and the losses to log, as Composer derives them from the model's loss."""
    if isinstance(loss, dict) and "total" in loss:
        return loss["total"], {**loss, "total": loss["total"].detach().clone()}  # it will be scaled in place
    losses = ensure_tuple(loss)
    means = [(part if part.numel() == 1 else part.mean()).float() for part in losses]
    total = sum(means[1:], means[0])
    if isinstance(loss, dict):
        return total, {**loss, "total": total}
    return total, {**({f"loss{i}": part for i, part in enumerate(losses)} if losses[1:] else {}), "total": total}


@functools.lru_cache(maxsize=16)
def _filled(value: float, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor with one value, made once, which replays of CUDA graphs copy once."""
    return torch.full(shape, value, dtype=dtype, device=device)


# Methods of the Trainer that create losses, as float32 tensors of shape (1,), and those that create counts and times.
_LOSSES = ("_train_batch", "_train_microbatches")
_COUNTS = ("_train_microbatches", "_accumulate_time_across_ranks", "_iter_dataloader")


class Interception:
    """Replaces a device's ``tensor_to_device`` and handles the calls of Composer's training loop only.

    It recognizes that loop by the stack frames of its functions, because a Trainer of the user's own cannot be replaced
    by a subclass, and in the first batch it replaces that Trainer's ``_train_microbatch``. It depends on how they use
    the values, and therefore supports only one version of Composer.

    Raises:
        ValueError: It is another version, or other code has replaced one of the functions.
    """

    def __init__(self, device: Device) -> None:
        if version := other_composer():
            raise ValueError(f"supports the training loop of composer {TESTED_COMPOSER}, and this is {version}")
        for name in ("_train_loop", "_train_microbatch", *_LOSSES, *_COUNTS):
            if not is_defined_in_composer(getattr(Trainer, name)):
                raise ValueError(f"supports Composer's own training loop, and other code has replaced Trainer.{name}")
        self.readback = Readback(torch_device(device), alone=world_size() == 1)
        self._device, self._original = device, device.tensor_to_device
        self._trainer: Any = None
        methods = {name: getattr(Trainer, name) for name in (*_LOSSES, *_COUNTS)}
        codes = {name: getattr(m, "composers", m).__code__ for name, m in methods.items()}  # lean_dispatch replaces one
        self._losses, self._counts = ({codes[name] for name in names} for names in (_LOSSES, _COUNTS))

    def __call__(self, tensor: Tensor) -> Tensor:
        frame = sys._getframe(1)
        if frame.f_code in self._losses and tensor.shape == (1,) and tensor.dtype == torch.float32:
            if self._trainer is None:
                self._trainer = trainer = frame.f_locals["self"]
                if is_defined_in_composer(trainer._train_microbatch):  # and not in a subclass
                    trainer._train_microbatch = MethodType(_train_microbatch, trainer)
            loss = tensor.as_subclass(_BatchLoss)
            loss.readback, loss.parts, loss.value = self.readback, [], None
            return loss
        return tensor if frame.f_code in self._counts and ranks_meet_on_host() else self._original(tensor)

    def install(self) -> None:
        """Install it on the device, and make ranks reduce host tensors on the host; see :func:`.open_host_group`."""
        open_host_group(self._device)
        if not self.readback.alone or host_group() is not None:  # one rank may have a group, too
            composer_trainer.dist = _HostReductions()  # type: ignore[assignment]
        self._device.tensor_to_device = self  # type: ignore[method-assign, assignment]

    def undo(self) -> None:
        if vars(self._device).get("tensor_to_device") is not self:
            return
        del self._device.tensor_to_device  # type: ignore[method-assign]
        if self._trainer is not None:
            vars(self._trainer).pop("_train_microbatch", None)
            self._trainer = None
        close_host_group()
        if host_group() is None:
            composer_trainer.dist = dist


class _HostReductions:
    """``composer.utils.dist`` for Composer's Trainer, with host tensors reduced by the host's process group, and losses
    when they are read.

    NCCL refuses host tensors, so this changes no reduction that worked before.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, tensor: Tensor, reduce_operation: str = "SUM", group: Any = None) -> None:
        if not isinstance(tensor, _BatchLoss):
            dist.all_reduce(tensor, reduce_operation, group or _group_of(tensor))

    def broadcast(self, tensor: Tensor, src: int, group: Any = None) -> None:
        dist.broadcast(tensor, src, group or _group_of(tensor))


def _group_of(tensor: Tensor) -> Any:
    return host_group() if tensor.device.type == "cpu" else None
