"""Float32 matmuls on tensor cores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from composer.core import State

from composer_speedups.core.flags import MATMUL_PRECISION, FlagTechnique
from composer_speedups.core.operator_recorder import matmul_error
from composer_speedups.core.requirements import Context, Requirement, needs_cuda
from composer_speedups.core.technique import OnUnavailable, Stage
from composer_speedups.core.trainer_state import device_of

__all__ = ["TF32Matmul"]


class TF32Matmul(FlagTechnique):
    """Float32 matmuls at TF32 ("high"), or at bf16 where torch has it ("medium").

    Args:
        precision: ``"high"`` (default) or ``"medium"``.
        on_unavailable: See :class:`Technique`.

    Raises:
        ValueError: Another precision.
        TechniqueError: At INIT, without a GPU of compute capability 8.0 (Ampere) or newer.
    """

    name = "tf32_matmul"
    stage = Stage.FLAGS
    flag = MATMUL_PRECISION

    def __init__(
        self, precision: Literal["high", "medium"] = "high", *, on_unavailable: OnUnavailable = "stop"
    ) -> None:
        super().__init__(on_unavailable=on_unavailable)
        if precision not in ("high", "medium"):
            raise ValueError(f"precision must be 'high' or 'medium', not {precision!r}")
        self.precision: Literal["high", "medium"] = precision

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
