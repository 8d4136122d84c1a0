"""New parameters take the groups and the state of those that they replace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from composer_speedups.core.optimizer_state import replace_parameters


@pytest.mark.parametrize("untrained", ["no group", "first group"])
@pytest.mark.pins
def test_new_parameters_replace_old_ones(untrained: Any) -> None:
    kept, copied, split, removed, outside, *new = [nn.Parameter(torch.full((2,), float(i))) for i in range(9)]
    groups: list[dict[str, Any]] = [
        {"params": [("kept", kept), ("copied", copied)], "lr": 1.0},
        {"params": [("split", split), ("removed", removed)], "lr": 2.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    for p in (kept, copied, split, removed):
        p.grad = torch.ones(2)
    optimizer.step()
    moments = {p: optimizer.state[p] for p in (kept, copied)}
    old_groups = list(optimizer.param_groups)
    replacements = {copied: [new[0]], split: new[1:3], removed: [], outside: [new[3]]}
    names = {p: f"new{i}" for i, p in enumerate(new)}
    for _ in range(2):  # the second call changes nothing
        replace_parameters([optimizer], replacements, names, for_untrained=untrained)
        assert all(a is b for a, b in zip(optimizer.param_groups, old_groups, strict=True))
        more = [new[3]] if untrained == "first group" else []
        held = [[id(p) for p in group["params"]] for group in old_groups]
        assert held == [[id(p) for p in [kept, new[0], *more]], [id(p) for p in new[1:3]]]
        assert old_groups[0]["param_names"] == ["kept", "new0", *(["new3"] if more else [])]
        assert old_groups[1]["param_names"] == ["new1", "new2"]
        assert dict(optimizer.state) == {kept: moments[kept], new[0]: moments[copied]}
