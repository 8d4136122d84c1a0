"""Replace parameters in an optimizer while its groups, settings and schedulers stay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import nn

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None


def replace_parameters(
    optimizers: Optimizers,
    replacements: Mapping[nn.Parameter, Sequence[nn.Parameter]],
    names: Mapping[nn.Parameter, str],
    *,
    for_untrained: Literal["no group", "first group"] = "no group",
) -> None:
    """Replace old parameters by new ones in the same groups, with the same learning rate and weight decay.

    The number of groups, their order and their dicts do not change, because schedulers count them; a group may become
    empty. An old parameter's state (its moments) is passed on if exactly one new parameter replaces it, and dropped
    otherwise. A second call changes nothing.

    Args:
        optimizers: One, several or None; changed in place.
        replacements: Old parameter → the new ones; an empty list removes it. Parameters that an optimizer already has
            are skipped.
        names: New parameter → its name, for optimizers that were built from named parameters.
        for_untrained: The group for new parameters whose old one is in no group.
    """
    if optimizers is None:
        return
    optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    held = {p for _, group in groups for p in group["params"]}
    successors = {old: [new for new in news if new not in held] for old, news in replacements.items()}
    untrained = [new for old, news in successors.items() if old not in held for new in news]
    for index, (optimizer, group) in enumerate(groups):
        olds = list(group["params"])
        group["params"][:] = [new for old in olds for new in successors.get(old, [old])]
        if index == 0 and for_untrained == "first group":
            group["params"] += untrained
        if "param_names" in group:  # torch records names if the optimizer was built from named parameters
            known = {**names, **dict(zip(olds, group["param_names"], strict=True))}
            group["param_names"] = [known[p] for p in group["params"]]
        for old in olds:
            if old in successors and (state := optimizer.state.pop(old, None)) and len(successors[old]) == 1:
                optimizer.state[successors[old][0]] = state
