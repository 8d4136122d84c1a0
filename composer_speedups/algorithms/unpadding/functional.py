"""Functions that make an encoder run on real tokens only, for models outside of a Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from composer_speedups.algorithms.unpadding.encoder_swap import restore_encoders, swap_encoders
from composer_speedups.core.comparison import compare, outcome_of, tolerance_of
from composer_speedups.families.labelled_head import MLMHead, count_labels, labelled_heads, plan_labels
from composer_speedups.families.packed_encoder import unpadded_encoders
from composer_speedups.families.stock import changes_to

__all__ = ["apply_unpadding", "plan_unpadding", "undo_unpadding"]
LARGEST_MULTIPLE = 65536


def apply_unpadding(
    model: nn.Module,
    pad_to_multiple_of: int = 64,
    mlm_head: MLMHead = "all",
    *,
    compare_on: Mapping[str, Any] | None = None,
) -> list[str]:
    """Make the encoder of a Hugging Face model run on real tokens only.

    Args:
        model: A transformers model of a supported family (BERT, RoBERTa and others), or a module that contains some;
            changed in place. Its parameters, their names and its ``state_dict`` do not change.
        pad_to_multiple_of: The number of packed tokens is rounded up to a multiple of it. Default 64, because matmuls
            with a number of tokens that is not a multiple of 8 are slow.
        mlm_head: Tokens for which a masked-LM head computes logits in training calls with labels. ``"all"`` is every
            token, padding included, as in the untouched model; ``"labelled"`` is those with a label, so that the logits
            are (1, M, vocabulary) for M labelled tokens, rounded up to ``pad_to_multiple_of``. The loss is the same.
        compare_on: A batch as keyword arguments of the model, with labels if it has them. Loss, outputs and gradients
            on it must equal the untouched model's.

    Returns:
        Names of the encoders that were changed, without those that already run unpadded.

    Raises:
        ValueError: An unsupported model, head or number, or a model whose results on ``compare_on`` differ. The model
            is not changed.

    Warns:
        UserWarning: Not every module of the model is transformers' own, and it was not compared. Padding slots of the
            last hidden state are zeros, which another head may read.

    Each forward pass then counts its tokens, which synchronizes with the GPU. :func:`plan_unpadding` avoids that by
    counting in a mask on the CPU. Source: padding-free batches of Zeng et al., arXiv 2208.08124.
    """
    if mlm_head not in ("all", "labelled"):
        raise ValueError(f"mlm_head must be 'all' or 'labelled', not {mlm_head!r}")
    if not 1 <= pad_to_multiple_of <= LARGEST_MULTIPLE:
        raise ValueError(f"pad_to_multiple_of must be 1 to {LARGEST_MULTIPLE}, not {pad_to_multiple_of}")
    changes = changes_to(model)
    before = None if compare_on is None else outcome_of(model, compare_on)
    names = swap_encoders(model, pad_to_multiple_of, mlm_head)
    if before is not None and names:
        apart = compare(before, outcome_of(model, compare_on or {}), tolerance_of(model))
        if apart.beyond is not None:
            restore_encoders(model)
            raise ValueError(f"unpadding does not support this model: {apart.beyond} on the given batch")
    elif changes and names:
        warnings.warn(
            f"unpadding was not compared with the untouched model, though {changes[0]}: padding slots of its last "
            "hidden state are zeros, and your own code may read them; pass a batch as compare_on",
            UserWarning,
            stacklevel=2,
        )
    return names


def plan_unpadding(
    model: nn.Module,
    attention_mask: Tensor | None,
    counts: Sequence[int] | None = None,
    labels: Tensor | None = None,
) -> None:
    """Plan the packing of the model's next batch, so that its forward pass does not synchronize to count tokens.

    Call it before every forward pass, or never: a mask of the same shape with other values is an error.

    Args:
        model: A model with one encoder that :func:`apply_unpadding` changed.
        attention_mask: (B, S), or (B, texts, S) if the model gets the texts as rows; preferably on the CPU. None
            removes the plan.
        counts: The result of the encoder's ``count`` for the mask, if already known.
        labels: For ``mlm_head="labelled"``: the batch's labels (B, S), preferably on the CPU.

    Raises:
        ValueError: The model has no unpadded encoder, or several, whose masks may differ.
    """
    encoders = unpadded_encoders(model)
    if len(encoders) != 1:
        raise ValueError(f"the model has {len(encoders)} unpadded encoders, not one; call apply_unpadding first")
    encoder, device = encoders[0], next(encoders[0].parameters()).device
    for head in labelled_heads(model):
        head.plan = None
        if labels is not None:
            total = sum(count_labels(labels))
            head.plan = plan_labels(labels.to(device, non_blocking=True), total, encoder.pad_to_multiple_of)
    if attention_mask is None:
        encoder.plans = ()
        return
    attention_mask = attention_mask.flatten(0, -2)
    if counts is None:
        counts = encoder.count(attention_mask)
    layout = encoder.layout(attention_mask.bool().to(device, non_blocking=True), counts)
    encoder.plans = ((None, layout),)


def undo_unpadding(model: nn.Module) -> list[str]:
    """Restore a model's encoders and attention, and return the names of the changed encoders."""
    return restore_encoders(model)
