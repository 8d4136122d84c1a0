"""The float8 Linear technique: the encoder's matmuls in float8."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from pydantic import Field

from composer_speedups.core.errors import Refusal
from composer_speedups.core.requirements import needs_autocast, needs_bf16, needs_cuda, needs_package
from composer_speedups.core.run import FirstBatch, Run
from composer_speedups.core.technique import FSDP, Order, Technique

# torch._scaled_mm needs Ada or newer, its row-wise kernel Hopper.
_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}


class Float8Linear(Technique):
    """Computes the matmuls of the model's blocks in float8 (torchao), on Ada, Hopper and newer GPUs.

    Weights keep their dtype; inputs, weights and gradients are scaled and cast for each matmul. Pooler and heads are
    outside of the blocks and are not changed.

    Raises:
        Refusal: At INIT, without torchao, bf16 mixed precision or such a GPU, or without a suitable Linear.

    Source: torchao.float8; Micikevicius et al., arXiv 2209.05433.
    """

    name = "float8_linear"
    order = Order.LAYERS
    effect = "lower_precision"
    not_with: ClassVar = {
        FSDP: "float8_linear computes with whole weights, which FSDP gathers only block by block",
        "kahan_optimizer": "kahan_optimizer trains without autocast, which float8_linear needs",
    }

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = Field("tensorwise")
    """One scale per tensor, one per row, or one per row with the weight's gradient in the autocast dtype."""
    emulate: bool = Field(False)
    """Round to float8 and multiply in float32, on any device. Slower; shows float8's effect on a model without the
    hardware."""

    @property
    def matmul_precision(self) -> str | None:
        return None if self.emulate else "fp8"  # the emulation multiplies in float32

    def needs(self, run: Run) -> Iterable[Refusal]:
        yield from needs_package(self.name, "torchao", ".[torchao]")
        if not self.emulate:
            yield from needs_cuda(self.name, run, f"{self.recipe} float8", _CAPABILITY[self.recipe])
        yield from needs_autocast(self.name, run, "float8_linear")
        yield from needs_bf16(self.name, run, "float8_linear")

    def engage(self, run: Run) -> dict[str, Any]:
        import dataclasses
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # raised by Python 3.12 for a docstring of torchao
            from composer_speedups.algorithms.float8_linear.modules import convertible, to_float8, to_plain
        from torchao.float8 import Float8LinearConfig

        modules = convertible(run.model)
        if not modules:
            reason = "no Linear in the model's blocks has inputs and outputs that are multiples of 16"
            raise self.refusal(reason, "remove it")
        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(self.recipe), emulate=self.emulate)
        for module in modules:
            to_float8(module, config)
            run.give_back(to_plain, module)
        return {"modules": len(modules), "recipe": self.recipe, "emulated": self.emulate}

    def proof(self, run: Run, seen: FirstBatch) -> dict[str, Any]:
        from composer_speedups.core.trainer_state import is_compiled

        matmuls = seen.operators["Float8TrainingTensor.mm"]
        if matmuls == 0 and is_compiled(run.model):  # whose operators are not seen
            return {"float8_matmuls": "not seen", "seen_in": "compiled code"}
        if matmuls == 0:
            fix = "do not change the model's modules after INIT, or remove it"
            raise self.no_effect("the batch had no matmul of float8 tensors", fix)
        return {"float8_matmuls": matmuls, "seen_in": "forward and backward pass"}
