"""The TF32 technique: float32 matmuls on tensor cores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from composer_speedups.core.errors import Refusal
from composer_speedups.core.requirements import needs_cuda
from composer_speedups.core.run import FirstBatch, Run
from composer_speedups.core.technique import Order, Technique

if TYPE_CHECKING:
    import torch


class TF32Matmul(Technique):
    """Computes float32 matmuls in TF32 ("high"), or in bf16 if torch supports it ("medium").

    In Composer's Trainer the flag is set during ``fit``, ``eval`` and ``predict`` only, so that several Trainers in one
    process do not affect each other.

    Raises:
        Refusal: At INIT, without a GPU of compute capability 8.0 (Ampere) or newer.

    Source: torch.set_float32_matmul_precision.
    """

    name = "tf32_matmul"
    order = Order.FLAGS
    effect = "lower_precision"

    precision: Literal["high", "medium"] = Field("high")
    """high is TF32; medium is bf16 if torch supports it."""

    def needs(self, run: Run) -> Iterable[Refusal]:
        yield from needs_cuda(self.name, run, "TF32", (8, 0))

    def engage(self, run: Run) -> dict[str, Any]:
        from composer_speedups.core.reversible import MATMUL_PRECISION

        before = MATMUL_PRECISION.read()
        if run.in_other_loop:
            self.fit_start(run)
        run.give_back(MATMUL_PRECISION.release, self)
        return {"before": before, "during": self.precision}

    def fit_start(self, run: Run) -> None:
        from composer_speedups.core.reversible import MATMUL_PRECISION

        MATMUL_PRECISION.take(self, self.precision)

    def fit_end(self, run: Run) -> None:
        from composer_speedups.core.reversible import MATMUL_PRECISION

        MATMUL_PRECISION.give_back(self)

    eval_standalone_start = eval_before_all = predict_start = fit_start
    eval_standalone_end = eval_after_all = predict_end = fit_end

    def proof(self, run: Run, seen: FirstBatch) -> dict[str, Any]:
        error = matmul_error(run.device)
        if error < 1e-5:
            raise self.no_effect(
                f"a float32 matmul still has full precision (relative error {error:.1e})",
                "look for code that sets torch's matmul precision during fit",
            )
        return {"matmul_relative_error": error}


def matmul_error(device: torch.device) -> float:
    """Relative error of a float32 matmul on ``device`` compared with float64: about 1e-7 in float32, 3e-4 in TF32."""
    import torch

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator, dtype=torch.float64).float() for _ in range(2))
    exact = a.double() @ b.double()
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        product = (a.to(device) @ b.to(device)).cpu().double()
    return float((product - exact).norm() / exact.norm())
