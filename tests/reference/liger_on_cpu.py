"""Run Liger's LayerNorm kernels on the CPU, in Triton's interpreter; import this module in a process of its own.

Set TRITON_INTERPRET=1 before Triton is imported. Three features that the interpreter lacks are added: ``.to`` of float
arguments, libdevice's ``rsqrt``, and loop bounds under NumPy 2.4.
"""

from __future__ import annotations

from typing import Any

import liger_kernel.ops.layer_norm as liger
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from torch import nn

from composer_speedups.algorithms.fast_layernorm.modules import TritonLayerNorm
from tests.reference import fused_kernels  # noqa: F401  (makes the interpreter twice as fast)
from tests.reference.layernorm import check_layer
from tests.reference.tolerance import assert_near


class Float(float):
    def to(self, _dtype: Any) -> Float:
        return self


def complete_the_interpreter() -> None:
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    liger.rsqrt = lambda x: tl.rsqrt(x)


def train(precision: str) -> dict[str, Any]:
    """Train with the technique on the CPU, without its requirement of a GPU."""
    from composer_speedups import FastLayerNorm, MixedPrecision
    from tests.helpers.common import awkward_batches, final_weights, tiny_bert, trained
    from tests.reference.loop import train_plainly

    FastLayerNorm.needs = lambda *_: ()  # type: ignore[assignment, method-assign]
    model = tiny_bert()
    expected = train_plainly(model, awkward_batches())
    for norm in [m for m in model.modules() if isinstance(m, nn.LayerNorm)]:
        norm.eps = Float(norm.eps)
    technique = FastLayerNorm("triton")
    bf16 = [MixedPrecision("bf16", allow_cpu=True)] if precision == "bf16" else []
    trainer = trained([technique, *bf16], model=model, batches=awkward_batches())
    trained = {n.removeprefix("model."): w for n, w in final_weights(trainer).items()}
    assert_near(trained, expected.weights, torch.bfloat16 if bf16 else torch.float32, "weights after training")
    return technique.evidence


def check_all() -> dict[str, Any]:
    """Compare :class:`TritonLayerNorm` with nn.LayerNorm at awkward shapes, and return the evidence of two runs."""
    torch.set_num_threads(1)
    complete_the_interpreter()
    for shape in [(1, 16), (3, 5, 16), (0, 16), (2, 3, 33), (7, 5), (4, 2, 768)]:
        for autocast in (None, torch.bfloat16):
            check_layer(TritonLayerNorm, shape, "cpu", autocast, eps=Float(1e-5))
    return {"fp32": train("fp32"), "bf16": train("bf16")}
