"""LoRA: the base model frozen, low-rank adapters and the classifier trained."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from composer.core import State
from pydantic import Field
from torch import Tensor, nn
from torch.nn import Parameter

from composer_speedups.algorithms.lora.adapters import (
    ADAPTER,
    adapted_layers,
    host,
    trained_copies,
)
from composer_speedups.algorithms.lora.export import merged_state_dict, save_adapter
from composer_speedups.algorithms.lora.functional import MOST_RANKS, apply_lora
from composer_speedups.core.requirements import Context, Requirement, needs_package
from composer_speedups.core.technique import Conflict, Stage, Technique
from composer_speedups.core.trainer_state import model_of


class LoRA(Technique):
    """Frozen base model, low-rank adapters (PEFT) and a classifier trained whole.

    Raises:
        TechniqueError: At INIT, without PEFT, or when a target matches nothing.
    """

    name = "lora"
    stage = Stage.ADAPTERS
    changes_structure = True
    exactness = "recipe"
    conflicts = (
        Conflict("sparse_upcycling", "LoRA freezes the experts and the router, which would stay the copies they are"),
    )
    gain = 1.15

    rank: int = Field(8, ge=1, le=MOST_RANKS)
    """Rank of the adapters."""
    alpha: float = Field(16.0, gt=0)
    """The adapters' output is scaled by alpha / rank."""
    targets: Literal["all-linear"] | list[str] | None = Field(None)
    """Ends of the names of the Linear modules to adapt; null is query and value."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """On the adapters' input."""
    modules_to_save: list[str] | None = Field(None)
    """Modules trained whole; null is the classification head."""

    def reset(self) -> None:
        super().reset()
        self._before: dict[str, Tensor] = {}
        self._rate = 0.0

    def requirements(self, context: Context) -> Iterable[Requirement]:
        yield needs_package("peft", "composer_speedups[lora]")

    def engage(self, state: State) -> dict[str, Any]:
        settings = (self.rank, self.alpha, self.targets, self.dropout, self.modules_to_save)
        with self.refusals():
            apply_lora(state.model, state.optimizers, *settings)
        inner = host(state.model)
        trained, frozen = _split(inner)
        return {
            "modules": len(adapted_layers(inner)),
            "trained_whole": ", ".join(trained_copies(inner)),
            "trainable_parameters": sum(p.numel() for p in trained.values()),
            "total_parameters": sum(p.numel() for p in (*trained.values(), *frozen.values())),
        }

    def watch(self, state: State) -> None:
        """Note the weights' sums and the learning rate before the first step."""
        if not self._before:
            trained, frozen = _split(host(model_of(state)))
            self._before = _sums({**trained, **frozen})
            self._rate = max(float(group["lr"]) for o in state.optimizers for group in o.param_groups)

    def verify(self, state: State) -> dict[str, Any]:
        """The adapters got gradients and moved, the base got none and did not."""
        if not self._before:
            return {}
        inner = host(model_of(state))
        trained, frozen = _split(inner)
        before, self._before = self._before, {}
        now = _sums({**trained, **frozen})
        adapters = [layer.lora_B[ADAPTER].weight for layer in adapted_layers(inner).values()]
        moved = [name for name in trained if not torch.equal(now[name], before[name])]
        changed = [name for name in frozen if not torch.equal(now[name], before[name])]
        gradients = [p.grad for p in adapters if p.grad is not None and bool(p.grad.count_nonzero())]
        if changed or any(p.grad is not None for p in frozen.values()):
            raise self.not_engaged(
                f"frozen weights were trained ({changed[0] if changed else 'they have gradients'})",
                "leave the optimizer's groups and requires_grad as they are after INIT",
            )
        if not gradients and not moved:
            raise self.not_engaged("no adapter got a gradient", "leave the adapters on after INIT")
        if left_out := _left_out(trained, state):
            raise self.not_engaged(f"the optimizer does not hold {left_out}", "leave its groups as they are after INIT")
        skipped = any(not bool(g.isfinite().all()) for g in gradients)  # fp16 skips a step that overflowed
        evidence = {"adapters_with_gradient": len(gradients), "base_unchanged": True}
        if not moved and self._rate == 0 and state.timestamp.batch.value <= 2:
            self._before = before  # a warm-up begins at 0: look again at the end
            return evidence
        if not moved and not skipped and _peak_rate(state) > 0:
            raise self.not_engaged("no step moved an adapter", "leave the optimizer as it is after INIT")
        return {**evidence, "parameters_moved": len(moved)}

    def export(self, state: State, weights: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The adapters go to ``adapter/`` beside ``folder``; the merged weights are returned."""
        inner = host(model_of(state))
        save_adapter(inner, folder.parent / "adapter", weights)
        return merged_state_dict(inner, weights)


def _split(model: nn.Module) -> tuple[dict[str, Parameter], dict[str, Parameter]]:
    """The parameters that are trained, and the frozen ones, by what PEFT made of them, not by requires_grad."""
    added = [m[ADAPTER] for layer in adapted_layers(model).values() for m in (layer.lora_A, layer.lora_B)]
    added += [wrapper.modules_to_save[ADAPTER] for wrapper in trained_copies(model).values()]
    ours = {p for module in added for p in module.parameters()}
    named = dict(model.named_parameters())
    return {n: p for n, p in named.items() if p in ours}, {n: p for n, p in named.items() if p not in ours}


@torch.no_grad()
def _sums(parameters: dict[str, Parameter]) -> dict[str, Tensor]:
    """A float64 sum each, which every update changes; weights changed through ``.data`` keep their version count."""
    return {name: p.sum(dtype=torch.float64) for name, p in parameters.items()}


def _peak_rate(state: State) -> float:
    groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
    return max(float(group.get("initial_lr", group["lr"])) for group in groups)  # the latter may have decayed to 0


def _left_out(trained: dict[str, Parameter], state: State) -> str | None:
    """A trained parameter in no group; an optimizer that holds copies (on the host, say) is not asked."""
    held = {id(p) for optimizer in state.optimizers for group in optimizer.param_groups for p in group["params"]}
    mine = {name: id(p) for name, p in trained.items()}
    if held.isdisjoint(mine.values()):
        return None
    return next((name for name, key in mine.items() if key not in held), None)
