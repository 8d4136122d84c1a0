"""The float8 Linear technique: the encoder's matmuls in float8."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from composer.core import State, get_precision_context
from pydantic import Field

from composer_speedups.algorithms.float8_linear.functional import (
    CAPABILITY,
    MULTIPLE,
    apply_float8_linear,
    converted_layers,
    float8_modules,
)
from composer_speedups.core.errors import CannotRunError, TechniqueError
from composer_speedups.core.operator_recorder import OperatorRecorder, cannot_run
from composer_speedups.core.requirements import (
    Context,
    Requirement,
    needs_autocast,
    needs_bf16,
    needs_cuda,
    needs_package,
)
from composer_speedups.core.technique import FSDP, Conflict, Stage, Technique, Variant
from composer_speedups.core.trainer_state import device_of, is_compiled


class Float8Linear(Technique):
    """Computes the encoder's matmuls in float8 (torchao), on Ada, Hopper and newer GPUs.

    Raises:
        TechniqueError: At INIT, without torchao, bf16 mixed precision or such a GPU, or without a suitable Linear; in
            the first batch, if the kernel cannot run (with ``"warn"``, training continues with plain Linears).
    """

    name = "float8_linear"
    stage = Stage.SURGERY
    exactness = "lower_precision"
    conflicts = (
        Conflict(FSDP, "float8_linear tests the matmuls with whole weights, which FSDP gathers only block by block"),
        Conflict("kahan_optimizer", "kahan_optimizer trains without autocast, which float8_linear needs"),
    )
    gain = 0.85
    trials = (Variant({"recipe": "tensorwise"}), Variant({"recipe": "rowwise"}))

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = Field("tensorwise")
    """One scale per tensor, one per row, or one per row with the weight's gradient in the autocast dtype."""
    min_features: int = Field(0)
    """Do not convert Linears with fewer inputs or outputs."""
    emulate: bool = Field(False)
    """Round to float8 and multiply in float32, on any device. Slower; shows float8's effect on a model without the
    hardware."""

    def reset(self) -> None:
        super().reset()
        self._recorder: OperatorRecorder | None = None
        self._operators: dict[str, int] = {}
        self._seen_in = ""

    @property
    def matmul_precision(self) -> str | None:
        return None if self.emulate else "fp8"  # the emulation multiplies in float32

    def requirements(self, context: Context) -> Iterable[Requirement]:
        yield needs_package("torchao", ".[torchao]")
        if not self.emulate:
            yield needs_cuda(context, f"{self.recipe} float8", CAPABILITY[self.recipe])
        yield needs_autocast(context, "float8_linear")
        yield needs_bf16(context, "float8_linear")

    def engage(self, state: State) -> dict[str, Any]:
        with self.refusals():
            apply_float8_linear(state.model, self.recipe, self.min_features, self.emulate)
        modules = len(converted_layers(state.model))
        if modules == 0:
            raise TechniqueError(
                self.name,
                "no Linear in the model's blocks has inputs and outputs that are multiples of 16 "
                f"and at least min_features={self.min_features}",
                "remove it",
            )
        return {"modules": modules, "recipe": self.recipe, "emulated": self.emulate}

    def watch(self, state: State) -> None:
        """Record the float8 matmuls of the first forward pass, or in compiled code, of a probe of one module.

        The probe always runs first, to distinguish a kernel that cannot run from other errors.
        """
        if not self._operators:
            try:
                self._note(self._probe(state), "probe")
            except CannotRunError as error:
                self.unavailable(error)
                converted = converted_layers(state.model)
                for module in converted.values():
                    float8_modules().to_plain(module)
                self.evidence["linears_restored"] = len(converted)
                return
        if not is_compiled(state.model):
            self._recorder = self.watching.enter_context(float8_modules().Float8Recorder())

    def stop_watching(self, state: State) -> None:
        if self._recorder is not None:
            self._note(self._recorder, "forward pass")
            self._recorder = None

    def _note(self, recorder: OperatorRecorder, seen_in: str) -> None:
        self._operators = {k: n for k, n in recorder.counts.items() if k in ("float8_mm", "_scaled_mm")}
        self._seen_in = seen_in

    def _probe(self, state: State) -> OperatorRecorder:
        """Record the forward and backward pass of one module with an odd number of rows."""
        module = next(iter(converted_layers(state.model).values()))
        recorder = float8_modules().Float8Recorder()
        sample = torch.ones(MULTIPLE + 1, module.in_features, device=device_of(state), requires_grad=True)
        wanted = [sample, *(p for p in module.parameters() if p.requires_grad)]
        precision = get_precision_context(state.precision, state.precision_config)
        with (
            cannot_run(self.name, "a float8 matmul cannot run here", "try another recipe, or remove it"),
            precision,
            torch.enable_grad(),
            recorder,
        ):
            output = type(module).forward(module, sample)  # the module's own hooks are not called
            torch.autograd.grad(output.float().sum(), wanted)
        return recorder

    def verify(self, state: State) -> dict[str, Any]:
        matmuls = self._operators.get("float8_mm", 0)
        kernels = self._operators.get("_scaled_mm", 0)
        fix = "do not change the model's modules after INIT, or remove it"
        if matmuls == 0:
            raise self.not_engaged(f"the {self._seen_in} had no matmul of float8 tensors", fix)
        if not self.emulate and kernels == 0:
            raise self.not_engaged(f"the {self._seen_in} ran no float8 kernel (_scaled_mm)", fix)
        return {"float8_matmuls": matmuls, "float8_kernels": kernels, "seen_in": self._seen_in}
