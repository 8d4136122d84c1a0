"""Matrix products with the tanh form of GELU as their epilogue, by the cuBLASLt that torch has loaded.

GELU and its derivative are applied to a product's float32 sums before they are stored, which saves one pass over memory
per direction. If the library is not found, or supports no such product of these sizes, torch's operators compute the
same. :func:`~.common.ran` is told which: ``gelu_epilogue`` or ``gelu_operator``.

The algorithm is the heuristic's first, which is the same in every run; the fastest of several timed ones might not be.

Shapes: T tokens, I inputs, F units of the feed-forward layer.
Sources: cuBLAS's documentation of cublasLtMatmul; cublasLt.h for the numbers.
"""

from __future__ import annotations

import ctypes
import os
import threading
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from composer_speedups.kernels.common import ran

__all__ = ["gelu_product", "gelu_product_backward"]

_TYPES = {torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
_FLOAT32, _SUMS_IN_FLOAT32 = 0, 68  # cudaDataType_t, cublasComputeType_t
_TRANSPOSE_FIRST, _EPILOGUE, _BIAS, _KEPT, _KEPT_STRIDE = 3, 7, 8, 11, 12  # cublasLtMatmulDescAttributes_t
_GELU_AUX_BIAS, _DGELU = 164, 192  # cublasLtEpilogue_t
_WORKSPACE, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # cublasLtMatmulPreferenceAttributes_t
_REDUCED_IN_FLOAT32 = 2  # cublasLtReductionScheme_t: of a product whose inputs are split
_NOT_SUPPORTED = 15  # cublasStatus_t
_WORKSPACE_BYTES = 32 * 2**20  # at most; cuBLAS's recommendation for Hopper
_ALIGNMENT = 16  # of every pointer, in bytes

_lock = threading.Lock()  # a plan's pointers are set before each call


def gelu_product(x_TI: Tensor, weight_FI: Tensor, bias_F: Tensor) -> tuple[Tensor, Tensor]:
    """Return x · weightᵀ + bias and its GELU, (T, F) each; contiguous tensors of one dtype, bf16 or fp16."""
    plan = _plan_for(_GELU_AUX_BIAS, x_TI, weight_FI, bias_F)
    if plan is None:
        up_TF = torch.addmm(bias_F, x_TI, weight_FI.t())
        return up_TF, F.gelu(up_TF, approximate="tanh")
    up_TF = x_TI.new_empty(len(x_TI), len(weight_FI))
    return up_TF, plan.run(weight_FI, x_TI, up_TF, bias_F)


def gelu_product_backward(grad_TI: Tensor, weight_IF: Tensor, up_TF: Tensor) -> Tensor:
    """Return the gradient of GELU's input (T, F), from the gradient of the product that follows GELU.

    Args:
        grad_TI: Gradient of GELU(up) · weightᵀ.
        weight_IF: That product's weight.
        up_TF: GELU's input. All are contiguous.
    """
    plan = _plan_for(_DGELU, grad_TI, weight_IF, up_TF)
    if plan is None:
        return torch.ops.aten.gelu_backward(torch.mm(grad_TI, weight_IF), up_TF, approximate="tanh")  # type: ignore[no-any-return]
    return plan.run(weight_IF, grad_TI, up_TF)


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t, which begins with a cublasLtMatmulAlgo_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int),
        ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


