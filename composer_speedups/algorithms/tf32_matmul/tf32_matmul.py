"""The TF32 technique: float32 matmuls on tensor cores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from composer.core import State
from pydantic import Field

from composer_speedups.core.flags import MATMUL_PRECISION, FlagTechnique
from composer_speedups.core.requirements import Context, Requirement, needs_cuda
from composer_speedups.core.technique import Stage, Variant
from composer_speedups.core.trainer_state import device_of


class TF32Matmul(FlagTechnique):
    """Computes float32 matmuls in TF32 ("high"), or in bf16 if torch supports it ("medium").

    Raises:
        TechniqueError: At INIT, without a GPU of compute capability 8.0 (Ampere) or newer.
    """

    name = "tf32_matmul"
    stage = Stage.FLAGS
    exactness = "lower_precision"
    flag = MATMUL_PRECISION
    gain = 2.9
    trials = (Variant({"precision": "high"}),)

    precision: Literal["high", "medium"] = Field("high")
    """high is TF32; medium is bf16 if torch supports it."""

    def requirements(self, context: Context) -> Iterable[Requirement]:
        yield needs_cuda(context, "TF32", (8, 0))

    def wanted_flag(self) -> str:
        return self.precision

    def verify(self, state: State) -> dict[str, Any]:
        error = matmul_error(device_of(state))
        if error < 1e-5:
            raise self.not_engaged(
                f"a float32 matmul still has full precision (relative error {error:.1e})",
                "look for code that sets torch's matmul precision during fit",
            )
        return {"matmul_relative_error": error}


def matmul_error(device: torch.device) -> float:
    """Relative error of a float32 matmul on ``device`` compared with float64: about 1e-7 in float32, 3e-4 in TF32."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator, dtype=torch.float64).float() for _ in range(2))
    exact = a.double() @ b.double()
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        product = (a.to(device) @ b.to(device)).cpu().double()
    return float((product - exact).norm() / exact.norm())
