"""The layout of a padded batch's real tokens, and gathering and scattering them.

Shapes: B rows, S slots per row, N = B·S slots, T packed tokens, H hidden units.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from composer_speedups.kernels.first_derivative import FirstDerivative

__all__ = [
    "COUNTED_ON_HOST_MESSAGE",
    "IGNORED",
    "MULTIPLE",
    "READS_PADDING_MESSAGE",
    "STAYS_PADDED",
    "TokenLayout",
    "as_numpy",
    "gather_tokens",
    "lay_out_tokens",
    "mark_dynamic",
    "reads_padding",
    "round_up",
    "row_counts",
    "rows_with_holes",
    "run_eagerly",
    "scatter_tokens",
    "token_masks",
]


MULTIPLE = 64  # packed tokens are rounded up to a multiple of it by default, because matmuls are fastest then
IGNORED = -100  # the label that torch's cross entropy ignores
STAYS_PADDED = -1  # in place of a row's number of real tokens
COUNTED_ON_HOST_MESSAGE = (
    "unpadding reads the number of tokens on the host; call plan_unpadding before each call, compile without "
    "fullgraph=True, or call undo_unpadding(model)"
)
READS_PADDING_MESSAGE = (
    "unpadding: the loss reads outputs at padding positions, which are zeros; give padding the label -100, pool with "
    "the attention mask, or remove unpadding (for a bare model: undo_unpadding)"
)


def run_eagerly(reason: str) -> Callable[[Any], Any]:
    """torch.compiler.disable as a decorator that states a reason, which the error about a full graph contains.

    torch 2.7.0 does not take one.
    """
    if "reason" in inspect.signature(torch.compiler.disable).parameters:
        return functools.partial(torch.compiler.disable, reason=reason)
    return torch.compiler.disable  # type: ignore[no-any-return]


class TokenLayout(NamedTuple):
    """Where one batch's real tokens are: in row order, followed by unused entries up to a rounded total.

    The unused entries form a separate sequence: no real token attends to them, they are gathered from the last slot of
    the batch, are not scattered back, and get no gradient.

    Attributes:
        mask_BS: bool; the mask the layout was made from.
        indices_T: int64; the slot of each packed token among the N, and N for unused entries.
        cu_seqlens: int32 (B + 2,); where each row starts among the packed tokens, then the start of the unused entries,
            then T.
        longest: A bound on the length of a row and of the unused entries.
    """

    mask_BS: Tensor
    indices_T: Tensor
    cu_seqlens: Tensor
    longest: int


def token_masks(batch: Any) -> dict[str, Tensor]:
    """The attention masks of a batch, by name: ``attention_mask``, and further ones of a bi-encoder.

    They are (B, S), or (B, texts, S) if samples have several texts.
    """
    if not isinstance(batch, Mapping):
        return {}
    named = {name: x for name, x in batch.items() if isinstance(name, str) and isinstance(x, Tensor) and x.numel()}
    return {
        name: mask
        for name, mask in named.items()
        if "attention_mask" in name
        if mask.ndim == 2 or (mask.ndim == 3 and mask.shape == _shape(named, name))
    }


def _shape(tensors: Mapping[str, Tensor], mask: str) -> torch.Size | None:
    ids = tensors.get(mask.replace("attention_mask", "input_ids"))
    return None if ids is None else ids.shape


def row_counts(mask_BS: Tensor) -> list[int]:
    """Real tokens of each row, on the host. Synchronizes if the mask is on a GPU."""
    return [int(count) for count in _on_host(mask_BS).sum(-1)]


def _on_host(mask: Tensor) -> Any:
    """Whether a mask's entries are nonzero, as a NumPy array. Synchronizes if the mask is on a GPU."""
    return as_numpy(mask) != 0


def as_numpy(values: Tensor) -> Any:
    """A tensor's values on the host. Synchronizes if it is on a GPU.

    For work on a few thousand numbers, for which torch would wake all its threads: milliseconds on hosts with many
    cores.
    """
    values = values.detach().cpu()
    return (values.float() if values.dtype is torch.bfloat16 else values).numpy()  # NumPy has no bfloat16


def rows_with_holes(mask_BS: Tensor) -> list[bool]:
    """Whether each row has padding between its real tokens. Synchronizes if the mask is on a GPU."""
    real = _on_host(mask_BS)
    pieces = real[:, 0].astype(int) + (real[:, 1:] & ~real[:, :-1]).sum(-1)  # by the number of runs of real tokens
    return [bool(row) for row in pieces > 1]


