"""Make Hugging Face models use torch's scaled_dot_product_attention."""

from __future__ import annotations

import warnings
from typing import Any, Literal

from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from composer_speedups.core.stock import outermost_models
from composer_speedups.packing.encoder import unpadded_encoders
from composer_speedups.packing.untouched import remember_attention
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
        model: A PreTrainedModel, or a module that contains some. Only their attention implementation changes.
        backend: ``"auto"`` lets torch choose the kernel. Any other name allows only that kernel, and the forward pass
            raises torch's error if it cannot run. flash does not support padding masks. A second call replaces the
            backend of the first.

    Returns:
        The previous attention implementation of each model, by name (``""`` for ``model`` itself); empty, with a
        NoEffectWarning, if there is no Hugging Face model.

    Raises:
        ValueError: The backend is unknown, or a model does not support SDPA or was changed by :func:`apply_unpadding`.
            Then no model is changed.

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
    if unpadded_encoders(model):
        raise ValueError("the model runs unpadded, and unpadding has its own attention; call undo_unpadding first")
    for module in nested:  # check all before changing any
        if not module._supports_sdpa:
            raise ValueError(f"{type(module).__name__} does not support scaled_dot_product_attention in transformers")
    previous = [(module.config, module.config._attn_implementation) for module in nested]
    try:
        for module in outermost.values():
            module.set_attn_implementation(implementation)
        for module in nested:  # transformers only logs a warning if it cannot change the attention
            if (current := module.config._attn_implementation) != implementation:
                raise ValueError(
                    f"{type(module).__name__} keeps {current} attention: transformers cannot change it after the model "
                    "is built"
                )
    except ValueError:
        for config, attention in previous:
            config._attn_implementation = attention
        raise
    for module, (_, attention) in zip(nested, previous, strict=True):
        remember_attention(module, attention or "eager")
    return before


def registered_name(backend: str) -> str:
    """Return the name of the attention implementation in transformers that uses this backend.

    It does not contain "flash", because transformers would load the flash-attn package for such a name.
    """
    return "sdpa" if backend == "auto" else f"sdpa_only_{backend.replace('flash', 'fa')}"


def _register(backend: str) -> str:
    """Register SDPA restricted to one kernel as an attention implementation of transformers, and return its name."""
    name = registered_name(backend)

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(BACKENDS[backend]):
            return sdpa_attention_forward(module, *args, **kwargs)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)  # without it, the model would get no mask and attend to padding
    return name
