"""The set of techniques that this project's own measurements recommend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_speedups.core.technique import OnUnavailable, Technique

__all__ = ["RECOMMENDED", "recommended"]

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
    """The fastest stable techniques for BERT, RoBERTa, ELECTRA and DistilBERT, on one GPU or several: new objects.

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
