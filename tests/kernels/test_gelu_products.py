"""Products with the tanh form of GELU on the CPU: torch's operators, and what cuBLASLt would be asked for."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from composer_speedups.kernels import gelu_products
from composer_speedups.kernels.common import counting
from composer_speedups.kernels.gelu_products import gelu_product, gelu_product_backward

HALF = np.float16


def operands(dtype: torch.dtype, tokens: int, inputs: int, units: int) -> list[Tensor]:
    """x, weight and bias of the first product, and gradient and weight of the second one."""
    torch.manual_seed(0)
    shapes = (tokens, inputs), (units, inputs), (units,), (tokens, inputs), (inputs, units)
    return [torch.randn(*shape).div(2).to(dtype) for shape in shapes]


def compare(dtype: torch.dtype, tokens: int, inputs: int, units: int) -> None:
    """Compare both functions with torch's autograd in float32."""
    x, weight, bias, grad, next_weight = operands(dtype, tokens, inputs, units)
    up, activated = gelu_product(x, weight, bias)
    found = [up, activated, gelu_product_backward(grad, next_weight, up)]
    expected = F.linear(x.float(), weight.float(), bias.float())
    leaf = up.float().requires_grad_()
    (F.gelu(leaf, approximate="tanh") @ next_weight.float().t()).backward(grad.float())
    near = {"rtol": 2e-3, "atol": 3e-3} if dtype == torch.float16 else {"rtol": 1e-5, "atol": 1e-5}
    wanted = [expected, F.gelu(expected, approximate="tanh"), leaf.grad]
    torch.testing.assert_close(found, wanted, **near, check_dtype=False)
    assert {t.dtype for t in found} == {dtype}


def test_torchs_operators_compute_the_tanh_form_and_its_derivative() -> None:
    with counting() as ran:
        compare(torch.float32, 5, 7, 9)
    assert ran == {"gelu_operator": 2}


def _attribute(get: Any, owner: int, number: int, kind: Any) -> Any:
    value, size = kind(), ctypes.c_size_t()
    pointers = ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(kind)), ctypes.byref(size)
    assert get(ctypes.c_void_p(owner), number, *pointers) == 0
    assert size.value == ctypes.sizeof(kind)
    return value.value


class Simulated:
    """cuBLASLt whose descriptors are real, and whose products numpy computes as the descriptors say, by columns."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def cublasLtMatmulAlgoGetHeuristic(self, *args: Any) -> int:
        found, count = args[-2]._obj, args[-1]._obj
        count.value, found.workspace = 1, 128
        return 0

    def _matrix(self, pointer: int, layout: ctypes.c_void_p) -> Any:
        kinds = (ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64)
        get = self._library.cublasLtMatrixLayoutGetAttribute
        dtype, order, rows, columns, stride = (_attribute(get, layout.value, i, k) for i, k in enumerate(kinds))  # type: ignore[arg-type]
        assert (dtype, order, stride) == (2, 0, rows)  # fp16, by columns, contiguous
        return self._numbers(pointer, columns, rows).T

    def _numbers(self, pointer: int, *shape: int) -> Any:
        return np.frombuffer((ctypes.c_uint16 * int(np.prod(shape))).from_address(pointer), HALF).reshape(shape)

    def cublasLtMatmul(self, handle: Any, product: Any, one: Any, *args: Any) -> int:
        a, of_a, b, of_b, zero, c, of_c, d, of_d, _, workspace, size, stream = args
        assert (one.contents.value, zero.contents.value, c, of_c) == (1.0, 0.0, d, of_d)
        assert (bool(workspace), size, stream) == (True, 128, 5)
        get, owner = self._library.cublasLtMatmulDescGetAttribute, product.value
        kinds: dict[int, Any] = dict.fromkeys((0, 1, 3, 4, 7), ctypes.c_int32)
        kinds |= {11: ctypes.c_uint64, 12: ctypes.c_int64}
        compute, scale, turn_a, turn_b, epilogue, kept, stride = (_attribute(get, owner, *of) for of in kinds.items())
        assert (compute, scale, turn_b) == (68, 0, 0)
        left, right, out = self._matrix(a, of_a), self._matrix(b, of_b), self._matrix(d, of_d)
        total = (left.T if turn_a else left).astype(np.float32) @ right.astype(np.float32)
        assert total.shape == out.shape
        assert stride == len(out)
        aux = self._numbers(kept, out.shape[1], stride).T
        if epilogue == 164:
            total += self._numbers(_attribute(get, owner, 8, ctypes.c_uint64), stride)[:, None]
            aux[...] = total
            out[...] = F.gelu(torch.from_numpy(total), approximate="tanh").numpy()
        else:
            assert epilogue == 192
            x = torch.from_numpy(aux.astype(np.float32))
            out[...] = torch.ops.aten.gelu_backward(torch.from_numpy(total), x, approximate="tanh").numpy()
        return 0


@pytest.mark.skipif(gelu_products._library() is None, reason="this build of torch loads no libcublasLt")
def test_cublaslt_is_asked_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Simulated(gelu_products._library())
    handle, stream = ctypes.c_void_p(1), type("Stream", (), {"cuda_stream": 5})
    monkeypatch.setattr(gelu_products, "_library", lambda: library)
    monkeypatch.setattr(gelu_products, "_handle", lambda device: handle)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    plan = gelu_products._plan.__wrapped__

    def plan_for(epilogue: int, x: Tensor, weight: Tensor, last: Tensor) -> Any:
        return plan(epilogue, len(x), last.shape[-1], x.shape[1], x.dtype, 0)

    monkeypatch.setattr(gelu_products, "_plan_for", plan_for)
    for sizes in ((5, 16, 24), (64, 40, 8)):
        compare(torch.float16, *sizes)
    for dtype, *odd in ((torch.float16, 5, 12, 24), (torch.float16, 0, 16, 24), (torch.float32, 5, 16, 24)):
        assert plan(164, odd[0], odd[2], odd[1], dtype, 0) is None, "torch's operators compute these"
