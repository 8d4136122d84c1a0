"""The set of techniques that this project recommends, based on its measurements."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal

from composer_speedups.core.errors import TechniqueError

if TYPE_CHECKING:
    from torch import nn

    from composer_speedups.core.comparison import Check
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
"""YAML name → settings, the same as in ``yamls/bert_imdb_fast.yaml``."""


def recommended(on_unavailable: OnUnavailable = "stop", precision: Literal["bf16", "fp8"] = "bf16") -> list[Technique]:
    """Return the fastest stable techniques for BERT, RoBERTa and similar encoders, on one or several GPUs.

    None of them changes the recipe; each is exact up to the rounding of 16-bit mixed precision.

    Args:
        on_unavailable: ``"stop"``: a technique that cannot engage on this GPU or model stops the run, with the reason
            and the fix. ``"warn"``: the run warns and continues without it. See :class:`Technique`.
        precision: ``"fp8"`` rounds the operands of the layers' matmuls to 8 bits
            (``FusedLayers(precision="fp8")``), on a GPU of compute capability 8.9 or newer; everything else stays in
            bf16. The card of ``fused_layers`` has figures. Default ``"bf16"``.

    Raises:
        TechniqueError: This machine has no CUDA GPU, and ``on_unavailable`` is ``"stop"``.
        ValueError: Another precision.

    Example:
        ``Trainer(model=model, algorithms=recommended(), …)``. On several GPUs, add the callbacks and the sampler of
        :mod:`composer_speedups.distributed`, as in ``examples/own_trainer.py``.
    """
    # imported here because they need torch and Composer; the set itself is plain data
    from torch import cuda

    from composer_speedups.core.registry import technique_class

    if precision not in ("bf16", "fp8"):
        raise ValueError(f'recommended: precision must be "bf16" or "fp8", not {precision!r}')
    if on_unavailable == "stop" and not cuda.is_available():
        fix = 'on_unavailable="warn" leaves out what cannot run here, and apply_recommended(model) needs no GPU'
        raise TechniqueError("recommended", "this machine has no CUDA GPU, for which the set is made", fix)
    layers = RECOMMENDED["fused_layers"] | ({"precision": "fp8"} if precision == "fp8" else {})
    chosen = RECOMMENDED | {"fused_layers": layers}
    build: Any = technique_class
    return [build(name)(**settings, on_unavailable=on_unavailable) for name, settings in chosen.items()]


def apply_recommended(model: nn.Module, check: Check = "auto") -> dict[str, list[str]]:
    """Apply unpadding, fused layers and attention to a model for any training loop: plain PyTorch, HF Trainer and
    others.

    The model computes the same result up to rounding, in training and evaluation. Precision, the optimizer and CUDA
    graphs are not changed, since they belong to the loop; :func:`recommended` includes them for Composer's Trainer.

    Args:
        model: A transformers model, or a module that contains some; changed in place. Its parameters, their names and
            its ``state_dict`` do not change, so the optimizer may be built before or after.
        check: When to compare the model with the untouched one; see :func:`apply_unpadding`.

    Returns:
        Name of each technique that engaged → the modules that it changed, none if an earlier call changed them. If
        unpadding does not support the model, ``sdpa_attention`` is used instead.

    Raises:
        ValueError: The model contains no transformers model, or none of the techniques supports it.

    Warns:
        UserWarning: A technique does not support the model, with the reason; or the model has all of them already.

    Example:
        ``model = AutoModelForSequenceClassification.from_pretrained(…); apply_recommended(model)``; see ``examples/``.
    """
    from torch.nn import Module  # imported here so that the set itself stays plain data
    from transformers import PreTrainedModel

    from composer_speedups.algorithms.fused_layers.functional import apply_fused_layers
    from composer_speedups.algorithms.sdpa_attention.functional import apply_sdpa_attention
    from composer_speedups.algorithms.unpadding.functional import apply_unpadding

    if not isinstance(model, Module) or not any(isinstance(module, PreTrainedModel) for module in model.modules()):
        raise ValueError(f"apply_recommended found no transformers model in {type(model).__name__}; pass one")
    try:
        done = {"unpadding": apply_unpadding(model, check=check)}
    except ValueError as error:
        warnings.warn(f"unpadding and fused_layers are left out: {error}", UserWarning, stacklevel=2)
        return {"sdpa_attention": list(apply_sdpa_attention(model))}
    try:
        done["fused_layers"] = apply_fused_layers(model, **RECOMMENDED["fused_layers"])
    except ValueError as error:
        warnings.warn(f"fused_layers is left out: {error}", UserWarning, stacklevel=2)
    if not any(done.values()):
        in_place = " and ".join(done)
        warnings.warn(f"nothing is changed: the model has {in_place} already", UserWarning, stacklevel=2)
    return done
