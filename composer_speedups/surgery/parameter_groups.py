"""Parameters that change place in an optimizer whose groups, settings and schedulers stay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

__all__ = ["replace_parameters"]

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None


def replace_parameters(
    optimizers: Optimizers,
    replacements: Mapping[nn.Parameter, Sequence[nn.Parameter]],
    names: Mapping[nn.Parameter, str] | None = None,
) -> int:
    """Put new parameters where old ones were: same group, so same learning rate and weight decay.

    The number of groups, their order and their dicts stay, so schedulers do not notice. State of an old parameter
    (its moments) is dropped: it belongs to none of the new ones.

    Args:
        optimizers: One, several or None; changed in place.
        replacements: Old parameter → the new ones that take its place; one old parameter may be replaced by
            itself and others.
        names: New parameter → its name, for optimizers made from named parameters.

    Returns:
        How many new parameters were put into a group; those of an old one that no optimizer trains are left out.
    """
    if optimizers is None:
        return 0
    placed = 0
    for optimizer in [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers:
        for group in optimizer.param_groups:
            olds = list(group["params"])
            news = [list(replacements.get(old, (old,))) for old in olds]
            placed += sum(len(new) for old, new in zip(olds, news, strict=True) if old in replacements)
            group["params"][:] = [parameter for new in news for parameter in new]
            if "param_names" in group:
                old_names = dict(zip(olds, group["param_names"], strict=True))
                known = {**(names or {}), **{old: name for old, name in old_names.items() if old not in replacements}}
                group["param_names"] = [known.get(p, old_names.get(p, "")) for p in group["params"]]
        kept = {p for group in optimizer.param_groups for p in group["params"]}
        for old in replacements:
            if old not in kept:
                optimizer.state.pop(old, None)
    return placed
