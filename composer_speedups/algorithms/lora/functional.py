"""Freeze a model and add low-rank adapters (LoRA)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn

from composer_speedups.algorithms.lora.adapters import (
    adapted_layers,
    adapter_host,
    insert,
    replacements,
    settings_of,
    wanted_settings,
)
from composer_speedups.algorithms.lora.export import merged_state_dict, save_adapter
from composer_speedups.surgery.already_applied import refuse_other_settings
from composer_speedups.surgery.parameter_groups import replace_parameters

__all__ = ["apply_lora", "merged_state_dict", "save_adapter"]
MAX_RANK = 4096  # larger than the hidden size of any BERT


def apply_lora(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    rank: int = 8,
    alpha: float = 16.0,
    targets: Literal["all-linear"] | list[str] = "all-linear",
    dropout: float = 0.0,
    modules_to_save: list[str] | None = None,
) -> list[str]:
    """Freeze a model and train low-rank adapters of some of its Linear modules instead, with PEFT.

    Args:
        model: A Hugging Face model, a ComposerModel around one, or any module; changed in place. All parameters are
            frozen, except for the adapters and copies of the modules to save.
        optimizers: The optimizers of the training loop, if they exist. Frozen parameters are removed from their groups,
            and each new parameter joins the group of the weight that it replaces.
        rank: Rank of the adapters. Default 8.
        alpha: The adapters' output is scaled by alpha / rank. Default 16, a scale of 2.
        targets: Name suffixes of the Linear modules to adapt. Default ``"all-linear"``: all of them except for the
            head, as PEFT selects them.
        dropout: Dropout of the adapters' input, 0 to below 1. Default 0.
        modules_to_save: Modules to train and save in full. None selects all modules on top of a Hugging Face encoder,
            such as the new classifier; for a masked LM, whose head is pretrained, there are none.

    Returns:
        Names of the adapted modules; empty if the model already has the same adapters.

    Raises:
        ValueError: A number out of range, a target that does not match, or a model with other adapters.

    Sources: Hu et al., arXiv 2106.09685; PEFT; for adapters on all Linear modules, Schulman et al., "LoRA Without
    Regret", Thinking Machines Lab, 2025.
    """
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"rank must be 1 to {MAX_RANK}, not {rank}")
    if alpha <= 0:
        raise ValueError(f"alpha must be above 0, not {alpha}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be 0 to below 1, not {dropout}")
    from peft import PeftModel

    inner = adapter_host(model)
    wanted = wanted_settings(inner, rank, alpha, dropout, targets, modules_to_save)
    before = settings_of(model)
    wrapped = any(isinstance(module, PeftModel) for module in model.modules())
    if wrapped or (adapted_layers(model) and before is None):
        raise ValueError("the model already has PEFT adapters; pass its base model, or remove the technique")
    names = []
    if before is None:
        names = insert(inner, wanted)
    else:
        refuse_other_settings("LoRA's adapters", before, wanted)
    names_of = {p: name for name, p in inner.named_parameters()}
    replace_parameters(optimizers, replacements(inner), names_of, for_untrained="first group")
    return names
