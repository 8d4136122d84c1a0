"""Functions that make an encoder run on real tokens only, for models outside of a Trainer."""

from __future__ import annotations

from typing import get_args

from torch import nn

from composer_speedups.algorithms.unpadding.encoder_swap import restore_encoders, unpad
from composer_speedups.packing.comparison import Check
from composer_speedups.packing.encoder import with_row_lengths
from composer_speedups.packing.labelled_head import MLMHead
from composer_speedups.packing.layout import MULTIPLE
from composer_speedups.packing.untouched import untouched

__all__ = ["apply_unpadding", "undo_unpadding", "untouched", "with_row_lengths"]
LARGEST_MULTIPLE = 65536


def apply_unpadding(
    model: nn.Module, pad_to_multiple_of: int = MULTIPLE, mlm_head: MLMHead = "all", check: Check = "auto"
) -> list[str]:
    """Make the encoder of a Hugging Face model run on real tokens only; see :func:`.unpad`."""
    if mlm_head not in ("all", "labelled"):
        raise ValueError(f"mlm_head must be 'all' or 'labelled', not {mlm_head!r}")
    if check not in get_args(Check):
        raise ValueError(f"check must be 'auto', 'always' or 'never', not {check!r}")
    if not 1 <= pad_to_multiple_of <= LARGEST_MULTIPLE:
        raise ValueError(f"pad_to_multiple_of must be 1 to {LARGEST_MULTIPLE}, not {pad_to_multiple_of}")
    return unpad(model, pad_to_multiple_of, mlm_head, check=check)


def undo_unpadding(model: nn.Module) -> list[str]:
    """Restore a model's encoders and attention, and return the names of the changed encoders."""
    return restore_encoders(model)
