"""The encoder runs on real tokens only."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from composer_speedups.algorithms.unpadding.encoder_swap import restore_encoders, swap_encoders
from composer_speedups.core.comparison import compare, outcome_of, tolerance_of
from composer_speedups.families.packed_encoder import unpadded_encoders
from composer_speedups.families.stock import changes_to

__all__ = ["apply_unpadding", "plan_unpadding", "undo_unpadding"]
LARGEST_MULTIPLE = 65536


def apply_unpadding(
    model: nn.Module, pad_to_multiple_of: int = 64, *, compare_on: Mapping[str, Any] | None = None
) -> list[str]:
    """Make the encoder of a Hugging Face model run on real tokens only.

    Args:
        model: A model of transformers of a known family (BERT, RoBERTa and others), or a module that holds some;
            changed in place. Its parameters, their names and its ``state_dict`` stay.
        pad_to_multiple_of: The number of packed tokens is rounded up to a multiple of it. Default 64:
            matrix products over a number that is no multiple of 8 are slow.
        compare_on: Keyword arguments of the model, with labels if it takes some: a batch on which loss, outputs and
            gradients must be the untouched model's.

    Returns:
        Names of the encoders changed; those that already were are left out.

    Raises:
        ValueError: A model, head or number that it cannot serve, or a model that computes something else on
            ``compare_on``; the model is then as it was.

    Warns:
        UserWarning: The model is not transformers' own in every module and was not compared: slots of padding hold
            zeros in the last hidden state, and another head may read them.

    Each forward pass then counts its tokens, and waits for the GPU to do so; :func:`plan_unpadding` takes the
    count from a mask that is still on the CPU. Source: padding-free batches of Zeng et al., arXiv 2208.08124.
    """
    if not 1 <= pad_to_multiple_of <= LARGEST_MULTIPLE:
        raise ValueError(f"pad_to_multiple_of must be 1 to {LARGEST_MULTIPLE}, not {pad_to_multiple_of}")
    changes = changes_to(model)
    before = None if compare_on is None else outcome_of(model, compare_on)
    names = swap_encoders(model, pad_to_multiple_of)
    if before is not None and names:
        apart = compare(before, outcome_of(model, compare_on or {}), tolerance_of(model))
        if apart.beyond is not None:
            restore_encoders(model)
            raise ValueError(f"unpadding cannot serve this model: {apart.beyond} on the given batch")
    elif changes and names:
        warnings.warn(
            f"unpadding was not compared with the untouched model, though {changes[0]}: slots of padding hold zeros in "
            "its last hidden state, and your own code may read them; give compare_on=a batch",
            UserWarning,
            stacklevel=2,
        )
    return names


def plan_unpadding(model: nn.Module, attention_mask: Tensor | None, counts: Sequence[int] | None = None) -> None:
    """Lay out the model's next batch, so that its forward pass need not wait for a GPU to count the tokens.

    Call it before every forward pass, or never: a mask of the same shape with other values is an error.

    Args:
        model: A model that :func:`apply_unpadding` changed, with one such encoder.
        attention_mask: (B, S), or (B, texts, S) where the model gets the texts as rows; best still on the CPU. None
            takes the plan away again.
        counts: What the encoder's ``count`` gave for it, where that is known already.

    Raises:
        ValueError: The model has no unpadded encoder, or several, whose masks may differ.
    """
    encoders = unpadded_encoders(model)
    if len(encoders) != 1:
        raise ValueError(f"the model has {len(encoders)} unpadded encoders, not one; apply_unpadding it first")
    encoder = encoders[0]
    if attention_mask is None:
        encoder.plans = ()
        return
    attention_mask = attention_mask.flatten(0, -2)
    if counts is None:
        counts = encoder.count(attention_mask)
    device = next(encoder.parameters()).device
    layout = encoder.layout(attention_mask.bool().to(device, non_blocking=True), counts)
    encoder.plans = ((None, layout),)


def undo_unpadding(model: nn.Module) -> list[str]:
    """Give a model its own encoders and its attention back; returns the names of the encoders changed."""
    return restore_encoders(model)
