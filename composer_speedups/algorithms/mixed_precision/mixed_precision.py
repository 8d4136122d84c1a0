"""The mixed precision technique: autocast in bf16 or fp16."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from composer_speedups.core.errors import Refusal
from composer_speedups.core.requirements import needs_cuda
from composer_speedups.core.run import FirstBatch, Run
from composer_speedups.core.technique import Order, Technique

if TYPE_CHECKING:
    import torch
    from torch import nn

    from composer_speedups.core.reversible import Inner


class MixedPrecision(Technique):
    """Computes matmuls in bf16 or fp16 under autocast; weights and optimizer are float32. fp16 scales the loss.

    On a GPU, it sets Composer's precision. On a CPU, for which Composer supports only fp32, ``allow_cpu`` runs the
    model's ``forward`` under bf16 autocast, as the technique does in other loops.

    Raises:
        Refusal: At INIT, for bf16 on a GPU below compute capability 8.0, on a CPU except for bf16 with ``allow_cpu``,
            for 16-bit weights that are not frozen, and for fp16 in another loop, which must scale the loss itself.
    """

    name = "mixed_precision"
    order = Order.FLAGS
    effect = "lower_precision"

    dtype: Literal["bf16", "fp16"] = Field("bf16")
    """Dtype of matmuls; fp16 needs a GPU and scales the loss."""
    allow_cpu: bool = Field(False)
    """Engage bf16 on a CPU, too, where it is slower on most chips; otherwise it is refused."""

    @property
    def matmul_precision(self) -> str | None:
        return self.dtype

    def needs(self, run: Run) -> Iterable[Refusal]:
        if self.dtype == "fp16":
            yield from needs_cuda(self.name, run, "fp16")
            if run.in_other_loop:
                yield self.refusal("fp16 needs a loop that scales the loss", "use bf16, or your loop's own fp16")
        elif run.device.type == "cuda" or not self.allow_cpu:
            yield from needs_cuda(self.name, run, "bf16", (8, 0))

    def precision_after(self, run: Run) -> str:
        return f"amp_{self.dtype}"

    def engage(self, run: Run) -> dict[str, Any]:
        import torch

        before = run.precision
        for name, parameter in run.model.named_parameters():
            if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
                # the optimizer would update it in 16 bits, and updates below its resolution would be lost
                reason = f"trains float32 weights, and {name} is {str(parameter.dtype).removeprefix('torch.')}"
                raise self.refusal(reason, "load the model with dtype=torch.float32")
        if run.device.type == "cuda" and run.state is not None:
            from composer.core import Precision

            run.state.precision = Precision(f"amp_{self.dtype}")
        else:
            from composer_speedups.core.reversible import replace_forward, restore_forward

            signature = inspect.signature(run.model.forward)  # by which Trainers choose a batch's entries
            plain = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
            forward: Any = replace_forward(run.model, _under_autocast, torch.bfloat16)
            forward.__signature__ = inspect.Signature(plain)  # without annotations, which cannot all be pickled
            run.give_back(restore_forward, run.model)
        return {"dtype": self.dtype, "precision_before": before}

    def proof(self, run: Run, seen: FirstBatch) -> dict[str, Any]:
        wanted = {"bf16": "bfloat16", "fp16": "float16"}[self.dtype]
        dtypes = seen.matmul_dtypes | seen.outputs
        if wanted not in dtypes:
            raise self.no_effect(
                f"matmuls and outputs were {', '.join(sorted(dtypes)) or 'not seen'}, and none was {wanted}",
                "look for code that changes the Trainer's precision after INIT",
            )
        return {"dtypes_seen": sorted(dtypes)}


def _under_autocast(model: nn.Module, inner: Inner, dtype: torch.dtype, /, *args: Any, **kwargs: Any) -> Any:
    import torch

    from composer_speedups.core.reversible import call_inner

    with torch.autocast(next(model.parameters()).device.type, dtype):
        return call_inner(model, inner, *args, **kwargs)
