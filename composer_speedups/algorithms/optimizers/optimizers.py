"""The declarations of the optimizer techniques: their settings, and how they change the result. Their kinds, which have
the same names, are in :mod:`.kinds`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from composer_speedups.algorithms.optimizers.technique import ONE_OPTIMIZER, OptimizerTechnique
from composer_speedups.core.errors import Refusal
from composer_speedups.core.technique import FSDP, Effect

if TYPE_CHECKING:
    from composer_speedups.core.run import Run


class ForEachOptimizer(OptimizerTechnique):
    """Makes the run's torch optimizer step with multi-tensor (horizontally batched) kernels."""

    name = "foreach_optimizer"
    effect = "rounding"
    not_with = ONE_OPTIMIZER


class FusedOptimizer(OptimizerTechnique):
    """Makes the run's torch optimizer step with torch's fused kernel."""

    name = "fused_optimizer"
    effect = "rounding"
    not_with = ONE_OPTIMIZER


class ApexOptimizer(OptimizerTechnique):
    """Replaces the run's AdamW by Apex's FusedAdam, which updates many parameters in one kernel."""

    name = "apex_optimizer"
    effect = "rounding"


class BnbOptimizer(OptimizerTechnique):
    """Uses bitsandbytes' AdamW with 8-bit or 32-bit state; embeddings keep 32-bit state."""

    name = "bnb_optimizer"
    effect = "recipe"
    purpose = "saves memory"

    bits: Literal[8, 32] = Field(8)
    """Bits per value of each moment; 32 is AdamW up to rounding."""
    paged: bool = Field(False)
    """Keep the state in paged memory; needs a GPU."""
    stable_embedding: bool = Field(False)
    """Add a LayerNorm to the word embedding, as the paper on 8-bit optimizers recommends."""
    min_8bit_size: int = Field(4096, ge=0)
    """Minimum number of values of a parameter with 8-bit state."""

    def needs(self, run: Run) -> Iterable[Refusal]:
        if self.stable_embedding and "lora" in run.techniques:
            reason = "conflicts with lora, which freezes the word embedding: a stable embedding must be trained"
            yield self.refusal(reason, "set stable_embedding: false, or remove one of them")
        yield from super().needs(run)

    @classmethod
    def effect_with(cls, settings: Mapping[str, Any], device: str | None) -> Effect:
        return "rounding" if settings.get("bits") == 32 and not settings.get("stable_embedding") else "recipe"


class AdafactorOptimizer(OptimizerTechnique):
    """Replaces the run's AdamW by Adafactor, whose state is a small fraction of AdamW's."""

    name = "adafactor"
    effect = "recipe"
    purpose = "saves memory"

    scale_parameter: bool = Field(False)
    """Multiply the learning rate by the RMS of each parameter."""


class KahanOptimizer(OptimizerTechnique):
    """Trains in pure bfloat16 (weights, gradients and AdamW's state), with Kahan-compensated updates."""

    name = "kahan_optimizer"
    effect = "recipe"  # the weights themselves become bfloat16
    purpose = "saves memory"
    not_with: ClassVar = {
        **OptimizerTechnique.not_with,
        "mixed_precision": "kahan_optimizer converts the weights to bfloat16, so autocast would have no effect",
        "tf32_matmul": "kahan_optimizer converts the weights to bfloat16, so there are no float32 matmuls",
    }


class LowBitOptimizer(OptimizerTechnique):
    """Uses torchao's AdamW with 8-bit, 4-bit or fp8 state; embeddings keep float32 state."""

    name = "lowbit_optimizer"
    effect = "recipe"
    purpose = "saves memory"

    bits: Literal[8, 4, "fp8"] = Field(8)
    """Bits per value of each moment; fp8 is e4m3."""
    min_size: int = Field(4096, ge=0)
    """Minimum number of values of a parameter with low-bit state."""


class OffloadedOptimizer(OptimizerTechnique):
    """Moves AdamW's state (8 bytes per parameter) and its step to the CPU."""

    name = "offloaded_optimizer"
    effect = "rounding"
    computes_on_host = True
    purpose = "saves memory"

    allow_cpu: bool = Field(False)
    """Engage in runs on a CPU, too, where it saves nothing; otherwise it is refused."""


class ShardedOptimizer(OptimizerTechnique):
    """Splits AdamW's state (8 bytes per parameter) over the ranks of DDP, which is ZeRO stage 1.

    With one rank it engages, so that a run can be resumed on one, and its evidence says that nothing is split.
    """

    name = "sharded_optimizer"
    effect = "rounding"
    not_with: ClassVar = {**ONE_OPTIMIZER, FSDP: "FSDP already shards the optimizer's state"}
    purpose = "saves memory"
