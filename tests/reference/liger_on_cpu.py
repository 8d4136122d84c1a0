"""Run Liger's LayerNorm kernels on the CPU, in Triton's interpreter; import this module in a process of its own.

Set TRITON_INTERPRET=1 before Triton is imported. Three features that the interpreter lacks are added: ``.to`` of float
arguments, libdevice's ``rsqrt``, and loop bounds under NumPy 2.4.
"""

from __future__ import annotations

import copy
from typing import Any

import liger_kernel.ops.layer_norm as liger
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from torch import nn

from composer_speedups.algorithms.fast_layernorm import functional
from composer_speedups.algorithms.fast_layernorm.layers import TritonLayerNorm
from composer_speedups.packing.derived_classes import swap_class
from tests.reference import fused_kernels  # noqa: F401  (makes the interpreter twice as fast)
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


def check_parity() -> int:
    checked = 0
    for shape in [(1, 16), (3, 5, 16), (0, 16), (2, 3, 33), (7, 5), (4, 2, 768)]:
        for autocast in (False, True):
            torch.manual_seed(0)
            reference = nn.LayerNorm(shape[-1])
            nn.init.normal_(reference.weight)
            nn.init.normal_(reference.bias)
            changed: Any = copy.deepcopy(reference)
            assert swap_class(changed, nn.LayerNorm, TritonLayerNorm) == [""]
            changed.eps = Float(changed.eps)
            dtype = torch.bfloat16 if autocast else torch.float32
            x, y = (torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
            expected = reference(x)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                actual = changed(y)
            assert actual.dtype == dtype
            assert "LigerLayerNorm" in actual.grad_fn.name()
            upstream = torch.randn(shape, generator=torch.Generator().manual_seed(2))
            expected.backward(upstream)
            actual.backward(upstream.to(dtype))
            assert_near([actual.float(), y.grad], [expected, x.grad], dtype, f"{shape}")
            one, other = ([p.grad for p in module.parameters()] for module in (changed, reference))
            assert_near(one, other, dtype, f"{shape}, gradients of the parameters")
            checked += 1
    return checked


def train(precision: str) -> dict[str, Any]:
    """Train with the technique on the CPU, without its requirement of a GPU."""
    from composer_speedups import FastLayerNorm, MixedPrecision
    from tests.helpers.common import awkward_batches, final_weights, tiny_bert, trained
    from tests.reference.loop import train_plainly

    functional.requirements_of = lambda *_: ()
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
    return {"checked": check_parity(), "fp32": train("fp32"), "bf16": train("bf16")}
