"""The mixed precision technique: autocast in bf16 or fp16."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from composer.core import Precision, State
from pydantic import Field
from torch import nn

from composer_speedups.algorithms.mixed_precision.functional import DTYPES, LOAD_FLOAT32, half_weights, wrap_forward
from composer_speedups.core.errors import TechniqueError
from composer_speedups.core.requirements import Context, Requirement, needs_cuda
from composer_speedups.core.technique import Stage, Technique, Variant
from composer_speedups.core.trainer_state import device_of, is_compiled, model_of


class MixedPrecision(Technique):
    """Computes matmuls in bf16 or fp16 under autocast; weights and optimizer are float32. fp16 scales the loss.

    On a GPU, it sets Composer's precision. On a CPU, for which Composer supports only fp32, ``allow_cpu`` wraps the
    model's ``forward`` in bf16 autocast.

    Raises:
        TechniqueError: At INIT, for bf16 on a GPU below compute capability 8.0, on a CPU except for bf16 with
            ``allow_cpu``, and for 16-bit weights that are not frozen.
    """

    name = "mixed_precision"
    stage = Stage.FLAGS
    exactness = "lower_precision"
    gain = 3.8
    trials = (
        Variant({"dtype": "bf16"}, device="cuda"),
        Variant({"dtype": "fp16"}, device="cuda", fallback=True),
        Variant({"dtype": "bf16", "allow_cpu": True}, device="cpu", gain=1.0),
    )

    dtype: Literal["bf16", "fp16"] = Field("bf16")
    """Dtype of matmuls; fp16 needs a GPU and scales the loss."""
    allow_cpu: bool = Field(False)
    """Engage bf16 on a CPU, too, where it is slower on most chips; otherwise it is refused."""

    def reset(self) -> None:
        super().reset()
        self._seen: set[str] = set()

    @property
    def matmul_precision(self) -> str | None:
        return self.dtype

    def requirements(self, context: Context) -> Iterable[Requirement]:
        if self.dtype == "fp16":
            yield needs_cuda(context, "fp16")
        elif context.device.type == "cuda" or not self.allow_cpu:
            yield needs_cuda(context, "bf16", (8, 0))

    def context_after(self, context: Context) -> Context:
        return replace(context, precision=f"amp_{self.dtype}")

    def engage(self, state: State) -> dict[str, Any]:
        before = state.precision.value
        if (problem := half_weights(state.model)) is not None:
            raise TechniqueError(self.name, problem, LOAD_FLOAT32)
        if device_of(state).type == "cuda":
            state.precision = Precision(f"amp_{self.dtype}")
        else:
            wrap_forward(state.model, self.dtype)
        return {"dtype": self.dtype, "precision_before": before}

    def watch(self, state: State) -> None:
        """Record the dtypes of the outputs, and in eager mode also of the first Linear and of the inner model.

        A task may convert the model's hidden states to float32, and fused layers do not call Linears.
        """
        if is_compiled(state.model):  # a hook would become part of the compiled graph
            return
        linear = next((m for m in state.model.modules() if isinstance(m, nn.Linear)), None)
        for module in (linear, getattr(model_of(state), "model", None)):
            if isinstance(module, nn.Module):
                self.watching.callback(module.register_forward_hook(lambda _m, _i, out: self._note(out)).remove)

    def stop_watching(self, state: State) -> None:
        self._note(state.outputs)

    def _note(self, outputs: Any) -> None:
        if isinstance(outputs, Mapping):
            outputs = outputs.values()
        elif not isinstance(outputs, (list, tuple)):
            outputs = [outputs]
        floats = (value for value in outputs if isinstance(value, torch.Tensor) and value.is_floating_point())
        self._seen.update(str(value.dtype).removeprefix("torch.") for value in floats)

    def verify(self, state: State) -> dict[str, Any]:
        wanted = str(DTYPES[self.dtype]).removeprefix("torch.")
        if wanted not in self._seen:
            raise self.not_engaged(
                f"the forward pass returned {', '.join(sorted(self._seen)) or 'no tensor'} and no {wanted}",
                "look for code that changes the Trainer's precision after INIT",
            )
        evidence: dict[str, Any] = {"dtypes_seen": sorted(self._seen)}
        if self.dtype == "fp16" and state.scaler is not None:
            evidence["loss_scale"] = state.scaler.get_scale()
        return evidence
