"""The fast LayerNorm technique: LayerNorm in the autocast dtype, with torch's, Liger's or Apex's kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field

from composer_speedups.core.errors import Refusal
from composer_speedups.core.requirements import needs_apex, needs_autocast, needs_cuda, needs_package, needs_triton
from composer_speedups.core.run import FirstBatch, Run
from composer_speedups.core.technique import Order, Technique


class FastLayerNorm(Technique):
    """Computes LayerNorm in the autocast dtype, so the residual stream has that dtype, too.

    Raises:
        Refusal: At INIT, without mixed precision (``low_precision``), without a GPU or the package (other
            implementations), or without a LayerNorm that the kernel supports.

    Source: Composer's LowPrecisionLayerNorm; Liger Kernel (arXiv 2410.10989); NVIDIA Apex.
    """

    name = "fast_layernorm"
    order = Order.LAYERS
    effect = "lower_precision"

    implementation: Literal["low_precision", "triton", "apex"] = Field("low_precision")
    """low_precision is torch's kernel with 16-bit values, triton is Liger's kernel, apex is NVIDIA Apex's. The latter
    two also run without mixed precision, in float32."""

    def needs(self, run: Run) -> Iterable[Refusal]:
        if self.implementation == "low_precision":
            yield from needs_autocast(self.name, run, "low-precision LayerNorm")
        if self.implementation == "triton":
            yield from needs_cuda(self.name, run, "Liger's Triton kernel", (7, 0))
            yield from needs_package(self.name, "liger_kernel", ".[liger]")
            yield from needs_triton(self.name)
        if self.implementation == "apex":
            yield from needs_cuda(self.name, run, "Apex's kernel", (7, 0))
            yield from needs_apex(self.name, "fused_layer_norm_cuda")

    def engage(self, run: Run) -> dict[str, Any]:
        from torch import nn

        from composer_speedups.algorithms.fast_layernorm.modules import LAYERS, to_plain
        from composer_speedups.packing.derived_classes import swap_class

        def is_supported(norm: Any) -> bool:
            affine = self.implementation == "low_precision" or (norm.weight is not None and norm.bias is not None)
            return affine and (self.implementation != "triton" or len(norm.normalized_shape) == 1)

        names = swap_class(run.model, nn.LayerNorm, LAYERS[self.implementation], is_supported)
        if not names:
            reason = f"the model has no torch.nn.LayerNorm that the {self.implementation} kernel supports"
            raise self.refusal(reason, "remove it")
        run.give_back(to_plain, [run.model.get_submodule(name) for name in names])
        return {"modules": len(names), "implementation": self.implementation}

    def proof(self, run: Run, seen: FirstBatch) -> dict[str, Any]:
        from composer_speedups.core.trainer_state import is_compiled

        ran = {name.rpartition(" ")[2]: n for name, n in seen.ran.items() if name.startswith("layer_norm ")}
        if is_compiled(run.model) and not ran:
            return {"output_dtype": "not seen", "seen_in": "compiled code"}
        if not ran:
            raise self.no_effect("no LayerNorm ran", "do not change the modules after INIT")
        if self.implementation == "low_precision" and "float32" in ran:
            raise self.no_effect("its output is still float32", "keep mixed precision on")
        return {"output_dtype": ", ".join(sorted(ran)), "seen_in": "forward pass"}
