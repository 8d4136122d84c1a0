"""Make Hugging Face models use torch's scaled_dot_product_attention."""

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
        model: A PreTrainedModel, or a module that contains some. Only their attention setting changes.
        backend: ``"auto"`` lets torch choose the kernel; any other name allows only that kernel, and torch raises an
            error if it cannot run. flash does not support padding masks. A second call replaces the first one's kernel.

    Returns:
        The previous attention implementation of each model, by name (``""`` for ``model`` itself); empty, with a
        NoEffectWarning, if there is no Hugging Face model.

    Raises:
        ValueError: An unknown backend, a model without SDPA support, or one that :func:`apply_unpadding` changed. No
            model is changed.

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
            raise ValueError("the model runs unpadded, and unpadding has its own attention; call undo_unpadding first")
        if not module._supports_sdpa:
            raise ValueError(f"{type(module).__name__} does not support scaled_dot_product_attention in transformers")
    settings = [(module.config, module.config._attn_implementation) for module in nested]
    try:
        for module in outermost.values():
            module.set_attn_implementation(implementation)
        for module in nested:  # transformers only logs a warning if it cannot change the attention
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
    """Return the backend's name in transformers, without "flash", which would select the flash-attn package."""
    return "sdpa" if backend == "auto" else f"sdpa_only_{backend.replace('flash', 'fa')}"


def _register(backend: str) -> str:
    """Register an SDPA with only one allowed kernel in transformers' attention interface, and return its name."""
    name = registered_name(backend)

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(BACKENDS[backend]):
            return sdpa_attention_forward(module, *args, **kwargs)

    register_attention(name, attention, sdpa_mask)
    return name
