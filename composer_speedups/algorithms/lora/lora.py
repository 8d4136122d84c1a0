"""The LoRA technique: trains low-rank adapters and the classifier of a frozen model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from composer.core import State
from pydantic import Field
from torch import Tensor, nn
from torch.nn import Parameter

from composer_speedups.algorithms.lora.adapters import ADAPTER, adapted_layers, adapter_host, trained_copies
from composer_speedups.algorithms.lora.export import merged_state_dict, save_adapter
from composer_speedups.algorithms.lora.functional import MAX_RANK, apply_lora
from composer_speedups.core.requirements import Context, Requirement, needs_package
from composer_speedups.core.technique import Conflict, Stage, Technique
from composer_speedups.core.trainer_state import model_of


class LoRA(Technique):
    """Freezes the base model, and trains low-rank adapters (PEFT) and the whole classifier.

    Raises:
        TechniqueError: At INIT, without PEFT, or if a target does not match.
    """

    name = "lora"
    stage = Stage.ADAPTERS
    exactness = "recipe"
    conflicts = (
        Conflict("sparse_upcycling", "LoRA freezes the experts and the router, so the experts would remain equal"),
    )
    gain = 1.15

    rank: int = Field(8, ge=1, le=MAX_RANK)
    """Rank of the adapters."""
    alpha: float = Field(16.0, gt=0)
    """The adapters' output is scaled by alpha / rank."""
    targets: Literal["all-linear"] | list[str] = Field("all-linear")
    """Name suffixes of the Linear modules to adapt; all-linear for all of them except for the head."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of the adapters' input."""
    modules_to_save: list[str] | None = Field(None)
    """Modules to train in full; null for the classification head."""

    @staticmethod
    def required_on_load() -> bool:
        return True

    def reset(self) -> None:
        super().reset()
        self._before: dict[str, Tensor] = {}
        self._rate = 0.0

    def requirements(self, context: Context) -> Iterable[Requirement]:
        yield needs_package("peft", ".[lora]")

    def engage(self, state: State) -> dict[str, Any]:
        settings = (self.rank, self.alpha, self.targets, self.dropout, self.modules_to_save)
        with self.refusals():
            apply_lora(state.model, state.optimizers, *settings)
        inner = adapter_host(state.model)
        trained, frozen = _trained_and_frozen(inner)
        return {
            "modules": len(adapted_layers(inner)),
            "trained_whole": ", ".join(trained_copies(inner)),
            "trainable_parameters": sum(p.numel() for p in trained.values()),
            "total_parameters": sum(p.numel() for p in (*trained.values(), *frozen.values())),
        }

    def watch(self, state: State) -> None:
        """Record the sums of the weights and the learning rate before the first step."""
        if not self._before:
            trained, frozen = _trained_and_frozen(adapter_host(model_of(state)))
            self._before = _sums({**trained, **frozen})
            self._rate = max(float(group["lr"]) for o in state.optimizers for group in o.param_groups)

    def verify(self, state: State) -> dict[str, Any]:
        """Check that the adapters have gradients and changed, and that frozen weights do not and did not."""
        if not self._before:
            return {}
        inner = adapter_host(model_of(state))
        trained, frozen = _trained_and_frozen(inner)
        before, self._before = self._before, {}
        now = _sums({**trained, **frozen})
        adapters = [layer.lora_B[ADAPTER].weight for layer in adapted_layers(inner).values()]
        moved = [name for name in trained if not torch.equal(now[name], before[name])]
        changed = [name for name in frozen if not torch.equal(now[name], before[name])]
        gradients = [p.grad for p in adapters if p.grad is not None and bool(p.grad.count_nonzero())]
        if changed or any(p.grad is not None for p in frozen.values()):
            raise self.not_engaged(
                f"frozen weights were trained ({changed[0] if changed else 'they have gradients'})",
                "do not change the optimizer's groups and requires_grad after INIT",
            )
        if not gradients and not moved:
            raise self.not_engaged("no adapter got a gradient", "do not disable the adapters after INIT")
        if left_out := _left_out(trained, state):
            raise self.not_engaged(f"the optimizer does not have {left_out}", "do not change its groups after INIT")
        skipped = any(not bool(g.isfinite().all()) for g in gradients)  # fp16 skips a step that overflowed
        evidence = {"adapters_with_gradient": len(gradients), "base_unchanged": True}
        if not moved and self._rate == 0 and state.timestamp.batch.value <= 2:
            self._before = before  # the learning rate warms up from 0; check again at the end
            return evidence
        if not moved and not skipped and _peak_rate(state) > 0:
            raise self.not_engaged("no step changed an adapter", "do not change the optimizer after INIT")
        return {**evidence, "parameters_moved": len(moved)}

    def export(self, state: State, weights: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Save the adapters in ``adapter/`` next to ``folder``, and return the merged weights."""
        inner = adapter_host(model_of(state))
        save_adapter(inner, folder.parent / "adapter", weights)
        return merged_state_dict(inner, weights)


def _trained_and_frozen(model: nn.Module) -> tuple[dict[str, Parameter], dict[str, Parameter]]:
    """Return the trained and the frozen parameters, according to PEFT's modules, not to requires_grad."""
    added = [m[ADAPTER] for layer in adapted_layers(model).values() for m in (layer.lora_A, layer.lora_B)]
    added += [wrapper.modules_to_save[ADAPTER] for wrapper in trained_copies(model).values()]
    ours = {p for module in added for p in module.parameters()}
    named = dict(model.named_parameters())
    return {n: p for n, p in named.items() if p in ours}, {n: p for n, p in named.items() if p not in ours}


@torch.no_grad()
def _sums(parameters: dict[str, Parameter]) -> dict[str, Tensor]:
    """Return float64 sums, which any update changes; the tensors' version would not show changes through ``.data``."""
    return {name: p.sum(dtype=torch.float64) for name, p in parameters.items()}


def _peak_rate(state: State) -> float:
    groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
    return max(float(group.get("initial_lr", group["lr"])) for group in groups)  # the latter may have decayed to 0


def _left_out(trained: dict[str, Parameter], state: State) -> str | None:
    """Return a trained parameter that is in no group; None for an optimizer of copies, for example on the host."""
    held = {id(p) for optimizer in state.optimizers for group in optimizer.param_groups for p in group["params"]}
    mine = {name: id(p) for name, p in trained.items()}
    if held.isdisjoint(mine.values()):
        return None
    return next((name for name, key in mine.items() if key not in held), None)