class _Plan(NamedTuple):
    """A product of fixed sizes. cuBLAS stores matrices by columns, so its operands and result are the transposes of
    torch's: out (F, T) = weight (F, I) · x (I, T)."""

    library: Any
    handle: ctypes.c_void_p
    product: ctypes.c_void_p
    weight: ctypes.c_void_p
    x: ctypes.c_void_p
    out: ctypes.c_void_p
    algorithm: _Algorithm

    def run(self, weight: Tensor, x_TI: Tensor, up_TF: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the result (T, F) on the current stream; reads GELU's input, or with a bias, writes it."""
        out_TF = torch.empty_like(up_TF)
        size = self.algorithm.workspace
        workspace = torch.empty(size, dtype=torch.uint8, device=x_TI.device) if size else None
        stream = torch.cuda.current_stream(x_TI.device).cuda_stream
        out, given = out_TF.data_ptr(), (weight.data_ptr(), self.weight, x_TI.data_ptr(), self.x)
        with _lock:
            _set(self.library.cublasLtMatmulDescSetAttribute, self.product, _KEPT, ctypes.c_uint64(up_TF.data_ptr()))
            if bias is not None:
                _set(self.library.cublasLtMatmulDescSetAttribute, self.product, _BIAS, ctypes.c_uint64(bias.data_ptr()))
            status = self.library.cublasLtMatmul(
                self.handle, self.product, _ONE, *given, _ZERO, out, self.out, out, self.out,
                ctypes.byref(self.algorithm), 0 if workspace is None else workspace.data_ptr(), size, stream,
            )  # fmt: skip
        _check(status, "cublasLtMatmul")
        return out_TF


_ONE, _ZERO = (ctypes.pointer(ctypes.c_float(number)) for number in (1.0, 0.0))


def _plan_for(epilogue: int, x: Tensor, weight: Tensor, last: Tensor) -> _Plan | None:
    """The plan for operands; None without one. ``last`` is the bias or GELU's input, as the epilogue needs."""
    plan = None
    if x.is_cuda and not (x.data_ptr() | weight.data_ptr() | last.data_ptr()) % _ALIGNMENT:
        plan = _plan(epilogue, len(x), last.shape[-1], x.shape[1], x.dtype, x.device.index)
    ran("gelu_operator" if plan is None else "gelu_epilogue")
    return plan


@cache
def _plan(epilogue: int, tokens: int, units: int, inputs: int, dtype: torch.dtype, device: int) -> _Plan | None:
    library, forward = _library(), epilogue == _GELU_AUX_BIAS
    if library is None or dtype not in _TYPES or not tokens or units % 8 or inputs % 8:
        return None
    handle = _handle(device)

    def matrix(rows: int, columns: int) -> ctypes.c_void_p:
        return _new(library.cublasLtMatrixLayoutCreate, _TYPES[dtype], rows, columns, rows)

    # The forward pass's weight is (F, I) in torch, so it is (I, F) for cuBLAS, and transposed.
    weight = matrix(inputs, units) if forward else matrix(units, inputs)
    x, out = matrix(inputs, tokens), matrix(units, tokens)
    product = _new(library.cublasLtMatmulDescCreate, _SUMS_IN_FLOAT32, _FLOAT32)
    set_product, set_preference = library.cublasLtMatmulDescSetAttribute, library.cublasLtMatmulPreferenceSetAttribute
    _set(set_product, product, _TRANSPOSE_FIRST, ctypes.c_int32(forward))
    _set(set_product, product, _EPILOGUE, ctypes.c_int32(epilogue))
    _set(set_product, product, _KEPT_STRIDE, ctypes.c_int64(units))
    for pointer in (_KEPT, _BIAS)[: 1 + forward]:  # the heuristic reads the alignment from the pointer
        _set(set_product, product, pointer, ctypes.c_uint64(_ALIGNMENT))
    preference = _new(library.cublasLtMatmulPreferenceCreate)
    _set(set_preference, preference, _WORKSPACE, ctypes.c_uint64(_WORKSPACE_BYTES))
    _set(set_preference, preference, _REDUCTIONS, ctypes.c_uint32(_REDUCED_IN_FLOAT32))
    for operand in _ALIGNMENTS:
        _set(set_preference, preference, operand, ctypes.c_uint32(_ALIGNMENT))
    found, count = _Algorithm(), ctypes.c_int()
    status = library.cublasLtMatmulAlgoGetHeuristic(
        handle, product, weight, x, out, out, preference, 1, ctypes.byref(found), ctypes.byref(count)
    )
    _check(library.cublasLtMatmulPreferenceDestroy(preference), "cublasLtMatmulPreferenceDestroy")
    if status == _NOT_SUPPORTED or (status == 0 and (not count.value or found.state)):
        return None
    _check(status, "cublasLtMatmulAlgoGetHeuristic")
    return _Plan(library, handle, product, weight, x, out, found)


@cache
def _library() -> Any:
    """The library that torch has loaded; None if there is none."""
    try:
        major = (torch.version.cuda or "").split(".")[0]
        library = ctypes.CDLL(f"libcublasLt.so.{major}", mode=os.RTLD_NOLOAD)
    except OSError:
        return None
    pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    for set_attribute in (library.cublasLtMatmulDescSetAttribute, library.cublasLtMatmulPreferenceSetAttribute):
        set_attribute.argtypes = [pointer, number, pointer, size]
    library.cublasLtMatrixLayoutCreate.argtypes = [pointer, number, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64]
    library.cublasLtMatmulAlgoGetHeuristic.argtypes = [*[pointer] * 7, number, pointer, pointer]
    library.cublasLtMatmul.argtypes = [*[pointer] * 14, size, pointer]
    return library


@cache
def _handle(device: int) -> ctypes.c_void_p:
    with torch.cuda.device(device):
        return _new(_library().cublasLtCreate)


def _new(create: Any, *args: Any) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    _check(create(ctypes.byref(made), *args), create.__name__)
    return made


def _set(set_attribute: Any, owner: ctypes.c_void_p, attribute: int, value: Any) -> None:
    status = set_attribute(owner, attribute, ctypes.byref(value), ctypes.sizeof(value))
    _check(status, set_attribute.__name__)


def _check(status: int, function: str) -> None:
    if status:
        raise RuntimeError(f"{function} returned cublasStatus_t {status}")
