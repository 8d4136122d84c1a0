"""AdamW with its state and step on the CPU, for parameters on a GPU.

torchao's CPUOffloadOptimizer does not work with Composer's Trainer. It copies gradients to the CPU during the backward
pass, hence before they are clipped, unscaled or averaged over ranks. It calls the closure, which runs Composer's
forward and backward pass, with gradients disabled. And it has neither ``state`` nor hooks, so Composer cannot save it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw


class HostAdamW(Optimizer):
    """AdamW that copies gradients and weights to the CPU in each step, updates them there, and copies weights back.

    It keeps no weights between steps, so weights that were loaded or changed in between are used.

    Args:
        groups: Parameter groups with ``params``, ``lr``, ``betas``, ``eps`` and ``weight_decay``.
        defaults: These settings for groups that lack them.

    Source: ZeRO-Offload (arXiv 2101.06840).
    """

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        self.register_load_state_dict_post_hook(_to_host)  # torch moves a loaded state to its parameters' device

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()  # with gradients enabled, by a hook
        for group in self.param_groups:
            stepped = [p for p in group["params"] if p.grad is not None]
            weights, gradients = [_host(p) for p in stepped], [_host(p.grad) for p in stepped]
            for device in {p.device for p in stepped if p.is_cuda}:
                torch.cuda.synchronize(device)  # the copies to the host do not wait
            states = [self.state[p] for p in stepped]
            for weight, state in zip(weights, states, strict=True):
                if not state:
                    moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                    state.update(step=torch.zeros((), dtype=torch.float32), **moments)
            adamw(
                weights,
                gradients,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                maximize=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
            )
            for parameter, weight in zip(stepped, weights, strict=True):
                parameter.copy_(weight, non_blocking=True)
        return loss


def _host(tensor: Tensor) -> Tensor:
    """A copy in pinned host memory, which is complete once the device is synchronized."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)


def _to_host(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state.update({key: value.cpu() for key, value in state.items() if isinstance(value, Tensor)})
