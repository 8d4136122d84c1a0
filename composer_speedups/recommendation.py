"""The set of techniques that this project's own measurements recommend."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from composer_speedups.core.technique import OnUnavailable, Technique

__all__ = ["RECOMMENDED", "apply_recommended", "recommended"]

RECOMMENDED: dict[str, dict[str, Any]] = {
    "fused_optimizer": {},
    "tf32_matmul": {},
    "mixed_precision": {"dtype": "bf16"},
    "unpadding": {"pad_to_multiple_of": 512},
    "fused_layers": {},
    "cuda_graphs": {"max_graphs": 16},
    "early_loss": {},
}
"""YAML name → settings; ``yamls/bert_imdb_fast.yaml`` holds the same."""


def recommended(on_unavailable: OnUnavailable = "stop") -> list[Technique]:
    """The fastest stable techniques for BERT, RoBERTa and their kin, on one GPU or several: new objects.

    None of them changes the recipe; each is exact up to the rounding of 16-bit mixed precision.

    Args:
        on_unavailable: ``"stop"``: what cannot engage on this GPU or model stops the run, with the reason and the
            fix. ``"warn"``: it warns, and the rest trains without it. See :class:`Technique`.

    Example:
        ``Trainer(model=model, algorithms=recommended(), …)``; on several GPUs with the callbacks and the sampler of
        :mod:`composer_speedups.distributed`, as in ``examples/own_trainer.py``.
    """
    from composer_speedups.core.registry import technique_class  # it imports Composer; the set itself is plain data

    build: Any = technique_class
    return [build(name)(**settings, on_unavailable=on_unavailable) for name, settings in RECOMMENDED.items()]


def apply_recommended(model: nn.Module) -> dict[str, list[str]]:
    """Unpadding, fused layers and attention on a model, for any training loop: plain PyTorch, HF Trainer and others.

    The model computes what it did, up to rounding, in training and in eval mode. Precision, the optimizer and CUDA
    graphs belong to the loop; :func:`recommended` brings them to Composer's Trainer.

    Args:
        model: A model of transformers, or a module that holds some, changed in place. Its parameters, their names and
            its ``state_dict`` stay, so build the optimizer before or after.

    Returns:
        Name of each technique that engaged → the modules that it changed. Where unpadding cannot serve the model,
        ``sdpa_attention`` takes its place.

    Raises:
        ValueError: There is no model of transformers in it, or none of the techniques can serve it.

    Warns:
        UserWarning: One of them cannot serve the model, and why.

    Example:
        ``model = AutoModelForSequenceClassification.from_pretrained(…); apply_recommended(model)``; see
        ``examples/``.
    """
    from transformers import PreTrainedModel  # here, so that the set itself stays plain data

    from composer_speedups.algorithms.fused_layers.functional import apply_fused_layers
    from composer_speedups.algorithms.sdpa_attention.functional import apply_sdpa_attention
    from composer_speedups.algorithms.unpadding.functional import apply_unpadding

    if not any(isinstance(module, PreTrainedModel) for module in model.modules()):
        raise ValueError(f"apply_recommended found no model of transformers in {type(model).__name__}; give it one")
    try:
        done = {"unpadding": apply_unpadding(model)}
    except ValueError as error:
        warnings.warn(f"unpadding and fused_layers are left out: {error}", UserWarning, stacklevel=2)
        return {"sdpa_attention": list(apply_sdpa_attention(model))}
    try:
        done["fused_layers"] = apply_fused_layers(model, **RECOMMENDED["fused_layers"])
    except ValueError as error:
        warnings.warn(f"fused_layers is left out: {error}", UserWarning, stacklevel=2)
    return done
