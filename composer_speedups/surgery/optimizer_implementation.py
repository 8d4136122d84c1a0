"""Change the implementation of a torch optimizer with its ``foreach`` and ``fused`` flags.

The optimizer object, its parameter groups and its state stay, so schedulers and checkpoints are not affected.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch

from composer_speedups.surgery.optimizer_swap import UnfitOptimizerError

__all__ = ["Implementation", "set_implementation"]

Implementation = Literal["foreach", "fused"]


def set_implementation(optimizer: torch.optim.Optimizer, implementation: Implementation) -> dict[str, Any]:
    """Make ``optimizer`` step with its foreach or fused implementation.

    Args:
        optimizer: A torch optimizer that has the implementation; changed in place.
        implementation: ``"foreach"`` or ``"fused"``.

    Returns:
        ``{"optimizer", "groups", "before"}``: the class name, the number of groups, and their previous implementation.

    Raises:
        UnfitOptimizerError: The optimizer does not have it, or its parameters or settings do not support it: torch
            refuses tensors as learning rates with ``foreach``, unless the optimizer is capturable. Nothing is changed.
    """
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if implementation not in optimizer.defaults or not name.startswith("torch.optim."):
        raise UnfitOptimizerError(f"{name} has no {implementation} implementation", "use torch.optim.AdamW")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if implementation == "fused":
        unfit = next((p for p in parameters if not torch.is_floating_point(p)), None)
        if unfit is not None:
            raise UnfitOptimizerError(
                f"{name} cannot be fused over {unfit.dtype} parameters", "train floating-point parameters only"
            )
    for group in optimizer.param_groups:
        _check_settings(type(optimizer), group, implementation)
    before = sorted({_implementation(group) for group in optimizer.param_groups})
    for group in [*optimizer.param_groups, optimizer.defaults]:
        group["foreach"], group["fused"] = implementation == "foreach", implementation == "fused"
    optimizer._step_supports_amp_scaling = implementation == "fused"  # type: ignore[attr-defined]  # as torch's own does
    _move_step_counts(optimizer, fused=implementation == "fused")
    return {"optimizer": name, "groups": len(optimizer.param_groups), "before": before}


def _check_settings(kind: type[torch.optim.Optimizer], group: dict[str, Any], implementation: Implementation) -> None:
    """Check a group's settings as torch's constructor does if it is called with the flag."""
    if group.get("differentiable"):
        raise UnfitOptimizerError(
            f"{kind.__name__} has differentiable=True, which {implementation} does not support",
            "set differentiable=False",
        )
    accepted = inspect.signature(kind).parameters.keys() - {"params"}
    settings = {key: value for key, value in group.items() if key in accepted}
    flags = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
    try:
        kind([torch.nn.Parameter(torch.empty(0))], **settings | flags)
    except (ValueError, RuntimeError) as error:
        raise UnfitOptimizerError(
            f"{kind.__name__} refuses {implementation}=True ({error})", "give numbers instead of tensors"
        ) from error


def _implementation(group: dict[str, Any]) -> str:
    if group.get("fused"):
        return "fused"
    return {True: "foreach", False: "for-loop", None: "torch's default"}[group.get("foreach")]


def _move_step_counts(optimizer: torch.optim.Optimizer, *, fused: bool) -> None:
    """Move step counts to the parameters' device for fused kernels, and to the CPU for the others."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), torch.Tensor) and not group.get("capturable"):
                device = parameter.device if fused else torch.device("cpu")
                state["step"] = state["step"].to(device, torch.float32)