def reads_padding(
    mask_BS: Tensor, labels: Tensor | None, *, head_has_token_loss: bool, head_reads_first_slot: bool
) -> list[bool]:
    """Rows whose loss in the untouched model depends on outputs at padding positions. Such a batch stays padded.

    Args:
        mask_BS: The batch's attention mask. Synchronizes if it is on a GPU.
        labels: The batch's labels; -100 is ignored. None if there are none.
        head_has_token_loss: The head computes a loss per slot, without using the mask.
        head_reads_first_slot: The head reads each row's first slot. A row without tokens does not count if its label is
            ignored.
    """
    mask = _on_host(mask_BS)
    known = None if labels is None or len(labels) != len(mask_BS) else as_numpy(labels)
    reads = ~mask[:, 0] & head_reads_first_slot
    if known is not None and known.ndim == 1 and known.dtype.kind != "f":  # a regression has no label to ignore
        reads &= mask.any(-1) | (known != IGNORED)
    if known is not None and known.shape == mask.shape and head_has_token_loss:
        reads |= ((known != IGNORED) & ~mask).any(-1)
    return [bool(row) for row in reads]


def round_up(number: int, multiple: int) -> int:
    """The smallest positive multiple that is at least ``number``."""
    return max(-(-number // multiple), 1) * multiple


def lay_out_tokens(mask_BS: Tensor, total: int, pad_to_multiple_of: int = MULTIPLE) -> TokenLayout:
    """Lay out the real tokens of a batch on the mask's device, without synchronizing.

    Args:
        mask_BS: Nonzero at real tokens, at any positions.
        total: Number of real tokens, which determines the shapes. A wrong number raises; on a GPU, at its next
            synchronization.
        pad_to_multiple_of: T is rounded up to a multiple of it, but to no more than the slots, rounded up to a multiple
            of :data:`MULTIPLE`.
    """
    mask_BS = mask_BS.bool()
    slots = mask_BS.numel()
    packed = min(round_up(total, pad_to_multiple_of), round_up(slots, MULTIPLE))
    real_N = mask_BS.flatten()
    ends_B = mask_BS.sum(-1).cumsum(0)
    torch._assert_async(ends_B[-1] == total, "the attention mask changed after its tokens were counted")
    # Real slots go to their rank among the real ones; all others write past the end. Ranks are clamped, so that a wrong
    # total fails the check above instead of indexing out of range.
    rank_N = torch.where(real_N, real_N.cumsum(0) - 1, packed).clamp(max=packed)
    indices_T = torch.full((packed + 1,), slots, device=mask_BS.device).scatter_(
        0, rank_N, torch.arange(slots, device=mask_BS.device)
    )[:packed]
    cu_seqlens = F.pad(F.pad(ends_B, (1, 0)), (0, 1), value=packed).to(torch.int32)
    torch._dynamo.maybe_mark_dynamic(indices_T, 0)  # T changes with every batch; one graph is used for all
    longest = round_up(max(mask_BS.shape[1], pad_to_multiple_of), 128)  # rounded, so that it seldom changes
    return TokenLayout(mask_BS, indices_T, cu_seqlens, longest)


def gather_tokens(x_NH: Tensor, indices_T: Tensor) -> Tensor:
    """Gather (N, H) slots into (T, H) packed tokens."""
    return _Gather.apply(x_NH, indices_T)


def scatter_tokens(x_TH: Tensor, indices_T: Tensor, slots: int, *, guarded: bool = False) -> Tensor:
    """Scatter (T, H) packed tokens into (N, H) slots, N being ``slots``; zeros where there is no real token.

    With ``guarded``, a gradient at another slot is an error in the backward pass; on a GPU, at its next
    synchronization.
    """
    return _Scatter.apply(x_TH, indices_T, slots, guarded)


def mark_dynamic(*packed: Tensor) -> None:
    """Let layers that are compiled separately accept every number of packed tokens, in tensors (1, T, …)."""
    if not torch.compiler.is_compiling():
        for tensor in packed:
            torch._dynamo.maybe_mark_dynamic(tensor, 1)


_NO_SECOND_DERIVATIVE = (
    "unpadding has no second derivative (create_graph=True); call undo_unpadding(model), or remove unpadding, and load "
    "the model with attn_implementation='eager'"
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
    def forward(ctx: Any, x_TH: Tensor, indices_T: Tensor, slots: int, guarded: bool) -> Tensor:
        ctx.save_for_backward(indices_T)
        ctx.guarded = guarded
        return _scatter(x_TH, indices_T, slots)

    @staticmethod
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (indices_T,) = ctx.saved_tensors
        slots = grad_NH.shape[0]
        if ctx.guarded:
            largest_N = F.pad(torch.linalg.vector_norm(grad_NH.detach(), float("inf"), dim=-1), (0, 1))
            read_N = (largest_N > 0) & largest_N.isfinite()  # infinity times a zero mask is NaN, as when fp16 overflows
            torch._assert_async(~read_N.index_fill_(0, indices_T, False).any(), READS_PADDING_MESSAGE)
        unused_T = (indices_T == slots)[:, None]
        return _gather(grad_NH, indices_T).masked_fill_(unused_T, 0), None, None, None
