"""Count the floating-point operations of a training step on real tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import repeat
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from composer_speedups.families.blocks import repeated_blocks
from composer_speedups.families.family import config_value, family_named
from composer_speedups.packing.encoder import head_tokens, labelled_heads
from composer_speedups.packing.rows import SAMPLES, as_numpy, lengths_key

Lengths = npt.NDArray[np.int64]  # real tokens of each row; NumPy, because torch would wake all its threads for so few


def batch_lengths(batch: Any) -> Lengths | None:
    """Real tokens of each row, with the shape of the token ids without their last dimension; None without ids.

    Without a mask that has a number for each position, every position counts as real. Filler counts as padding.
    """
    if not hasattr(batch, "get") or not isinstance(batch.get("input_ids"), torch.Tensor):
        return None
    lengths = _lengths_with_filler(batch)
    return lengths * batch[SAMPLES].numpy() if SAMPLES in batch else lengths


def _lengths_with_filler(batch: Any) -> Lengths:
    counted = batch.get(lengths_key("attention_mask"))
    if counted is not None and (known := counted.numpy()).min(initial=0) >= 0:  # unpadding has counted the rows
        return known.astype(np.int64)  # type: ignore[no-any-return]
    mask = batch.get("attention_mask")
    if getattr(mask, "shape", None) != batch["input_ids"].shape:
        *rows, width = batch["input_ids"].shape
        return np.full(rows, width)
    if mask.device.type == "cpu":
        return mask.numpy().sum(-1, dtype=np.int64)  # type: ignore[no-any-return]
    return as_numpy(mask.sum(-1))  # type: ignore[no-any-return]


def flops_counter(model: Any) -> Callable[[Any, Lengths | None], int]:
    """A function of a batch and its :func:`batch_lengths` that counts the FLOPs of training on it; 0 if unknown.

    It calls the ComposerModel's ``flops_of_rows``, or else ``flops_per_batch``, or else :func:`training_flops`. FLOPs
    are sums over rows and the head's tokens. Those of each length are computed once, with the parameters that are
    frozen then, because reading a transformers config takes as long as launching a kernel.
    """
    inner = getattr(model, "model", None)
    config, of_rows = getattr(inner, "config", None), getattr(model, "flops_of_rows", None)
    if of_rows is None and callable(getattr(model, "flops_per_batch", None)):
        return lambda batch, lengths: int(model.flops_per_batch(batch))
    if inner is None or not hasattr(config, "num_hidden_layers"):
        return lambda batch, lengths: 0
    head: Literal["classification", "mlm"] = "mlm" if type(inner).__name__.endswith("ForMaskedLM") else "classification"
    labelled = bool(labelled_heads(inner))

    @cache
    def of_one(length: int | None, head_tokens: int | None) -> int:
        lengths = np.array([] if length is None else [length], dtype=np.int64)
        if of_rows is None:
            return training_flops(config, lengths, head, head_tokens)
        return int(of_rows(lengths, head_tokens))

    def of_batch(batch: Any, lengths: Lengths | None) -> int:
        tokens = head_tokens(inner, batch) if labelled else None
        rows, apart = ([], None) if lengths is None else (lengths.ravel().tolist(), None if tokens is None else 0)
        return sum(map(of_one, rows, repeat(apart))) + (tokens * of_one(None, 1) if tokens else 0)

    return of_batch


def training_flops(
    config: Any, lengths: Lengths, head: Literal["classification", "mlm"], head_tokens: int | None = None
) -> int:
    """Matmul FLOPs of one forward and backward pass of a BERT-like encoder, without padding.

    A multiply-add counts as two operations, and the backward pass as twice the forward pass. Embedding look-ups,
    normalization, activations and the optimizer are not counted, as usual for model FLOPs utilization. Layers of
    experts (a config with ``sparse_upcycling``) count the router and the experts to which a token is routed.

    Args:
        config: A transformers config.
        lengths: Real tokens of each row, (rows,).
        head: The pooler and classifier run once per row, the masked-LM head on every token, or on ``head_tokens``.

    Source: the convention of PaLM (arXiv 2204.02311, appendix B), with each row's own length.
    """
    hidden = config.hidden_size
    tokens, rows = int(lengths.sum()), lengths.size
    blocks = _forward_flops(config, lengths)
    extra = 0
    if (sparse := getattr(config, "sparse_upcycling", None)) is not None:
        inner = config_value(config, "inner")
        one_layer = (sparse["top_k"] - 1) * 2 * hidden * inner + hidden * sparse["experts"]
        extra = config.num_hidden_layers // sparse["every"] * 2 * tokens * one_layer
    if head == "mlm":
        top = 2 * (tokens if head_tokens is None else head_tokens) * hidden * (hidden + config.vocab_size)
    else:
        top = 2 * rows * hidden * (hidden + getattr(config, "num_labels", 2))
    return 3 * (blocks + extra + top)


def _forward_flops(config: Any, lengths: Lengths) -> int:
    """The FLOPs of one forward pass through all blocks."""
    family = family_named(str(getattr(config, "model_type", "")))
    return ((family and family.block_flops) or block_flops)(config, lengths)


def block_flops(
    config: Any,
    lengths: Lengths,
    *,
    pairs: int | None = None,
    feed_forward_matrices: int = 2,
    attention_width: int | None = None,
) -> int:
    """Matmul FLOPs of one forward pass through all blocks.

    ``pairs`` is the number of (query, key) pairs over all layers and rows; by default, every query attends to its whole
    row. Each pair counts as two products of the attention's width (of all heads; by default the hidden size).
    """
    hidden, inner = config.hidden_size, config_value(config, "inner")
    width = attention_width or hidden
    layers = config.num_hidden_layers * getattr(config, "inner_group_num", 1)  # ALBERT runs all layers of a group
    if pairs is None:
        pairs = layers * int((lengths**2).sum())
    weights = 4 * hidden * width + feed_forward_matrices * hidden * inner
    return layers * 2 * int(lengths.sum()) * weights + 4 * width * pairs


class BlockRun(NamedTuple):
    """One run of a block: the weights of its Linear layers, which process every token, and all its parameters."""

    weights: list[torch.Tensor]
    parameters: list[nn.Parameter]


def frozen_flops(model: Any, runs: Sequence[BlockRun], lengths: Lengths, *, cached: bool = False) -> int:
    """The FLOPs that :func:`training_flops` counts for gradients that frozen parameters make superfluous.

    Blocks in front of the first trained parameter have no backward pass, which is two of three passes, and no forward
    pass either if their outputs are ``cached``. Behind it, the gradient of a frozen weight is one of three products per
    weight. The head and the products of LoRA's matrices, a few per cent of the total, are ignored. ``runs`` are from
    :func:`block_runs`.
    """
    untrained = 0
    if not any(p.requires_grad for p in model.get_input_embeddings().parameters()):
        counts = (i for i, run in enumerate(runs) if any(p.requires_grad for p in run.parameters))
        untrained = next(counts, len(runs))
    passes = (2 + cached) * _forward_flops(model.config, lengths) * untrained // len(runs) if untrained else 0
    frozen_weights = sum(w.numel() for run in runs[untrained:] for w in run.weights if not w.requires_grad)
    return passes + 2 * int(lengths.sum()) * frozen_weights


def block_runs(model: nn.Module) -> list[BlockRun]:
    """The runs of a model's blocks, in order: ALBERT runs a few blocks several times. Visits the whole model."""
    try:
        blocks = list(repeated_blocks(model).values())
    except ValueError:  # layers that are not in a list
        return []
    layers = getattr(getattr(model, "config", None), "num_hidden_layers", None) or len(blocks)
    chosen = [blocks[int(i / (layers / len(blocks)))] for i in range(layers)]  # as in AlbertTransformer
    linear = [[m.weight for m in block.modules() if isinstance(m, nn.Linear)] for block in chosen]
    return [BlockRun(weights, [*block.parameters()]) for weights, block in zip(linear, chosen, strict=True)]
