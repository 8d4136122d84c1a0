"""transformers' SDPA attention, restricted to one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from composer_speedups.core.errors import Refusal, first_line
from composer_speedups.packing.encoder import unpadded_encoders

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention_name(backend: str) -> str:
    """The name of an attention implementation of transformers that uses this backend, which is registered if needed.

    It does not contain "flash", because transformers would load the flash-attn package for such a name.
    """
    if backend == "auto":
        return "sdpa"
    name = f"sdpa_only_{backend.replace('flash', 'fa')}"
    if AttentionInterface().get(name) is not None:
        return name

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            with sdpa_kernel(_BACKENDS[backend]):
                return sdpa_attention_forward(module, *args, **kwargs)
        except RuntimeError as error:
            if not str(error).startswith(("No available kernel", "No viable backend")):
                raise
            reason = f"the {backend} kernel cannot run on this batch ({first_line(error)})"
            raise Refusal("sdpa_attention", reason, "use backend: auto") from error

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)  # without it, the model would get no mask and attend to padding
    return name


def set_attention(models: Sequence[PreTrainedModel], implementation: str) -> None:
    """Make transformers models use an attention implementation.

    Raises:
        ValueError: One does not support it, or runs unpadded. Then none is changed.
    """
    nested = [module for model in models for module in model.modules() if isinstance(module, PreTrainedModel)]
    if any(unpadded_encoders(model) for model in models):
        raise ValueError("the model runs unpadded, and unpadding has its own attention")
    for module in nested:
        if not module._supports_sdpa:
            raise ValueError(f"{type(module).__name__} does not support scaled_dot_product_attention in transformers")
    previous = [(module.config, module.config._attn_implementation) for module in nested]
    try:
        for model in models:
            model.set_attn_implementation(implementation)
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
