"""README's table of the order in which techniques engage and of those that cannot go together, from the code."""

from __future__ import annotations

from itertools import combinations

import torch

from composer_speedups.core.catalogue import technique_names
from composer_speedups.core.registry import technique_class
from composer_speedups.core.requirements import Context
from composer_speedups.core.technique import FSDP, Stage, Technique, conflicts_between

__all__ = ["clashes_of", "order_table", "ranks_table"]

_STAGES = {
    Stage.FLAGS: "process-wide flags and precision",
    Stage.SURGERY: "modules and weights changed",
    Stage.KERNELS: "layers computed by kernels that build on what surgery did",
    Stage.KERNELS: "layers computed by kernels that build on surgery",
    Stage.ADAPTERS: "parameters frozen or added",
    Stage.OPTIMIZER: "over the final parameters",
    Stage.COMPILE: "of the final modules",
    Stage.GRAPHS: "of the final step",
}


def order_table() -> list[str]:
    """Two Markdown tables: the stages in order, and the clashes with their reasons."""
    techniques = [technique_class(name) for name in technique_names()]
    lines = ["| | stage | techniques, in the order they engage |", "|---|---|---|"]
    for stage in Stage:
        names = [f"`{t.name}`" for t in techniques if t.stage == stage]
        lines.append(f"| {stage + 1} | {stage.name.lower()}: {_STAGES[stage]} | {', '.join(names)} |")
    lines += ["", "| cannot go together | because |", "|---|---|"]
    for slot in sorted({c.slot for t in techniques for c in t.conflicts if c.slot}):
        names = [f"`{t.name}`" for t in techniques if any(c.slot == slot for c in t.conflicts)]
        if len(names) > 1:
            lines.append(f"| any two of {', '.join(names)} | both set the {slot} |")
    for one, other in combinations(techniques, 2):
        reason = _reason(one, other)
        if reason:
            lines.append(f"| `{one.name}`, `{other.name}` | {reason} |")
    return lines


def ranks_table() -> list[str]:
    """A Markdown table: which techniques go with DDP and with FSDP, and why the others do not."""
    lines = ["| technique | DDP | FSDP |", "|---|---|---|"]
    for name in technique_names():
        technique = technique_class(name)
        sharded = next((c.why for c in technique.conflicts if c.other == FSDP), "yes")
        lines.append(f"| `{name}` | {_alone(technique) or 'yes'} | {sharded} |")
    return lines


def _alone(technique: type[Technique]) -> str | None:
    """Why it trains on one rank only: what two ranks leave unmet that one does not."""
    unmet = [
        [need.reason for need in technique().requirements(Context(torch.device("cpu"), ranks=ranks)) if not need.met]
        for ranks in (1, 2)
    ]
    return next((reason for reason in unmet[1] if reason not in unmet[0]), None)


def _reason(one: type[Technique], other: type[Technique]) -> str | None:
    """Why the two cannot go together, with some settings or with any; a slot that both fill aside."""
    return next((c.why for _, _, c in conflicts_between(one, other) if c.slot is None), None)


def clashes_of(name: str) -> list[str]:
    """The lines of a card's section: every technique that this one cannot go with, and why."""
    one = technique_class(name)
    others = [technique_class(other) for other in technique_names() if other != name]
    lines = [f"- `{other.name}`: {reason}" for other in others if (reason := _reason(one, other))]
    for slot in (conflict.slot for conflict in one.conflicts if conflict.slot):
        same = [f"`{other.name}`" for other in others if any(c.slot == slot for c in other.conflicts)]
        lines += [f"- {', '.join(same)}: each sets the {slot}"] if same else []
    return lines or ["None."]
