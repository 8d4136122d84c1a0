"""Make a model's training calls replay CUDA graphs, and choose where their backward pass is cut."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from composer_speedups.algorithms.cuda_graphs.graphed_calls import GraphedCalls
from composer_speedups.core.trainer_state import world_size
from composer_speedups.families.blocks import repeated_blocks
from composer_speedups.packing.encoder import unpadded_encoders

_MIN_SEGMENT = 50 * 2**20  # minimum bytes of gradients per segment


def install(model: nn.Module, max_graphs: int = 4, segments: int | None = None) -> GraphedCalls:
    """Make a model's training calls replay CUDA graphs, which are captured at the first call of each input shape.

    The first call of a shape raises :class:`CaptureError` if it cannot be captured, for example because it synchronizes
    with the GPU.

    Args:
        model: A model on a CUDA GPU. It must already be compiled or unpadded, if at all, and have all its parameters,
            but not be wrapped in DDP. Its ``forward`` (or its compiled call) is replaced in place. Arguments must be
            plain values and tensors without gradients, which may be in dicts or lists. Calls of an unpadded model
            whose batch has no row lengths run eagerly.
        max_graphs: Maximum number of captured shapes, each of which keeps the memory of its activations. Calls with
            further shapes run eagerly. In an unpadded model, the number of packed tokens is part of the shape.
        segments: Number of graphs of each backward pass, which is cut between the model's repeated blocks. So DDP sends
            the gradients of the last blocks while those of the first blocks are computed. A model that cannot be cut
            has one segment. The default is one on a single rank, else as many as have at least 50 MiB of gradients.

    Returns:
        The replacement of the forward pass; ``release()`` undoes it.

    Raises:
        ValueError: The model is already wrapped in DDP, or ``segments`` is below 1.
    """
    if segments is not None and segments < 1:
        raise ValueError(f"segments must be at least 1, not {segments}")
    if isinstance(model, DistributedDataParallel):
        raise ValueError("communication cannot be captured; apply cuda_graphs before DDP wraps the model")
    attribute = "forward" if model._compiled_call_impl is None else "_compiled_call_impl"
    calls = GraphedCalls(model, getattr(model, attribute), max_graphs)
    calls.install(attribute)
    calls.cut_behind = blocks_to_cut(model, segments) if segments is not None or world_size() > 1 else ()
    calls.reads_known_batch = bool(unpadded_encoders(model))
    return calls


def cut_points(sizes: Sequence[int], least: int = _MIN_SEGMENT) -> list[int]:
    """Return after which blocks to cut, so that every segment has at least ``least`` bytes and few blocks.

    Args:
        sizes: Bytes of each block's gradients, from the first block to the last.
        least: Minimum bytes per segment. Default 50 MiB.

    Returns:
        Ascending indices of ``sizes``. The first segment gets the remaining blocks.
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
    """Return the blocks after which a backward pass is cut into segments.

    Args:
        model: The model in its final form. It is not cut if it has no repeated blocks, or if a module around the blocks
            is compiled.
        segments: Number of segments with equal numbers of blocks, at most the number of blocks. By default, it depends
            on the size of the gradients (:func:`cut_points`).

    Returns:
        Blocks in the order of the forward pass; empty for one segment.
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
        points = cut_points([sum(p.nbytes for p in b.parameters() if p.requires_grad) for b in blocks.values()])
    else:
        segments = min(segments, count)
        points = [i * count // segments - 1 for i in range(1, segments)]
    return [list(blocks.values())[i] for i in points]
