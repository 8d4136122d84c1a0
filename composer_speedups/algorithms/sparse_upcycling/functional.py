"""Functions for sparse upcycling: replace feed-forward layers by experts, and load an exported model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from composer_speedups.algorithms.sparse_upcycling.experts import Routing
from composer_speedups.algorithms.sparse_upcycling.loss import load_balancing_loss
from composer_speedups.algorithms.sparse_upcycling.upcycle import encoder_of, find_blocks, upcycle
from composer_speedups.core.pretrained import pretrained_config
from composer_speedups.families.family import family_of, family_titles
from composer_speedups.surgery.already_applied import refuse_other_settings
from composer_speedups.surgery.parameter_groups import replace_parameters

__all__ = ["apply_sparse_upcycling", "load_balancing_loss", "load_sparse_upcycling"]
MOST_EXPERTS = 1024


def apply_sparse_upcycling(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    experts: int = 4,
    every: int = 2,
    top_k: int = 2,
) -> list[str]:
    """Replace every n-th feed-forward layer of a model by experts, which are copies of the layer.

    The outputs do not change, except for the rounding of weights that add up to one. In training, add
    ``load_balancing_loss(model)`` to the loss. The settings are stored in the model's config as ``sparse_upcycling``.

    Args:
        model: A Hugging Face model of a family with BERT's or DistilBERT's feed-forward layers, or a module that
            contains one; changed in place.
        optimizers: The model's optimizer or optimizers, if they exist. Experts and routers join the parameter groups
            of the weights that they replace.
        experts: Experts per layer. Default 4; the paper has 32.
        every: Layers ``every``, ``2·every``, … (counted from 1) are replaced. Default 2.
        top_k: Experts per token, at least 2. Default 2.

    Returns:
        Names of the replaced layers; empty if they already are experts.

    Raises:
        ValueError: A setting out of range, no layer to replace, or layers of experts with other settings.

    Source: Sparse Upcycling, arXiv 2212.05055, without its capacity limit: no token is dropped.
    """
    check_settings(experts, every, top_k)
    encoder, settings = encoder_of(model), {"experts": experts, "every": every, "top_k": top_k}
    blocks = find_blocks(model, encoder)
    present = getattr(encoder.config, "sparse_upcycling", None)
    if any(block.is_sparse for block in blocks):
        refuse_other_settings("layers of experts", present or {}, settings)
        return []
    chosen = blocks[every - 1 :: every]
    if not chosen:
        family = family_of(type(encoder))
        if family is not None and family.feed_forward is None:
            known = family_titles(lambda each: each.feed_forward)
            raise ValueError(
                f"sparse_upcycling supports the feed-forward layers of {known}, and this is {family.title}"
            )
        raise ValueError(
            f"the model has {len(blocks)} feed-forward layers like BERT's or DistilBERT's, and every={every} "
            "selects none of them"
        )
    routing = Routing()
    replaced: dict[nn.Parameter, list[nn.Parameter]] = {}
    for block in chosen:
        replaced |= upcycle(block, routing, experts=experts, top_k=top_k)
    encoder.register_forward_pre_hook(routing.begin, with_kwargs=True)
    encoder.register_forward_hook(routing.end)
    encoder.config.sparse_upcycling = settings
    replace_parameters(optimizers, replaced, {p: n for n, p in model.named_parameters()})
    return [block.name for block in chosen]


def load_sparse_upcycling(folder: str | Path, auto: Any = AutoModelForSequenceClassification) -> PreTrainedModel:
    """Load a model with experts from a folder that ``save_pretrained`` or train.py wrote.

    transformers' ``from_pretrained`` would not find weights for the layers that were replaced by experts.

    Args:
        folder: A local folder with a config.json, which has the settings, and safetensors files.
        auto: The auto class of the model's task. Default AutoModelForSequenceClassification.

    Returns:
        The model in eval mode, on the CPU, in the dtype of its weights.

    Raises:
        ValueError: The folder does not have a model with experts, or lacks some of its weights.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    config = pretrained_config(str(folder)) if files else None
    settings = getattr(config, "sparse_upcycling", None)
    if settings is None:
        raise ValueError(f"{folder} does not have an exported model with experts; load it with from_pretrained")
    with torch.random.fork_rng(devices=[]):  # the drawn weights are overwritten below
        model: PreTrainedModel = auto.from_config(config)
        apply_sparse_upcycling(model, **settings)
    weights = {name: weight for file in files for name, weight in load_file(file).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    model.tie_weights()
    tied = set(getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ())
    lacking = [name for name in missing if name not in tied] + list(unexpected)
    if lacking:
        raise ValueError(f"the weights in {folder} do not fit its config: {lacking[0]} and {len(lacking) - 1} more")
    return model.eval()


def check_settings(experts: int, every: int, top_k: int) -> None:
    if not 2 <= experts <= MOST_EXPERTS:
        raise ValueError(f"experts must be 2 to {MOST_EXPERTS}, not {experts}")
    if every < 1:
        raise ValueError(f"every must be at least 1, not {every}")
    if not 2 <= top_k <= experts:
        raise ValueError(
            f"top_k must be 2 to experts={experts}, not {top_k}; with one expert per token, its weight would always be "
            "1, and the router would get no gradient from the task"
        )
