"""Change the implementation of a torch optimizer with its ``foreach`` and ``fused`` flags.

The optimizer object, its parameter groups and its state stay, so schedulers and checkpoints are not affected.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

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
        ValueError: The optimizer does not have it, or its parameters do not support it.
    """
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if implementation not in optimizer.defaults or not name.startswith("torch.optim."):
        raise ValueError(f"{name} has no {implementation} implementation")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if implementation == "fused":
        unfit = next((p for p in parameters if not torch.is_floating_point(p)), None)
        if unfit is not None:
            raise ValueError(f"{name} cannot be fused over {unfit.dtype} parameters")
    before = sorted({_implementation(group) for group in optimizer.param_groups})
    for group in [*optimizer.param_groups, optimizer.defaults]:
        group["foreach"], group["fused"] = implementation == "foreach", implementation == "fused"
    optimizer._step_supports_amp_scaling = implementation == "fused"  # type: ignore[attr-defined]  # as torch's own does
    _move_step_counts(optimizer, fused=implementation == "fused")
    return {"optimizer": name, "groups": len(optimizer.param_groups), "before": before}


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
