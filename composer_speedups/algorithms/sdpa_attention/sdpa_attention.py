"""The SDPA technique: torch's scaled_dot_product_attention in place of eager attention."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from composer_speedups.core.errors import Refusal
from composer_speedups.core.requirements import needs_cuda
from composer_speedups.core.run import FirstBatch, Run
from composer_speedups.core.technique import ComparedTechnique, Order

if TYPE_CHECKING:
    from torch import nn


class SDPAAttention(ComparedTechnique):
    """Replaces eager attention by scaled_dot_product_attention, by default with the kernel that torch chooses.

    Raises:
        Refusal: At INIT, if there is no Hugging Face model, one does not support SDPA, or the backend needs a GPU; in
            the first batch, if the kernel cannot run with its shapes and mask.

    Source: torch.nn.functional.scaled_dot_product_attention; transformers' attention interface.
    """

    name = "sdpa_attention"
    order = Order.LAYERS
    effect = "rounding"

    backend: Literal["auto", "flash", "efficient", "cudnn", "math"] = Field("auto")
    """The only allowed kernel; auto lets torch choose. flash does not support padding masks."""

    @property
    def needs_16_bits(self) -> bool:
        return self.backend != "auto"  # some kernels support only 16 bits

    def needs(self, run: Run) -> Iterable[Refusal]:
        if self.backend in ("flash", "efficient", "cudnn"):
            yield from needs_cuda(self.name, run, f"the {self.backend} kernel", (8, 0))

    def engage(self, run: Run) -> dict[str, Any]:
        from transformers import PreTrainedModel

        from composer_speedups.core.stock import outermost_models
        from composer_speedups.packing.untouched import remember_attention

        models = list(outermost_models(run.model).values())
        if not models:
            raise self.refusal("the model has no Hugging Face model", "remove it")
        for module in run.model.modules():
            if isinstance(module, PreTrainedModel) and not module._supports_sdpa:
                reason = f"{type(module).__name__} does not support scaled_dot_product_attention in transformers"
                raise self.refusal(reason, "remove it")
        before = {model: model.config._attn_implementation or "eager" for model in models}
        for model in models:
            model.set_attn_implementation(_attention_name(self.backend))
            remember_attention(model, before[model])
            run.give_back(remember_attention, model, None)
            run.give_back(model.set_attn_implementation, before[model])
        return {"backend": self.backend, "implementation_before": ", ".join(sorted(set(before.values())))}

    def proof(self, run: Run, seen: FirstBatch) -> dict[str, Any]:
        from composer_speedups.core.stock import outermost_models
        from composer_speedups.core.trainer_state import is_compiled

        implementations = {model.config._attn_implementation for model in outermost_models(run.model).values()}
        if implementations != {_attention_name(self.backend)}:
            raise self.no_effect(
                f"the model's attention is {', '.join(map(str, implementations))}", "do not change it after INIT"
            )
        kernels = sorted(name.strip("_") for name in seen.operators if name.startswith("_scaled_dot_product"))
        kernels = [name for name in kernels if not name.endswith("backward")]
        if not kernels and seen.operators["_safe_softmax"]:
            kernels = ["scaled_dot_product_attention_math"]  # decomposed; no other attention uses this softmax
        if not kernels and is_compiled(run.model):  # whose operators are not seen
            return {"kernel": "not seen", "kernel_seen_in": "compiled code"}
        if not kernels:
            raise self.no_effect("the forward pass ran no SDPA kernel", "remove it for this model")
        if self.backend not in ("auto", *kernels[0].split("_")):
            raise self.no_effect(f"the kernel that ran is {kernels[0]}", "use backend: auto")
        return {"kernel": kernels[0], "kernel_seen_in": "forward pass"}


def _attention_name(backend: str) -> str:
    """The name of an attention implementation of transformers that uses this backend, which is registered if needed.

    It does not contain "flash", because transformers would load the flash-attn package for such a name.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(backends[backend]):
            return sdpa_attention_forward(module, *args, **kwargs)

    name = "sdpa" if backend == "auto" else f"sdpa_only_{backend.replace('flash', 'fa')}"
    if AttentionInterface().get(name) is None:
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, sdpa_mask)  # without it, the model would attend to padding
    return name
