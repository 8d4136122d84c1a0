"""The fused layers technique: each encoder layer is one autograd function with fused kernels, on packed tokens."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from composer_speedups.core.errors import Refusal
from composer_speedups.core.requirements import needs_autocast, needs_bf16, needs_cuda, needs_triton
from composer_speedups.core.run import FirstBatch, Run
from composer_speedups.core.technique import NOT_YET, ComparedTechnique, Effect, Order

_FP8_MIN_WIDTH = 512  # at 384, 8 bits save nothing (docs/results.md, small models)


class FusedLayers(ComparedTechnique):
    """Computes each encoder layer as one function, with one QKV matmul and fused kernels between the matmuls.

    Raises:
        Refusal: At INIT, without ``unpadding``, for a model without a supported layer, and on a GPU in fp32 or without
            Triton; with ``precision="fp8"``, also on a CPU, on a GPU older than Ada and in fp16. In the first batch,
            for a custom model whose results differ. In other loops than Composer's, fp32 on a GPU is a warning.
    """

    name = "fused_layers"
    order = Order.KERNELS
    effect = "lower_precision"
    not_with: ClassVar = {
        "fast_layernorm": "fused_layers computes the LayerNorms itself, so fast_layernorm would have no effect",
        "float8_linear": "fused_layers computes the matmuls itself; for 8-bit matmuls, set its precision: fp8",
        "sparse_upcycling": "fused_layers computes the feed-forward layers itself and would ignore the experts",
        "torch_compile": "fused_layers runs Triton kernels of its own, which leave torch_compile nothing to fuse",
    }

    last_layer: Literal["needed", "all"] = Field("needed")
    """needed computes in the last layer only each row's first token under a classification head, which reads nothing
    else; all computes every token."""
    precision: Literal["bf16", "fp8"] = Field("bf16")
    """bf16 computes the layers' matmuls in autocast's dtype; fp8 computes results and input gradients in 8 bits, on
    Ada, Hopper and newer GPUs."""
    fp8_min_width: int = Field(_FP8_MIN_WIDTH, ge=0)
    """With precision: fp8, layers with a smaller hidden size compute in bf16, which is as fast there; 0: all in fp8."""
    gelu: Literal["exact", "tanh", "auto"] = Field("exact")
    """exact computes the model's activation; tanh computes the tanh form of GELU on a GPU, as a part of the matmuls
    around it; auto computes the tanh form in layers of 768 units or more, and elsewhere the model's activation."""

    @classmethod
    def effect_with(cls, settings: Mapping[str, Any], device: str | None) -> Effect:
        """Return "rounding" on a CPU, where it computes in the run's precision; the kernels on a GPU need 16 bits."""
        return "rounding" if device == "cpu" else cls.effect

    def reset(self) -> None:
        super().reset()
        self._compiling: Any = None  # a kernels.compile_ahead.Compiling, whose module imports Triton
        self._in_fp8 = self.precision == "fp8"  # whether a layer computes in 8 bits

    @property
    def matmul_precision(self) -> str | None:
        return "fp8" if self._in_fp8 else None

    def needs(self, run: Run) -> Iterable[Refusal]:
        if "unpadding" not in run.techniques:
            yield self.refusal("it needs packed tokens, and nothing packs them", "add unpadding, or remove this, too")
        if run.device.type == "cuda":
            yield from needs_autocast(self.name, run, "its kernels compute in 16 bits: it")
            yield from needs_cuda(self.name, run, "a Triton kernel", (8, 0))
            yield from needs_triton(self.name)
        if self.gelu == "tanh":
            yield from needs_cuda(self.name, run, "gelu: tanh")
            if self.precision == "fp8":
                yield self.refusal("gelu: tanh is computed in 16 bits", "remove gelu: tanh, or precision: fp8")
        if self.precision == "fp8":
            yield from needs_cuda(self.name, run, "precision: fp8", (8, 9))
            yield from needs_bf16(self.name, run, "precision: fp8")

    def engage(self, run: Run) -> dict[str, Any]:
        from composer_speedups.algorithms.fused_layers.fusing import fuse, unfuse
        from composer_speedups.algorithms.fused_layers.modules import FusedEmbeddings, FusedLayer, modules_shape

        try:
            fuse(run.model, self.last_layer, self.precision, self.fp8_min_width, self.gelu)
        except ValueError as error:
            raise self.refusal(str(error).removeprefix("fused_layers "), "remove it for this model") from error
        run.give_back(unfuse, run.model)
        layers = [layer for layer in run.model.modules() if isinstance(layer, FusedLayer)]
        self._in_fp8 = any(layer.precision == "fp8" for layer in layers)
        embeddings = next((module for module in run.model.modules() if isinstance(module, FusedEmbeddings)), None)
        if run.device.type == "cuda" and layers[0].family.has_berts_layers:  # for which compile_ahead is
            import torch

            from composer_speedups.algorithms.fused_layers.weights import LayerAdapters  # imports Triton
            from composer_speedups.kernels.compile_ahead import compile_ahead

            dtype = torch.float16 if run.precision == "amp_fp16" else torch.bfloat16
            shape = modules_shape(layers[0], embeddings)
            ranks = LayerAdapters.of(layers[0].layer_modules()).ranks()
            self._compiling = compile_ahead(shape, dtype, run.device, float8=self._in_fp8, ranks=ranks)
            run.give_back(lambda: self._compiling.close(cancel=True))
        evidence: dict[str, Any] = {"layers": len(layers)}
        if by_epilogues := sum(layer.has_epilogues for layer in layers):
            evidence["tanh_layers_on_gpu"] = by_epilogues
        narrow = [layer.hidden_size for layer in layers if layer.precision != self.precision]
        if not narrow:
            return evidence
        counted = f"{len(narrow)} of {len(layers)} layers compute in bf16"
        note = f"{counted}: their hidden size {max(narrow)} is below fp8_min_width={self.fp8_min_width}"
        return {**evidence, "bf16_layers": len(narrow), "note": note}

    def fit_start(self, run: Run) -> None:
        if self._compiling is not None and getattr(run.state.train_dataloader, "num_workers", None):  # type: ignore
            self._compiling.close()  # workers are forked next, and would inherit locks of the threads

    def before_forward(self, run: Run) -> None:
        if self._compiling is not None and run.observing:
            self._compiling.wait()

    def state(self, run: Run) -> dict[str, Any]:
        # Scales differ by rank. Every rank creates the whole checkpoint, which rank 0 writes, so they are gathered.
        if not self._in_fp8:
            return {}
        from composer.utils import dist

        from composer_speedups.algorithms.fused_layers.fusing import float8_scales

        return {"float8_scales": dist.all_gather_object(float8_scales(run.model))}

    def load_state(self, run: Run, state: Mapping[str, Any]) -> None:
        from composer.utils import dist

        from composer_speedups.algorithms.fused_layers.fusing import load_float8_scales

        scales = state["float8_scales"]
        try:
            load_float8_scales(run.model, scales[dist.get_global_rank() % len(scales)])
        except ValueError as error:
            raise self.refusal(str(error), "load the weights only") from error

    def proof(self, run: Run, seen: FirstBatch) -> dict[str, Any]:
        if self._compiling is not None:
            self._compiling.close()  # no kernel may be launched during a capture of CUDA graphs, which may come next
        passes = max(1, seen.ran["packed_encoder"])  # one for each micro-batch
        ran = _counts(_WAYS, seen.ran, passes)
        if not ran and seen.ran["waits_for_gradients"]:  # the first batch stays padded
            return NOT_YET
        if not ran:
            how = "ran the stock model's code" if seen.ran["stock_layer"] else "did not run"
            raise self.no_effect(f"the layers {how}", "keep unpadding engaged, and do not compile the model afterwards")
        if seen.ran["torch_layer"] and next(run.model.parameters()).is_cuda:
            warnings.warn("fused_layers: torch computed the layers, in float32; train in bf16 or fp16", stacklevel=2)
        if self._in_fp8 and not seen.ran["fused_layer_fp8"]:
            raise self.no_effect("no layer computed in 8 bits", "remove precision: fp8 for this model")
        embedded = next((way for name, way in _EMBEDDED.items() if seen.ran[name]), "not at all")
        gelu = _counts(_GELU, seen.ran, passes)
        return {"layers_ran": ran, "embeddings_ran": embedded, **({"gelu_ran": gelu} if gelu else {})}


def _counts(ways: Mapping[str, str], ran: Mapping[str, int], passes: int) -> str:
    return ", ".join(f"{round(ran[name] / passes)} {way}" for name, way in ways.items() if ran[name])


# what the layers and embeddings report → how report.json names it
_WAYS = {
    "fused_layer": "by fused kernels",
    "fused_layer_fp8": "by fused kernels in 8 bits",
    "first_tokens": "for first tokens",
    "torch_layer": "by torch",
    "unfused_layer": "unfused, because of their adapters",
}
_GELU = {"gelu_epilogue": "in matmuls' epilogues", "gelu_operator": "by torch's operators"}  # both directions
_EMBEDDED = {"fused_embeddings": "by a fused kernel", "stock_embeddings": "by the stock code"}
