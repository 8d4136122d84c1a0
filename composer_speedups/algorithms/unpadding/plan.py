"""Plan the packing of a batch for a model outside of a Trainer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from composer_speedups.packing.encoder import unpadded_encoders
from composer_speedups.packing.labelled_head import count_labels, labelled_heads
from composer_speedups.packing.planning import PlannedBatch

__all__ = ["plan_unpadding"]


def plan_unpadding(
    model: nn.Module,
    attention_mask: Tensor | None,
    counts: Sequence[int] | None = None,
    labels: Tensor | None = None,
) -> None:
    """Plan the packing of the model's next batch, so that its forward pass does not synchronize to count tokens.

    Call it before every forward pass, or before none. A call with another mask of the planned shape is an error. A call
    with a mask of another shape counts its tokens itself.

    Args:
        model: A model with one encoder that unpadding changed.
        attention_mask: (B, S), or (B, texts, S) if the model gets the texts as rows; preferably on the CPU. None
            removes the plan.
        counts: The result of the encoder's ``packing.count`` for the mask, if already known.
        labels: The batch's labels, preferably on the CPU; ``mlm_head="labelled"`` needs them. Without them, a batch
            with a row of padding only stays padded if the head reads first slots.

    Raises:
        ValueError: The model has no unpadded encoder, or several, whose masks may differ.
    """
    encoders = unpadded_encoders(model)
    if len(encoders) != 1:
        raise ValueError(f"the model has {len(encoders)} unpadded encoders, not one; apply unpadding first")
    packing, device = encoders[0].packing, next(encoders[0].parameters()).device
    for head in labelled_heads(model):
        head.forget_plan()
        if labels is not None:
            head.plan(labels.to(device, non_blocking=True), count_labels(labels))
    if attention_mask is None:
        packing.plan()
        return
    attention_mask = attention_mask.flatten(0, -2)
    if counts is None:
        counts = packing.count(attention_mask, labels)
    mask_BS = attention_mask.bool().to(device, non_blocking=True)
    packing.plan([PlannedBatch(mask_BS, None, packing.layout(mask_BS, counts), by_values=True)])
