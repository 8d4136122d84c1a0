"""Replay an optimizer's step as a CUDA graph of its own, which does not depend on the shape of the batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from operator import is_
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Adam, AdamW
from torch.optim import optimizer as torch_optimizer

from composer_speedups.algorithms.cuda_graphs.graphed_calls import generators_restored
from composer_speedups.core.errors import first_line

_CONSTANTS = ("betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "decoupled_weight_decay")  # in a graph
_MOST_CAPTURES = 8  # in a run that keeps changing what the graph was captured with


def cannot_replay(optimizer: Any) -> str | None:
    """Why the steps of an optimizer cannot be replayed; None if they can."""
    groups = optimizer.param_groups
    if type(optimizer) not in (Adam, AdamW) or not all(group["fused"] for group in groups):
        return f"the step of {type(optimizer).__name__} is not that of torch's fused Adam or AdamW"
    if any(isinstance(group["lr"], Tensor) for group in groups):
        return "the learning rate is a tensor"
    return None


class OptimizerStep:
    """Replaces the ``step`` of torch's fused Adam or AdamW, and replays it as long as the gradients have the same
    memory in every step, which the graph reads. Without Composer, each backward pass makes new tensors with it.

    Other steps run eagerly: the first ones, those with gradients that were accumulated over micro-batches or scaled,
    and those of an optimizer with hooks. The groups keep the learning rate as a float. A graph reads it from the
    device, where it is float32, so eager steps round it, too.

    Args:
        optimizer: Its method is replaced; :meth:`release` restores it.
        recorder: Makes a ``CUDARecorder``, one for each capture: the memory of a freed graph cannot be used again.
        waits: Whether nothing may be captured yet.
        failed: Called after a failed capture, which leaves the random generator without the state of other graphs.

    Attributes:
        replays: Number of replayed steps.
        note: Why steps are not replayed, as far as is known, or None.
    """

    def __init__(
        self,
        optimizer: Any,
        recorder: Callable[[], Any],
        waits: Callable[[], bool] = bool,
        failed: Callable[[], object] = bool,
    ) -> None:
        self._optimizer, self._recorder, self._waits, self._failed = optimizer, recorder, waits, failed
        self.replays = self._captures = 0
        self.note: str | None = None
        self._ended = False  # whether nothing is captured any more
        self._released = False
        self._replay: Callable[[], None] | None = None
        self._ends: tuple[Any, ...] = ()  # the first and the last parameter that it writes
        self._captured: Any = None  # the other settings of the capture
        self._addresses: list[int | None] = []  # of the gradients that the graph reads
        self._kept: list[Any] = []  # keeps the memory that the graph reads and writes; the gradients are first
        self._rates: list[Tensor] = []  # learning rates on the device, one per group
        self._written: list[float | None] = []  # their last written values; None if unknown
        self._last_gradient: Tensor | None = None  # of the last parameter in the previous step; keeps its memory alive
        self._before = vars(optimizer).get("step")  # that of a scheduler, which notes the call
        self._step: Callable[..., Any] = self._before or MethodType(type(optimizer).step, optimizer)

        @wraps(self._step)  # with a scheduler's mark
        def step(_: Any, closure: Callable[[], Any] | None = None) -> Any:
            return self(closure)

        self._installed = optimizer.step = MethodType(step, optimizer)  # schedulers wrap the function of a method

    def release(self) -> None:
        """Restore the optimizer's method. A scheduler that has wrapped it keeps it, and its steps are eager."""
        self._released = True
        self.forget()
        if vars(self._optimizer).get("step") is self._installed:
            del self._optimizer.step
            if self._before is not None:
                self._optimizer.step = self._before

    def forget(self) -> None:
        """Drop the graph; a later step is captured again."""
        self._replay, self._kept, self._last_gradient = None, [], None

    def __call__(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._released:
            return self._step(closure)
        if not _is_plain(self._optimizer):
            self.note = "a hook hears the optimizer's step, or its gradients are scaled"
            return self._run_eagerly(closure)
        self.note = self.note if self._ended else None  # such as that of the observed batch
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._is_captured():
            self._run_eagerly(None)
            return loss
        for i, group in enumerate(self._optimizer.param_groups):
            if group["lr"] != self._written[i]:
                self._rates[i].fill_(group["lr"])
                self._written[i] = group["lr"]
        self._optimizer._opt_called = True  # as a scheduler's wrapper notes
        self._replay()  # type: ignore[misc]
        self.replays += 1
        return loss

    def _run_eagerly(self, closure: Callable[[], Any] | None) -> Any:
        rates = [(group, group["lr"]) for group in self._optimizer.param_groups]
        rounded = [rate if isinstance(rate, Tensor) else float(np.float32(rate)) for _, rate in rates]
        for (group, _), rate in zip(rates, rounded, strict=True):
            group["lr"] = rate
        try:
            return self._step(closure)
        finally:
            for (group, rate), ours in zip(rates, rounded, strict=True):
                if group["lr"] is ours:  # otherwise a hook has set it meanwhile
                    group["lr"] = rate

    def _is_captured(self) -> bool:
        groups, state = self._optimizer.param_groups, self._optimizer.state
        gradients = [parameter.grad for group in groups for parameter in group["params"]]
        if self._replay is not None and self._reads(gradients) and self._settings() == self._captured:
            self._last_gradient = self._ends[1].grad
            return True
        trained = [p for group in groups for p in group["params"] if p.grad is not None]
        before, self._last_gradient = self._last_gradient, trained[-1].grad if trained else None
        if before is None or self._last_gradient is None or self._ended or self._waits():
            return False
        if before.data_ptr() != self._last_gradient.data_ptr() or not all(state.get(p) for p in trained):
            return False  # an eager step makes the state
        if (reason := cannot_replay(self._optimizer)) is not None:  # a loaded state has its own settings
            self.note = reason
            return False
        self._addresses, self._ends = _addresses(gradients), (trained[0], trained[-1])
        # While a gradient is referenced, the allocator cannot give its memory to another one.
        self._kept = [gradients, state, *(value for p in trained for value in state[p].values())]
        self._captured, self._replay = self._settings(), None
        self._capture(trained[0].device)
        return self._replay is not None

    def _reads(self, gradients: list[Tensor | None]) -> bool:
        """Whether the graph reads the memory of these gradients, most often of the same tensors."""
        return all(map(is_, gradients, self._kept[0])) or _addresses(gradients) == self._addresses

    def _settings(self) -> Any:
        """What a graph depends on besides the gradients. A new or loaded state consists of other tensors, moving a
        module or setting ``grad.data`` changes a tensor's memory, and the groups' settings are constants in a graph."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        moments = [id(state.get(p, {}).get("exp_avg")) for p in self._ends]
        memory = [tensor.data_ptr() for p in self._ends for tensor in (p, p.grad)]
        return id(state), len(state), moments, memory, [(len(g["params"]), *map(g.get, _CONSTANTS)) for g in groups]

    def _capture(self, device: torch.device) -> None:
        optimizer = self._optimizer
        if self._captures == _MOST_CAPTURES:
            self.note, self._ended = f"gradients or settings changed after each of {_MOST_CAPTURES} captures", True
            return
        self._captures += 1
        self._written = [None] * len(optimizer.param_groups)
        kept = [(group, {name: group[name] for name in ("lr", "capturable")}) for group in optimizer.param_groups]
        self._rates = [
            torch.tensor(group["lr"], dtype=torch.float32, device=next((p.device for p in group["params"]), device))
            for group in optimizer.param_groups
        ]
        try:
            for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
                group.update(lr=rate, capturable=True)
            with generators_restored():
                _, self._replay = self._recorder().record(partial(type(optimizer).step, optimizer))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, AssertionError) as error:
            self.note, self._ended = f"it cannot be captured ({first_line(error)})", True
        finally:
            for group, values in kept:
                group.update(values)
        if self._replay is None:
            self.forget()
            self._failed()


def _addresses(gradients: list[Tensor | None]) -> list[int | None]:
    return [None if gradient is None else gradient.data_ptr() for gradient in gradients]


def _is_plain(optimizer: Any) -> bool:
    """Whether a step only updates the parameters: no hook hears it, and no loss is scaled."""
    return not (
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or getattr(optimizer, "grad_scale", None) is not None
        or getattr(optimizer, "found_inf", None) is not None
    )
