"""Functions that make an encoder run on real tokens only, for models outside of a Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from torch import Tensor, nn

from composer_speedups.algorithms.unpadding.encoder_swap import restore_encoders, swap_encoders
from composer_speedups.algorithms.unpadding.first_calls import compare_first_calls, stop_comparing
from composer_speedups.core.comparison import Check
from composer_speedups.packing.call import models_around_encoders
from composer_speedups.packing.encoder import unpadded_encoders
from composer_speedups.packing.labelled_head import MLMHead, count_labels, labelled_heads
from composer_speedups.packing.planning import PlannedBatch
from composer_speedups.packing.tokens import MULTIPLE

__all__ = ["apply_unpadding", "plan_unpadding", "undo_unpadding"]
LARGEST_MULTIPLE = 65536


def apply_unpadding(
    model: nn.Module, pad_to_multiple_of: int = MULTIPLE, mlm_head: MLMHead = "all", check: Check = "auto"
) -> list[str]:
    """Make the encoder of a Hugging Face model run on real tokens only.

    Args:
        model: A transformers model of a supported family (BERT, RoBERTa and others), or a module that contains some;
            changed in place. Its parameters, their names and its ``state_dict`` do not change.
        pad_to_multiple_of: The number of packed tokens is rounded up to a multiple of it, but not beyond the padded
            batch, rounded up to 64. Default 64, because matmuls with a number of tokens that is not a multiple of 8 are
            slow.
        mlm_head: Tokens for which a masked-LM head computes logits in training calls with labels. ``"all"`` is every
            token, padding included, as in the untouched model; ``"labelled"`` is those with a label, so that the logits
            are (1, M, vocabulary) for M labelled tokens, rounded up to ``pad_to_multiple_of``. The loss is the same.
        check: ``"auto"``: a model that is not exactly transformers' own is compared with the untouched one in its first
            call, and again in its first call with gradients: loss, outputs and gradients must be equal. ``"always"``
            compares every model, ``"never"`` none.

    Returns:
        Names of the encoders that were changed, without those that already run unpadded. A second call replaces the
        settings of the first.

    Raises:
        ValueError: An unsupported model, head or number. The model is not changed. In the first calls, a model whose
            results differ; its encoders are restored.

    Padding slots of the last hidden state are zeros. Where the code that reads them is unknown (a model without a head,
    or token labels that the model does not get), batches stay padded until a backward pass has shown that no gradient
    arrives at padding; if one does, they stay padded for good, with a warning. A later gradient at padding is an error.
    Code that reads padding where no gradient flows, such as behind ``detach()``, is not seen, and reads zeros.
    ``check="never"`` skips this too. A frozen model without a head has no gradients: its batches stay padded except
    under ``torch.no_grad()``.

    Each forward pass counts its tokens, which synchronizes with the GPU. :func:`plan_unpadding` avoids that by counting
    a mask that is on the CPU. Source: padding-free batches of Zeng et al., arXiv 2208.08124.
    """
    if mlm_head not in ("all", "labelled"):
        raise ValueError(f"mlm_head must be 'all' or 'labelled', not {mlm_head!r}")
    if check not in get_args(Check):
        raise ValueError(f"check must be 'auto', 'always' or 'never', not {check!r}")
    if not 1 <= pad_to_multiple_of <= LARGEST_MULTIPLE:
        raise ValueError(f"pad_to_multiple_of must be 1 to {LARGEST_MULTIPLE}, not {pad_to_multiple_of}")
    before = _checks(model)
    names = swap_encoders(model, pad_to_multiple_of, mlm_head, check=check)
    if names or _checks(model) != before:
        stop_comparing(model)
        compare_first_calls(model, check, restore_encoders)
    return names


def _checks(model: nn.Module) -> dict[nn.Module, str]:
    """Map the models around encoders, which may be further heads of an unpadded encoder, to the check they have."""
    return {around: around.call_rules.check for around in models_around_encoders(model)}


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
        model: A model with one encoder that :func:`apply_unpadding` changed.
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
        raise ValueError(f"the model has {len(encoders)} unpadded encoders, not one; call apply_unpadding first")
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


def undo_unpadding(model: nn.Module) -> list[str]:
    """Restore a model's encoders and attention, and return the names of the changed encoders."""
    stop_comparing(model)
    return restore_encoders(model)
