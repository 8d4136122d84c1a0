"""The set of techniques that this project recommends, based on its measurements."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal

from composer_speedups.core.errors import Refusal

if TYPE_CHECKING:
    from torch import nn

    from composer_speedups.core.apply import Applied
    from composer_speedups.core.technique import Check, OnUnavailable, Technique

RECOMMENDED: dict[str, dict[str, Any]] = {
    "fused_optimizer": {},
    "tf32_matmul": {},
    "mixed_precision": {"dtype": "bf16"},
    "unpadding": {},
    "fused_layers": {"gelu": "auto"},
    "cuda_graphs": {"max_graphs": 16},
    "early_loss": {},
    "lean_dispatch": {},
}
"""YAML name → settings, the same as in ``yamls/bert_imdb_fast.yaml``."""


def recommended(on_unavailable: OnUnavailable = "stop", precision: Literal["bf16", "fp8"] = "bf16") -> list[Technique]:
    """Return the fastest stable techniques for BERT, RoBERTa and similar encoders, on one or several GPUs.

    None changes the recipe. Each is exact up to rounding in 16-bit mixed precision, except GELU's tanh form in layers
    of 768 units or more on a GPU, not in ESM-2 and ModernBERT; ``FusedLayers()`` instead computes the model's own.

    Args:
        on_unavailable: ``"stop"``: a technique that cannot engage on this GPU or model stops the run, with the reason
            and the fix. ``"warn"``: the run warns and continues without it. See :class:`Technique`.
        precision: ``"fp8"`` rounds the operands of the layers' matmuls to 8 bits
            (``FusedLayers(precision="fp8")``), on a GPU of compute capability 8.9 or newer; everything else, and layers
            narrower than its ``fp8_min_width``, stay in bf16. The card of ``fused_layers`` has figures. Default
            ``"bf16"``.

    Raises:
        Refusal: This machine has no CUDA GPU, and ``on_unavailable`` is ``"stop"``.
        ConfigError: Another precision.

    Example:
        ``Trainer(model=model, algorithms=recommended(), …)``. On several GPUs, add the callbacks and the sampler of
        ``examples/own_trainer.py``.
    """
    # imported here because they need torch and Composer; the set itself is plain data
    from torch import cuda

    from composer_speedups.core.registry import technique_class

    chosen = RECOMMENDED | {"fused_layers": RECOMMENDED["fused_layers"] | {"precision": precision}}
    build: Any = technique_class
    techniques = [build(name)(**settings, on_unavailable=on_unavailable) for name, settings in chosen.items()]
    if on_unavailable == "stop" and not cuda.is_available():
        fix = 'on_unavailable="warn" leaves out what cannot run here, and apply_recommended(model) needs no GPU'
        raise Refusal("recommended", "this machine has no CUDA GPU, for which the set is made", fix)
    return techniques


def apply_recommended(model: nn.Module, check: Check = "auto") -> Applied:
    """Apply the recommended techniques that a model alone supports, for any training loop: unpadding and fused layers.

    The model computes the same result up to rounding and, on a GPU, GELU's tanh form. Precision, the optimizer and CUDA
    graphs are not changed, since they belong to the loop; :func:`recommended` includes them for Composer's Trainer.

    Args:
        model: A transformers model, or a module that contains some; changed in place. Its parameters, their names and
            its ``state_dict`` do not change, so the optimizer may be built before or after.
        check: When to compare the model with the untouched one; a setting of these techniques.

    Returns:
        The handle of :func:`.apply`, whose ``evidence`` has the techniques that engaged. If unpadding does not support
        the model, ``sdpa_attention`` is used instead.

    Raises:
        Refusal: The model contains no transformers model, or none of the techniques supports it.

    Warns:
        UserWarning: A technique does not support the model, with the reason; or fused layers ran in float32 on a GPU.

    Example:
        ``model = AutoModelForSequenceClassification.from_pretrained(…); apply_recommended(model)``; see ``examples/``.
    """
    from torch.nn import Module
    from transformers import PreTrainedModel

    from composer_speedups.core.apply import apply
    from composer_speedups.core.registry import technique_class

    if not isinstance(model, Module) or not any(isinstance(module, PreTrainedModel) for module in model.modules()):
        reason = f"found no transformers model in {type(model).__name__}"
        raise Refusal("apply_recommended", reason, "pass one")

    def build(name: str) -> Technique:
        return technique_class(name)(**RECOMMENDED.get(name, {}), check=check)  # type: ignore[call-arg]

    try:
        return apply(model, [build("unpadding"), build("fused_layers")])
    except Refusal as error:
        if error.who != "fused_layers":
            said = "unpadding and fused_layers are left out, and sdpa_attention is used instead"
            warnings.warn(f"{said}: {error.who}: {error.reason}", UserWarning, stacklevel=2)
            return apply(model, [build("sdpa_attention")])
        warnings.warn(f"fused_layers is left out: {error.reason}", UserWarning, stacklevel=2)
    return apply(model, [build("unpadding")])
