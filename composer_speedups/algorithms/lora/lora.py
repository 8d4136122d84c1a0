"""LoRA: the base model frozen, low-rank adapters and the classifier trained."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from composer.core import Event, State
from torch import Tensor, nn
from torch.nn import Parameter

from composer_speedups.algorithms.applied import refuse_other_settings
from composer_speedups.algorithms.lora.adapters import (
    ADAPTER,
    adapted_layers,
    host,
    insert,
    settings_of,
    trained_copies,
    wanted_settings,
)
from composer_speedups.algorithms.lora.export import merged_state_dict, save_adapter
from composer_speedups.algorithms.lora.regroup import regroup
from composer_speedups.algorithms.requirements import Context, Requirement, needs_package
from composer_speedups.algorithms.technique import OnUnavailable, Stage, Technique
from composer_speedups.errors import TechniqueError
from composer_speedups.state import model_of

__all__ = ["LoRA", "apply_lora"]


def apply_lora(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    rank: int = 8,
    alpha: float = 16.0,
    targets: Literal["all-linear"] | list[str] | None = None,
    dropout: float = 0.0,
    modules_to_save: list[str] | None = None,
) -> list[str]:
    """Freeze a model and train low-rank adapters of some of its Linear modules instead, through PEFT.

    Args:
        model: A Hugging Face model, a ComposerModel around one, or any module; changed in place. Every
            parameter is frozen but the adapters and copies of the modules to save.
        optimizers: Those of the training loop, if they exist: frozen parameters leave their groups, and what is
            trained instead enters the group of the weight that it stands for.
        rank: Rank of the adapters. Default 8.
        alpha: The adapters' output is scaled by alpha / rank. Default 16, a scale of 2.
        targets: Ends of the names of the Linear modules to adapt, or ``"all-linear"``. None is PEFT's default:
            the query and value projections.
        dropout: On the adapters' input, 0 to below 1. Default 0.
        modules_to_save: Modules trained and saved whole. None is all on top of a Hugging Face encoder: the
            classifier, which is new; nothing for a masked LM, whose head is pretrained.

    Returns:
        Names of the modules adapted; none when the model has the same adapters already.

    Raises:
        ValueError: A bad number, a target that matches nothing, or a model with other adapters.

    Source: arXiv 2106.09685; PEFT.
    """
    _check(rank, alpha, dropout)
    inner = host(model)
    wanted = wanted_settings(inner, rank, alpha, dropout, targets, modules_to_save)
    before = settings_of(model)
    if _is_peft_model(model) or (adapted_layers(model) and before is None):
        raise ValueError("the model has PEFT adapters already; give its base model, or take the technique out")
    names = []
    if before is None:
        names = insert(inner, wanted)
    else:
        refuse_other_settings("LoRA's adapters", before, wanted)
    if optimizers is not None:
        regroup(inner, [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers)
    return names


MOST_RANKS = 4096  # above any hidden size of a BERT, a low rank is none


def _check(rank: int, alpha: float, dropout: float) -> None:
    if not 1 <= rank <= MOST_RANKS:
        raise ValueError(f"rank must be 1 to {MOST_RANKS}, not {rank}")
    if alpha <= 0:
        raise ValueError(f"alpha must be above 0, not {alpha}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be 0 to below 1, not {dropout}")


def _is_peft_model(model: nn.Module) -> bool:
    from peft import PeftModel

    return any(isinstance(module, PeftModel) for module in model.modules())


class LoRA(Technique):
    """Frozen base model, low-rank adapters (PEFT) and a classifier trained whole.

    Args:
        rank: Rank of the adapters. Default 8.
        alpha: The adapters' output is scaled by alpha / rank. Default 16.
        targets: Ends of the names of the Linear modules to adapt, or ``"all-linear"``; None (default) is query
            and value.
        dropout: On the adapters' input. Default 0.
        modules_to_save: Modules trained whole; None (default) is the classification head.
        on_unavailable: See :class:`Technique`.

    Raises:
        ValueError: A rank below 1, an alpha of 0 or below, a dropout outside 0 to 1.
        TechniqueError: At INIT, without PEFT, or when a target matches nothing.
    """

    name = "lora"
    stage = Stage.ADAPTERS
    changes_structure = True
    clashes: ClassVar[dict[str, str]] = {
        "sparse_upcycling": "LoRA freezes the experts and the router, which would stay the copies they are"
    }

    def __init__(
        self,
        rank: int = 8,
        alpha: float = 16.0,
        targets: Literal["all-linear"] | list[str] | None = None,
        dropout: float = 0.0,
        modules_to_save: list[str] | None = None,
        *,
        on_unavailable: OnUnavailable = "stop",
    ) -> None:
        super().__init__(on_unavailable=on_unavailable)
        _check(rank, alpha, dropout)
        if isinstance(targets, str) and targets != "all-linear":
            raise ValueError(f"targets must be 'all-linear' or a list of names, not {targets!r}")
        self.rank, self.alpha, self.dropout = rank, alpha, dropout
        self.targets, self.modules_to_save = targets, modules_to_save
        self._before: dict[str, Tensor] = {}
        self._rate = 0.0

    def requirements(self, context: Context) -> Iterable[Requirement]:
        yield needs_package("peft", "composer_speedups[lora]")

    def engage(self, state: State) -> dict[str, Any]:
        settings = (self.rank, self.alpha, self.targets, self.dropout, self.modules_to_save)
        try:
            apply_lora(state.model, state.optimizers, *settings)
        except ValueError as error:
            raise TechniqueError(self.name, str(error), "take it out for this model") from error
        inner = host(state.model)
        trained, frozen = _split(inner)
        return {
            "modules": len(adapted_layers(inner)),
            "trained_whole": ", ".join(trained_copies(inner)),
            "trainable_parameters": sum(p.numel() for p in trained.values()),
            "total_parameters": sum(p.numel() for p in (*trained.values(), *frozen.values())),
        }

    def observe(self, event: Event, state: State) -> None:
        """Note the weights' sums and the learning rate before the first step."""
        if event == Event.BEFORE_FORWARD and not self._before:
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
    ours = {id(p) for layer in adapted_layers(model).values() for m in "AB" for p in _matrix(layer, m).parameters()}
    ours |= {id(p) for w in trained_copies(model).values() for p in w.modules_to_save[ADAPTER].parameters()}
    named = dict(model.named_parameters())
    return {n: p for n, p in named.items() if id(p) in ours}, {n: p for n, p in named.items() if id(p) not in ours}


def _matrix(layer: Any, which: str) -> nn.Module:
    module = getattr(layer, f"lora_{which}")[ADAPTER]
    assert isinstance(module, nn.Module)
    return module


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
