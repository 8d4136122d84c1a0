"""The fused layers technique: each encoder layer is one autograd function with fused kernels, on packed tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from composer.core import Precision, State
from composer.utils import dist
from pydantic import Field

from composer_speedups.algorithms.fused_layers.functional import (
    float8_scales,
    fuse,
    load_float8_scales,
    unfuse,
    unfused_layers,
)
from composer_speedups.algorithms.fused_layers.modules import (
    FusedEmbeddings,
    FusedLayer,
    modules_shape,
)
from composer_speedups.core.parity_checked_technique import ParityCheckedTechnique
from composer_speedups.core.requirements import (
    Context,
    Requirement,
    needs_autocast,
    needs_bf16,
    needs_cuda,
    needs_triton,
)
from composer_speedups.core.technique import Conflict, Exactness, Stage, Variant
from composer_speedups.core.trainer_state import device_of, model_of
from composer_speedups.families.family import family_of


class FusedLayers(ParityCheckedTechnique):
    """Computes each encoder layer as one function, with one QKV matmul and fused kernels between the matmuls.

    Raises:
        TechniqueError: At INIT, without ``unpadding``, for a model without a supported layer, and on a GPU in fp32 or
            without Triton; with ``precision="fp8"``, also on a CPU, on a GPU older than Ada and in fp16. In the first
            batch, for a custom model whose results differ.
    """

    name = "fused_layers"
    stage = Stage.KERNELS
    exactness = "lower_precision"
    conflicts = (
        Conflict(
            "fast_layernorm",
            "fused_layers computes the LayerNorms itself, so fast_layernorm would have no effect",
        ),
        Conflict(
            "float8_linear", "fused_layers computes the matmuls itself; for 8-bit matmuls, set its precision: fp8"
        ),
        Conflict(
            "sparse_upcycling",
            "fused_layers computes the feed-forward layers itself and would ignore the experts",
        ),
        Conflict(
            "torch_compile",
            "fused_layers runs Triton kernels of its own, which leave torch_compile nothing to fuse",
        ),
    )
    gain = 1.8
    trials = (
        Variant(with_techniques={"unpadding": {}}),
        Variant({"precision": "fp8"}, with_techniques={"unpadding": {}}, device="cuda", gain=1.9),
    )

    last_layer: Literal["needed", "all"] = Field("needed")
    """needed computes in the last layer only each row's first token under a classification head, which reads nothing
    else; all computes every token."""
    precision: Literal["autocast", "fp8"] = Field("autocast")
    """autocast computes the layers' matmuls in autocast's dtype; fp8 computes results and input gradients in 8 bits,
    on Ada, Hopper and newer GPUs."""

    @classmethod
    def exactness_with(cls, settings: Mapping[str, Any], device: str | None) -> Exactness:
        """Return "rounding" on a CPU, where it computes in the run's precision; the kernels on a GPU need 16 bits."""
        return "rounding" if device == "cpu" else cls.exactness

    def reset(self) -> None:
        super().reset()
        self._layers: list[FusedLayer] = []
        self._embeddings: list[FusedEmbeddings] = []
        self._compiling: Any = None  # a kernels.compile_ahead.Compiling, whose module imports Triton
        self._loaded: dict[str, list[list[int]]] = {}  # scales from the checkpoint

    @property
    def matmul_precision(self) -> str | None:
        return "fp8" if self.precision == "fp8" else None

    def requirements(self, context: Context) -> Iterable[Requirement]:
        yield Requirement(
            "unpadding" in context.techniques, "it needs packed tokens, and nothing packs them", "add unpadding"
        )
        if context.device.type == "cuda":
            yield needs_autocast(context, "its kernels compute in 16 bits: it")
            yield needs_cuda(context, "a Triton kernel", (8, 0))
            yield from needs_triton()
        if self.precision == "fp8":
            yield needs_cuda(context, "precision: fp8", (8, 9))
            yield needs_bf16(context, "precision: fp8")

    def engage(self, state: State) -> dict[str, Any]:
        with self.refusals():
            self.reapply(state)
        device, family = device_of(state), family_of(type(self._layers[0]))
        if device.type == "cuda" and family is not None and family.has_berts_layers:  # for which compile_ahead is
            from composer_speedups.algorithms.fused_layers.low_rank import LayerAdapters  # imports Triton
            from composer_speedups.kernels.compile_ahead import compile_ahead

            dtype = torch.float16 if state.precision == Precision.AMP_FP16 else torch.bfloat16
            shape = modules_shape(self._layers[0], next(iter(self._embeddings), None))
            ranks = LayerAdapters.of(self._layers[0].layer_modules()).ranks()
            self._compiling = compile_ahead(shape, dtype, device, float8=self.precision == "fp8", ranks=ranks)
        unfused = unfused_layers(state.model)
        return {"layers": len(self._layers), **({"unfused": unfused} if unfused else {})}

    def reapply(self, state: State) -> None:
        fuse(state.model, self.last_layer, self.precision, self.owner)
        self._layers = [layer for layer in state.model.modules() if isinstance(layer, FusedLayer)]
        self._embeddings = [module for module in state.model.modules() if isinstance(module, FusedEmbeddings)]
        if self._loaded:
            load_float8_scales(model_of(state), self._loaded)

    def withdraw(self, state: State) -> None:
        unfuse(state.model, self.owner)

    def state_dict(self) -> dict[str, Any]:
        # Scales differ by rank. Every rank creates the whole checkpoint, which rank 0 writes, so they are gathered.
        state = self._state() if self._state is not None else None
        scales: list[dict[str, list[list[int]]]] = []
        if self.precision == "fp8" and self.in_force and state is not None:
            scales = dist.all_gather_object(float8_scales(model_of(state)))
        return super().state_dict() | {"float8_scales": scales}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        scales = state.get("float8_scales", [])
        trainer_state = self._state() if self._state is not None else None
        if trainer_state is not None and self.precision == "fp8" and self.in_force and scales:
            self._loaded = scales[dist.get_global_rank() % len(scales)]
            with self.refusals("load the weights only"):
                load_float8_scales(model_of(trainer_state), self._loaded)

    def fit_start(self, state: State) -> None:
        if self._compiling is not None and getattr(state.train_dataloader, "num_workers", None):
            self._compiling.close()  # workers are forked next, and would inherit locks of the threads

    def watch(self, state: State) -> None:
        if self._compiling is not None:
            self._compiling.wait()

    def stop_watching(self, state: State) -> None:
        if self._compiling is not None:
            self._compiling.close()  # no kernel may be launched during a capture of CUDA graphs, which may come next

    def close(self) -> None:
        if self._compiling is not None:
            self._compiling.close(cancel=True)
        super().close()

    def verify(self, state: State) -> dict[str, Any]:
        ran = [layer.ran for layer in self._layers]
        wrong = [way for way in ran if way in (None, "stock")]
        if wrong:
            reason = "did not run" if wrong[0] is None else "ran the stock model's code"
            raise self.not_engaged(f"{len(wrong)} of {len(ran)} layers {reason}", "keep unpadding engaged")
        unfused = unfused_layers(state.model)
        if set(ran) == {"unfused"}:
            reason = f"no layer ran fused ({next(iter(unfused.values()), 'they were changed')})"
            raise self.not_engaged(reason, "do not change the layers after INIT")
        if self.precision == "fp8" and "triton, fp8" not in ran:
            raise self.not_engaged("no layer computed in 8 bits", "remove precision: fp8 for this model")
        ways = sorted(set(filter(None, ran)))
        return {
            **({"unfused": unfused} if unfused else {}),
            "layers_ran": ", ".join(f"{ran.count(way)} {way}" for way in ways),
            "embeddings_ran": ", ".join(sorted({module.ran or "not at all" for module in self._embeddings})),
        }
