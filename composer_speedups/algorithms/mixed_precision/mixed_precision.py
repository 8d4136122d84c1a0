"""Automatic mixed precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Literal

import torch
from composer.core import Precision, State
from pydantic import Field
from torch import nn

from composer_speedups.algorithms.mixed_precision.functional import DTYPES, apply_mixed_precision
from composer_speedups.core.requirements import Context, Requirement, needs_cuda
from composer_speedups.core.technique import Stage, Technique, Variant
from composer_speedups.core.trainer_state import device_of, is_compiled, model_of


class MixedPrecision(Technique):
    """Autocast: matmuls in bf16 or fp16, weights and optimizer in float32; fp16 with loss scaling.

    On a GPU it sets Composer's precision. On the CPU, where Composer itself knows only fp32, ``allow_cpu`` puts
    bf16 autocast around the model's ``forward``.

    Raises:
        TechniqueError: At INIT, on a GPU below compute capability 8.0 for bf16, and on the CPU but for
            bf16 with ``allow_cpu``.
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
    """What matmuls compute in; fp16 needs a GPU and scales the loss."""
    allow_cpu: bool = Field(False)
    """Engage bf16 on the CPU too, where it is slower on most chips; otherwise it is refused there."""

    def reset(self) -> None:
        super().reset()
        self._seen: set[str] = set()
        self._hook = ExitStack()

    def requirements(self, context: Context) -> Iterable[Requirement]:
        if self.dtype == "fp16":
            yield needs_cuda(context, "fp16")
        elif context.device.type == "cuda" or not self.allow_cpu:
            yield needs_cuda(context, "bf16", (8, 0))

    def engage(self, state: State) -> dict[str, Any]:
        before = state.precision.value
        if device_of(state).type == "cuda":
            state.precision = Precision(f"amp_{self.dtype}")
        else:
            apply_mixed_precision(state.model, self.dtype)
        return {"dtype": self.dtype, "precision_before": before}

    def watch(self, state: State) -> None:
        """Collect the dtypes of the outputs, and in eager mode those of the first Linear and of the model inside.

        A task may turn the model's hidden states to float32, and fused layers call no Linear.
        """
        if is_compiled(state.model):  # a hook would stay in its graph
            return
        linear = next((m for m in state.model.modules() if isinstance(m, nn.Linear)), None)
        for module in (linear, getattr(model_of(state), "model", None)):
            if isinstance(module, nn.Module):
                self._hook.callback(module.register_forward_hook(lambda _m, _i, out: self._note(out)).remove)

    def stop_watching(self, state: State) -> None:
        self._note(state.outputs)
        self.close()

    def close(self) -> None:
        self._hook.close()  # also after a forward pass that raised

    def _note(self, outputs: Any) -> None:
        values = outputs.values() if isinstance(outputs, Mapping) else outputs
        for value in values if isinstance(values, (list, tuple)) or values is not outputs else [values]:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self._seen.add(str(value.dtype).removeprefix("torch."))

    def verify(self, state: State) -> dict[str, Any]:
        wanted = str(DTYPES[self.dtype]).removeprefix("torch.")
        if wanted not in self._seen:
            raise self.not_engaged(
                f"the forward pass gave {', '.join(sorted(self._seen)) or 'no tensor'} and no {wanted}",
                "look for code that changes the Trainer's precision after INIT",
            )
        evidence: dict[str, Any] = {"dtypes_seen": sorted(self._seen)}
        if self.dtype == "fp16" and state.scaler is not None:
            evidence["loss_scale"] = state.scaler.get_scale()
        return evidence
