"""torch's scaled_dot_product_attention in place of eager attention."""

from __future__ import annotations

import warnings
from typing import Any, Literal

from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from composer_speedups.families.packed_attention import IMPLEMENTATION as UNPADDED
from composer_speedups.families.packed_attention import register_attention
from composer_speedups.families.stock import outermost_models
from composer_speedups.surgery.already_applied import NoEffectWarning

__all__ = ["apply_sdpa_attention"]
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def apply_sdpa_attention(
    model: nn.Module, backend: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
) -> dict[str, str]:
    """Make the Hugging Face models inside ``model`` use torch's scaled_dot_product_attention.

    Args:
        model: A PreTrainedModel, or a module that holds some; only their attention setting changes.
        backend: ``"auto"`` lets torch choose; any other name allows that kernel alone, and torch raises
            where it cannot run. flash takes no padding mask. A second call's replaces the first's.

    Returns:
        Name of each model (``""`` is ``model`` itself) → the attention implementation it had before; empty, with
        a NoEffectWarning, when there is none.

    Raises:
        ValueError: An unknown backend, a model without SDPA support, or one that :func:`apply_unpadding` changed; then
            no model is changed.

    Source: torch.nn.functional.scaled_dot_product_attention; transformers' attention interface.
    """
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend must be one of auto, {', '.join(BACKENDS)}, not {backend!r}")
    implementation = "sdpa" if backend == "auto" else _register(backend)
    outermost = outermost_models(model)
    before = {name: module.config._attn_implementation or "eager" for name, module in outermost.items()}
    if not before:
        warnings.warn(NoEffectWarning("no Hugging Face model was found in the model"), stacklevel=2)
    nested = [m for module in outermost.values() for m in module.modules() if isinstance(m, PreTrainedModel)]
    for module in nested:  # all of them, before any is changed
        if module.config._attn_implementation == UNPADDED:
            raise ValueError("the model runs unpadded, and unpadding brings its own attention; undo_unpadding it first")
        if not module._supports_sdpa:
            raise ValueError(f"{type(module).__name__} does not support scaled_dot_product_attention in transformers")
    settings = [(module.config, module.config._attn_implementation) for module in nested]
    try:
        for module in outermost.values():
            module.set_attn_implementation(implementation)
        for module in nested:  # transformers only logs a warning for a model whose attention it cannot change
            if (kept := module.config._attn_implementation) != implementation:
                raise ValueError(
                    f"{type(module).__name__} keeps {kept} attention: transformers cannot change it once the model is "
                    "built"
                )
    except ValueError:
        for config, earlier in settings:
            config._attn_implementation = earlier
        raise
    return before


def registered_name(backend: str) -> str:
    """Its name in transformers, which takes any name with "flash" in it for the flash-attn package."""
    return "sdpa" if backend == "auto" else f"sdpa_only_{backend.replace('flash', 'fa')}"


def _register(backend: str) -> str:
    """Register, through transformers' interface, an SDPA that allows one kernel."""
    name = registered_name(backend)

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(BACKENDS[backend]):
            return sdpa_attention_forward(module, *args, **kwargs)

    register_attention(name, attention, sdpa_mask)
    return name
