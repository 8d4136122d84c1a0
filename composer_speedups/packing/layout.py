"""The layout of a padded batch's real tokens: a value with which tokens are gathered and scattered.

Shapes: B rows, S slots per row, N = B·S slots, T packed tokens, H hidden units.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from composer_speedups.kernels.common import FirstDerivative
from composer_speedups.packing.rows import CHANGED

MULTIPLE = 64  # packed tokens are rounded up to a multiple of it by default, because matmuls are fastest then
SIZES = 5  # default for the number of packed sizes that cover nearly all batches; long jobs use more


def run_eagerly(reason: str) -> Callable[[Any], Any]:
    """torch.compiler.disable with a reason for the error about a full graph, which torch 2.7.0 does not take."""
    if "reason" in inspect.signature(torch.compiler.disable).parameters:
        return functools.partial(torch.compiler.disable, reason=reason)
    return torch.compiler.disable  # type: ignore[no-any-return]


counts_on_host = run_eagerly(
    "unpadding reads the number of tokens on the host; wrap the collator in with_row_lengths, compile without "
    "fullgraph=True, or remove unpadding"
)


class Layout(NamedTuple):
    """Where one batch's real tokens are: in row order, followed by unused entries up to a rounded total.

    The unused entries form sequences of their own, of at most S: no real token attends to them, they are gathered from
    the last slot of the batch, are not scattered back, and get no gradient.
    """

    mask_BS: Tensor  # bool; the mask the layout was made from
    indices_T: Tensor  # int64; the slot of each packed token among the N, and N for unused entries
    # int32 (B + 1 + sequences of unused entries,); where each row starts in T, then where each of those starts, then T
    cu_seqlens: Tensor
    longest: int  # a bound on the length of a sequence

    def gather(self, x_BSH: Tensor) -> Tensor:
        """The real tokens of padded rows, (B, S, H) → (T, H)."""
        return _Gather.apply(x_BSH.flatten(0, 1), self.indices_T)

    def scatter(self, x_TH: Tensor) -> Tensor:
        """Packed tokens in their slots, (T, H) → (B, S, H), with zeros where there is no real token."""
        rows, width = self.mask_BS.shape
        return _Scatter.apply(x_TH, self.indices_T, rows * width).view(rows, width, -1)

    def pick(self, values_BS: Tensor) -> Tensor:
        """Integers, such as ids, of the real tokens, (B, S) → (1, T); unused entries have that of the last slot."""
        flat = values_BS.reshape(-1)
        return flat.index_select(0, self.indices_T.clamp(max=len(flat) - 1)).unsqueeze(0)


def round_up(number: int, multiple: int) -> int:
    """The smallest positive multiple that is at least ``number``."""
    return max(-(-number // multiple), 1) * multiple


def multiple_for(shape: torch.Size, pad_to_multiple_of: int | None, sizes: int = SIZES) -> int:
    """The largest multiple to which the real tokens of a mask (…, S) are rounded up: ``pad_to_multiple_of``, or, for
    None, the multiple of 128 that is nearest to S·√B / (0.6 · ``sizes``), at least 128.

    The numbers of real tokens of batches of B random rows have a standard deviation of √B times that of a row, which is
    a quarter of S or less in most data. So whatever B and S are, nearly all batches have one of ``sizes`` numbers.
    """
    if pad_to_multiple_of is not None:
        return pad_to_multiple_of
    return max(int(shape[-1] * shape[:-1].numel() ** 0.5 / (76.8 * sizes) + 0.5), 1) * 128


def packed_tokens(real: int, shape: torch.Size, pad_to_multiple_of: int | None, sizes: int = SIZES) -> int:
    """T for a number of real tokens of a mask (…, S): rounded up (:func:`multiple_for`), but to no more than the mask's
    slots, rounded up to a multiple of :data:`MULTIPLE`."""
    multiple = multiple_for(shape, pad_to_multiple_of, sizes)
    if pad_to_multiple_of is None:  # short rows vary less: about as much as their mean
        multiple = min(multiple, max(1 << int(real / shape[:-1].numel() ** 0.5).bit_length(), 128))
    return min(round_up(real, multiple), round_up(shape.numel(), MULTIPLE))


def lay_out(mask_BS: Tensor, packed: int, pad_to_multiple_of: int | None = MULTIPLE) -> Layout:
    """Lay out the real tokens of a batch as T = ``packed`` tokens, on the mask's device, without synchronizing.

    Raises if the tokens do not fit into T, and possibly for any other T than :func:`packed_tokens` returns; on a GPU,
    at its next synchronization.
    """
    mask_BS = mask_BS.bool()
    slots, real_N, ends_B = mask_BS.numel(), mask_BS.flatten(), mask_BS.sum(-1).cumsum(0)
    width = mask_BS.shape[1]
    longest = round_up(width, 128)  # rounded, so that it seldom changes
    # The unused entries are cut, so that their attention, quadratic in the length of a sequence, costs little.
    piece = min(width, 128)
    cuts = -(-multiple_for(mask_BS.shape, pad_to_multiple_of) // piece)
    unused = packed - ends_B[-1]
    torch._assert_async((unused >= 0) & (unused <= cuts * piece), CHANGED)
    # Real slots go to their rank among the real ones; all others write past the end. Ranks are clamped, so that too
    # many fail the check above instead of indexing out of range.
    rank_N = torch.where(real_N, real_N.cumsum(0) - 1, packed).clamp(max=packed)
    indices_T = torch.full((packed + 1,), slots, device=mask_BS.device).scatter_(
        0, rank_N, torch.arange(slots, device=mask_BS.device)
    )[:packed]
    ends_of_unused = (ends_B[-1] + piece * torch.arange(1, cuts + 1, device=mask_BS.device)).clamp(max=packed)
    cu_seqlens = torch.cat([F.pad(ends_B, (1, 0)), ends_of_unused]).to(torch.int32)
    if not torch.compiler.is_compiling():
        torch._dynamo.maybe_mark_dynamic(indices_T, 0)  # T changes with every batch; one graph is used for all
    return Layout(mask_BS, indices_T, cu_seqlens, longest)


def mark_dynamic(*packed: Tensor) -> None:
    """Let layers that are compiled separately accept every number of packed tokens, in tensors (1, T, …)."""
    if not torch.compiler.is_compiling():
        for tensor in packed:
            torch._dynamo.maybe_mark_dynamic(tensor, 1)


_NO_SECOND_DERIVATIVE = (
    "unpadding has no second derivative (create_graph=True); remove unpadding, and load the model with "
    "attn_implementation='eager'"
)


# Each is the other's backward pass. torch's backward of index_select adds into its result, with atomics or a sort;
# unique indices only need a copy.


def _gather(x_NH: Tensor, indices_T: Tensor) -> Tensor:
    return x_NH.index_select(0, indices_T.clamp(max=x_NH.shape[0] - 1))


def _scatter(x_TH: Tensor, indices_T: Tensor, slots: int) -> Tensor:
    padded = x_TH.new_zeros(slots + 1, x_TH.shape[1])  # the last row receives the unused entries
    padded.index_copy_(0, indices_T, x_TH)
    # The last row is cut off in place, because pooling code may change the result in place, which autograd forbids for
    # a view that a custom function returns. Compiled code cannot resize.
    return padded[:slots] if torch.compiler.is_compiling() else padded.resize_(slots, x_TH.shape[1])


class _Gather(FirstDerivative):
    refusal = _NO_SECOND_DERIVATIVE

    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, indices_T: Tensor) -> Tensor:
        ctx.save_for_backward(indices_T)
        ctx.slots = x_NH.shape[0]
        return _gather(x_NH, indices_T)

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (indices_T,) = ctx.saved_tensors
        return _scatter(grad_TH, indices_T, ctx.slots), None


class _Scatter(FirstDerivative):
    refusal = _NO_SECOND_DERIVATIVE

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, indices_T: Tensor, slots: int) -> Tensor:
        ctx.save_for_backward(indices_T)
        return _scatter(x_TH, indices_T, slots)

    @staticmethod
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (indices_T,) = ctx.saved_tensors
        unused_T = (indices_T == grad_NH.shape[0])[:, None]
        return _gather(grad_NH, indices_T).masked_fill_(unused_T, 0), None, None
