"""AdamW for many float32 parameters in one kernel launch, which reads and writes each number once.

torch's fused AdamW launches several kernels with up to a hundred tensors each; this kernel finds its tensors in a table
of addresses on the device, so that one launch covers all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["AdamWTables", "adamw_step"]

_OPTIONS = {"BLOCK": 1024, "num_warps": 4}  # the fastest of six that were tried on an H200


class AdamWTables:
    """Addresses of a list of parameters and their state, and of the gradients of the last step.

    Valid as long as the tensors keep their memory; see :meth:`fits`. For N parameters and P programs of the kernel:

    Attributes:
        tensors: int64 (4, N): addresses of parameters, first moments, second moments and step counts.
        gradients: int64 (N,): addresses of the last step's gradients.
        sizes: int64 (N,): number of elements.
        blocks: int32 (P, 2): each program's parameter, and its block of that parameter.

    Args:
        tensors: The parameters, their first moments and their second moments, each a list of contiguous float32
            tensors, and the number of steps of each parameter, float32 ().
    """

    def __init__(self, *tensors: Sequence[Tensor]) -> None:
        parameters = tensors[0]
        device = parameters[0].device
        self._addresses = [_addresses(kind) for kind in tensors]
        self.tensors = torch.tensor(self._addresses, dtype=torch.int64, device=device)
        sizes = [parameter.numel() for parameter in parameters]
        self.sizes = torch.tensor(sizes, dtype=torch.int64, device=device)
        counts = torch.tensor([triton.cdiv(size, _OPTIONS["BLOCK"]) for size in sizes])
        tensor = torch.repeat_interleave(torch.arange(len(sizes)), counts)
        block = torch.arange(len(tensor)) - (counts.cumsum(0) - counts)[tensor]
        self.blocks = torch.stack([tensor, block], dim=1).to(torch.int32).to(device)
        self._gradients: list[int] = []
        self.gradients = torch.empty(len(sizes), dtype=torch.int64, device=device)

    def fits(self, *tensors: Sequence[Tensor]) -> bool:
        """Whether these are the tensors at the addresses in the tables."""
        return self._addresses == [_addresses(kind) for kind in tensors]

    def set_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Enter the addresses of a step's gradients, without synchronizing."""
        addresses = _addresses(gradients)
        if addresses != self._gradients:
            self._gradients = addresses
            table = torch.tensor(addresses, dtype=torch.int64, pin_memory=self.gradients.is_cuda)
            self.gradients.copy_(table, non_blocking=True)


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def adamw_step(
    tables: AdamWTables,
    gradients: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update the parameters and moments of ``tables`` in place; the step counts must already include this step.

    Args:
        tables: The parameters and their state.
        gradients: Contiguous float32 gradients, in the order of the parameters.
        lr, betas, eps, weight_decay: As in ``torch.optim.AdamW``; betas are above 0.

    Source: Loshchilov and Hutter, arXiv 1711.05101.
    """
    tables.set_gradients(gradients)
    _adamw[(len(tables.blocks),)](
        tables.tensors, tables.gradients, tables.sizes, tables.blocks, len(tables.sizes), lr, 1 - lr * weight_decay,
        1 - betas[0], betas[1], 1 - betas[1], math.log(betas[0]), math.log(betas[1]), eps, **_OPTIONS,
    )  # fmt: skip


@triton.jit
def _bias_correction(exponent):
    """Return 1 - exp(exponent), also for exponents close to 0, of which the difference would lose most digits."""
    e = exponent
    series = 1 + e / 2 * (1 + e / 3 * (1 + e / 4 * (1 + e / 5 * (1 + e / 6 * (1 + e / 7 * (1 + e / 8))))))
    return tl.where(e > -0.5, -e * series, 1 - tl.exp(e))


@triton.jit
def _pointer(address):
    return tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)


@triton.jit(do_not_specialize=["tensors"])
def _adamw(
    tensors_ptr, gradients_ptr, sizes_ptr, blocks_ptr, tensors, lr, decay, new1, beta2, new2, log1, log2, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    index = tl.load(blocks_ptr + 2 * program)
    start = tl.load(blocks_ptr + 2 * program + 1).to(tl.int64) * BLOCK
    parameter_at, average_at = tl.load(tensors_ptr + index), tl.load(tensors_ptr + tensors + index)
    square_at, step_at = tl.load(tensors_ptr + 2 * tensors + index), tl.load(tensors_ptr + 3 * tensors + index)
    gradient_at = tl.load(gradients_ptr + index)
    step = tl.load(step_at.to(tl.pointer_type(tl.float32)))
    size = tl.load(sizes_ptr + index)
    rate, root = lr / _bias_correction(step * log1), tl.sqrt(_bias_correction(step * log2))
    at = start + tl.arange(0, BLOCK)
    whole = start + BLOCK <= size
    if whole & (((parameter_at | average_at | square_at | gradient_at) & 15) == 0):
        # Without a mask and with aligned addresses, a thread reads 16 bytes at once.
        parameter_ptr, average_ptr = _pointer(parameter_at) + at, _pointer(average_at) + at
        square_ptr, gradient_ptr = _pointer(square_at) + at, _pointer(gradient_at) + at
        average, square, parameter = _updated(
            tl.load(gradient_ptr), tl.load(average_ptr), tl.load(square_ptr), tl.load(parameter_ptr),
            rate, root, decay, new1, beta2, new2, eps,
        )  # fmt: skip
        tl.store(average_ptr, average)
        tl.store(square_ptr, square)
        tl.store(parameter_ptr, parameter)
    else:
        valid = at < size
        kind = tl.pointer_type(tl.float32)
        parameter_ptr, average_ptr = parameter_at.to(kind) + at, average_at.to(kind) + at
        square_ptr, gradient_ptr = square_at.to(kind) + at, gradient_at.to(kind) + at
        average, square, parameter = _updated(
            tl.load(gradient_ptr, valid, 0.0), tl.load(average_ptr, valid, 0.0), tl.load(square_ptr, valid, 0.0),
            tl.load(parameter_ptr, valid, 0.0), rate, root, decay, new1, beta2, new2, eps,
        )  # fmt: skip
        tl.store(average_ptr, average, valid)
        tl.store(square_ptr, square, valid)
        tl.store(parameter_ptr, parameter, valid)


@triton.jit
def _updated(gradient, average, square, parameter, rate, root, decay, new1, beta2, new2, eps):
    average += new1 * (gradient - average)
    square = beta2 * square + new2 * gradient * gradient
    parameter = parameter * decay - rate * average / (tl.sqrt(square) / root + eps)
    return average, square, parameter
