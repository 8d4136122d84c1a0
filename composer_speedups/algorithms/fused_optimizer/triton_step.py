"""Replace the kernel of torch's fused AdamW step by this package's Triton kernel."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from composer_speedups.surgery.optimizer_hooks import start_after_closure

if TYPE_CHECKING:
    from composer_speedups.kernels.adamw import AdamWTables

__all__ = ["TritonStep", "reason_against", "running_step", "triton_step_of"]

_torch_fused_adamw_ = torch._fused_adamw_
_running = threading.local()


def running_step() -> TritonStep | None:
    """The one whose optimizer is updating its parameters in this thread."""
    return getattr(_running, "step", None)


def _fused_adamw_(*args: Any, **kwargs: Any) -> None:
    """torch's operator, computed by the running step if that supports the call."""
    step = running_step()
    if step is None or not step.update(*args, **kwargs):
        _torch_fused_adamw_(*args, **kwargs)


class TritonStep:
    """Step hooks of an optimizer, between which its updates are computed by :mod:`composer_speedups.kernels.adamw`.

    The optimizer, its state and its hyperparameters stay torch's. Only the operator ``torch._fused_adamw_``, which
    updates all parameters of a group, is replaced, from the end of the closure to the end of the step.

    Attributes:
        updates: Number of calls of the operator that the kernel computed.
        left_to_torch: Number of calls that it did not support, for example of gradients that are not contiguous.
    """

    def __init__(self, devices: Sequence[str] = ("cuda",)) -> None:
        self.updates = self.left_to_torch = 0
        self._devices = devices
        self._tables: dict[int, AdamWTables] = {}  # address of the first parameter → tables of its group

    def install(self, optimizer: Optimizer) -> None:
        """Register the hooks."""
        self._optimizer = weakref.ref(optimizer)
        self._handles = [
            optimizer.register_step_pre_hook(self.before_step),
            optimizer.register_step_post_hook(self.after_step),
        ]
        # Permanently, because another thread may be inside a step. A TorchFunctionMode would also see every access to a
        # tensor's attributes, a thousand in a step of bert-base.
        torch._fused_adamw_ = _fused_adamw_  # type: ignore[assignment]

    def remove(self) -> None:
        """Remove the hooks."""
        self.after_step()
        for handle in self._handles:
            handle.remove()

    def before_step(self, _optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Start after the closure, if there is one, because it runs the forward and backward pass."""
        self.after_step()  # of a step that raised
        return start_after_closure(args, kwargs, self._start)

    def _start(self) -> None:
        _running.step = self

    def after_step(self, *_: Any) -> None:
        if running_step() is self:
            _running.step = None

    def update(self, *args: Any, **kwargs: Any) -> bool:
        """Compute a call of the operator; return False if the kernel does not support it, or if it is of another
        optimizer, which happens after a step of this one that raised."""
        if not self._owns(args[0][0]):
            return False
        done = self._update(*args, **kwargs)
        self.updates += done
        self.left_to_torch += not done
        return done

    def _owns(self, parameter: Tensor) -> bool:
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        return any(parameter is own for group in groups for own in group["params"])

    def _update(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        averages: list[Tensor],
        squares: list[Tensor],
        _largest: list[Tensor],
        steps: list[Tensor],
        *,
        lr: Any,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
        **others: Any,
    ) -> bool:
        # amsgrad, maximize, or grad_scale and found_inf of a loss scaler
        if isinstance(lr, Tensor) or any(value is not None and value is not False for value in others.values()):
            return False
        if not (beta1 and beta2 and all(map(self._supports, gradients))):
            return False
        from composer_speedups.kernels.adamw import AdamWTables, adamw_step  # imports Triton

        first = parameters[0].data_ptr()
        tables = self._tables.get(first)
        if tables is None or not tables.fits(parameters, averages, squares, steps):
            if not all(map(self._supports, [*parameters, *averages, *squares, *steps])):
                return False
            tables = self._tables[first] = AdamWTables(parameters, averages, squares, steps)
        adamw_step(tables, gradients, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
        # Autograd does not see what the kernel writes; it then still refuses a backward pass through old parameters.
        torch.autograd.graph.increment_version([*parameters, *averages, *squares])
        return True

    def _supports(self, tensor: Tensor) -> bool:
        plain = type(tensor) in (Tensor, torch.nn.Parameter)  # a subclass may have no memory of its own
        return (
            plain and tensor.dtype == torch.float32 and tensor.device.type in self._devices and tensor.is_contiguous()
        )


def triton_step_of(optimizer: Optimizer) -> TritonStep | None:
    """The :class:`TritonStep` that is installed in an optimizer."""
    registered: Any = optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]
    hooks = [getattr(hook, "__self__", None) for hook in registered.values()]
    return next((hook for hook in hooks if isinstance(hook, TritonStep)), None)


def reason_against(optimizer: Optimizer) -> str | None:
    """Return why the kernel cannot compute an optimizer's updates; None if it can."""
    if type(optimizer) is not torch.optim.AdamW:
        return f"computes torch.optim.AdamW, not {type(optimizer).__name__}"
    for group in optimizer.param_groups:
        in_tensors = any(isinstance(value, Tensor) for value in (group["lr"], *group["betas"]))
        if group["amsgrad"] or group["maximize"] or in_tensors:
            return "does not support amsgrad, maximize, or a learning rate or beta that is a tensor"
    if not all(beta for group in optimizer.param_groups for beta in group["betas"]):
        return "does not support a beta of 0"
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.dtype != torch.float32 or not p.is_contiguous() for p in parameters):
        return "needs contiguous float32 parameters"
    elsewhere = next((p.device.type for p in parameters if not p.is_cuda), None)
    return f"needs parameters on a CUDA GPU, and these are on the {elsewhere}" if elsewhere else None
