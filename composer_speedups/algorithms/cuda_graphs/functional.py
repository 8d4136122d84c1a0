"""CUDA graphs of the forward and backward pass."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from composer_speedups.algorithms.cuda_graphs.graphed_calls import GraphedCalls
from composer_speedups.core.trainer_state import world_size
from composer_speedups.families.blocks import repeated_blocks
from composer_speedups.families.packed_encoder import unpadded_encoders

__all__ = ["apply_cuda_graphs"]

_SEGMENT = 50 * 2**20  # bytes of gradients


def apply_cuda_graphs(model: nn.Module, max_graphs: int = 4, segments: int | None = None) -> GraphedCalls:
    """Make a model's training calls replay CUDA graphs, captured at the first call of each input shape.

    Args:
        model: On a CUDA GPU and in its final form: compiled and unpadded already, if at all, and with all its
            parameters, but not wrapped in DDP yet. Calls of an unpadded model that were not planned run as before.
            Its ``forward`` (or its compiled call) is replaced in place. Arguments are tensors that need no
            gradient, in dicts, lists or by themselves, and plain values.
        max_graphs: Shapes captured; calls of further ones run as before. Each holds its activations' memory. In an
            unpadded model the number of packed tokens is part of the shape.
        segments: Graphs of each backward pass, cut between the model's repeated blocks, so that DDP sends the
            gradients of the last blocks while the first ones are computed; a model that cannot be cut has one. By
            default one in a process that trains alone, and otherwise as many as have 50 MiB of gradients each.

    Returns:
        What now stands for the forward pass; its ``graphs``, ``replays`` and ``eager_calls`` count, and
        ``backward_segments`` says how many segments there are.
        :class:`CaptureError` comes from the first call of a shape that cannot be captured: one that waits for
        the GPU, say.

    Raises:
        ValueError: ``max_graphs`` or ``segments`` below 1, or a model that is not on a CUDA GPU or that DDP wraps
            already.

    Source: torch.cuda.make_graphed_callables, whose steps this follows.
    """
    if max_graphs < 1:
        raise ValueError(f"max_graphs must be at least 1, not {max_graphs}")
    if segments is not None and segments < 1:
        raise ValueError(f"segments must be at least 1, not {segments}")
    if isinstance(model, DistributedDataParallel):
        raise ValueError("no communication can be captured: apply this to the model before DDP wraps it")
    device = next((p.device.type for p in model.parameters()), "cpu")
    if device != "cuda":
        raise ValueError(f"CUDA graphs need a model on a CUDA GPU, and this one is on the {device}")
    attribute = "forward" if model._compiled_call_impl is None else "_compiled_call_impl"
    current = getattr(model, attribute)
    if not isinstance(current, GraphedCalls):
        current = GraphedCalls(model, current, max_graphs)
        current.install(attribute)
    current.max_graphs = max_graphs
    current.cut_behind = blocks_to_cut(model, segments) if segments is not None or world_size() > 1 else ()
    current.carries = [(encoder, "plans") for encoder in unpadded_encoders(model)]
    return current


def cut_points(sizes: Sequence[int], least: int = _SEGMENT) -> list[int]:
    """Behind which blocks to cut, so that all segments have at least ``least`` and as few blocks as that takes.

    Args:
        sizes: Bytes of each block's gradients, from the first block to the last.
        least: Bytes of a segment; by default 50 MiB.

    Returns:
        Ascending positions in ``sizes``. What is left over belongs to the first segment.
    """
    points: list[int] = []
    size, left = 0, sum(sizes)
    for i in range(len(sizes) - 1, 0, -1):
        size, left = size + sizes[i], left - sizes[i]
        if size >= least and left >= least:
            points.append(i - 1)
            size = 0
    return points[::-1]


def blocks_to_cut(model: nn.Module, segments: int | None = None) -> list[nn.Module]:
    """The blocks behind which a backward pass is cut into segments.

    Args:
        model: In its final form. One without repeated blocks has none to cut, nor has one that is compiled around
            its blocks.
        segments: How many to cut it into, with as many blocks each; no more than there are blocks. By default by
            the size of their gradients (:func:`cut_points`).

    Returns:
        Blocks in the order of the forward pass; none for one segment.
    """
    try:
        blocks = repeated_blocks(model)
    except ValueError:
        return []
    around = {name: module for name, module in model.named_modules() if module._compiled_call_impl is not None}
    if any(name.startswith(f"{outer}." if outer else "") for name in blocks for outer in around):
        return []
    count = len(blocks)
    if segments is None:
        trained = [[p for p in block.parameters() if p.requires_grad] for block in blocks.values()]
        points = cut_points([sum(p.numel() * p.element_size() for p in each) for each in trained])
    else:
        segments = min(segments, count)
        points = [i * count // segments - 1 for i in range(1, segments)]
    return [list(blocks.values())[i] for i in points]
