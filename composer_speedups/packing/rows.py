"""Count the real tokens of each row of a batch on the CPU, and keep the counts in the batch.

The number of packed tokens determines the shapes of an encoder's tensors, so the host must know it. Counting a mask on
a GPU would make the host wait. The counts travel in the batch instead: :func:`count_rows` makes the entries, and
:class:`RowLengths` stay on the CPU when the batch is moved. Whatever divides a batch by its rows divides them, too.

Shapes: B rows, S slots per row.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

IGNORED = -100  # the label that torch's cross entropy ignores
STAYS_PADDED = -1  # in place of a row's number of real tokens
_MASK, _LENGTHS = "attention_mask", "_row_lengths"
ROW_LABELS = "_row_labels"  # the batch's entry with the number of labelled tokens of each row
ROW_INDICES = "_row_indices"  # the batch's entry with the index of each row's sample in its dataset
SAMPLES = "_samples"  # the batch's entry with 1 for each row that is a sample, and 0 for filler
CHANGED = (
    "unpadding: the attention mask or the labels changed after their tokens were counted; change batches before they "
    "are moved to the device, and give padding the label -100"
)


class RowLengths(Tensor):
    """Integers per row, int32 (B,) or (B, texts), that stay on the CPU when their batch is moved to a device."""

    def to(self, *args: Any, **kwargs: Any) -> RowLengths:  # type: ignore[override]
        return self

    def cuda(self, *args: Any, **kwargs: Any) -> RowLengths:
        return self

    def __deepcopy__(self, memo: Any) -> RowLengths:
        return self  # they do not change; Composer copies each micro-batch

    def pin_memory(self, *args: Any, **kwargs: Any) -> RowLengths:
        return self

    def numpy(self, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # whose dispatch takes 20 calls of Python
            return super().numpy(**kwargs)


class RowRules(NamedTuple):
    """Which rows of a batch one encoder must leave padded."""

    head_has_token_loss: bool = False  # the loss covers every slot, without using the mask
    head_reads_first_slot: bool = False  # even if it is padding
    # In a batch with more slots per row than this, padding between real tokens changes the result; None: never.
    max_width_with_holes: int | None = None

    def lengths(self, mask_BS: Tensor, labels: Tensor | None = None) -> Any:
        """Real tokens of each row, or :data:`STAYS_PADDED` if its loss in the untouched model depends on outputs at
        padding positions, as a NumPy array (B,). Synchronizes with a GPU's mask."""
        real = as_numpy(mask_BS) != 0
        counts = real.sum(-1)
        begins = not self.head_reads_first_slot or real[:, 0].all()  # as each row of nearly all batches does
        if not begins or self.head_has_token_loss or self.max_width_with_holes is not None:
            labels = _with_ignored(labels, len(mask_BS))
            for padded in self._padded_rows(real, None if labels is None else as_numpy(labels) != IGNORED, True):
                counts[padded] = STAYS_PADDED
        return counts

    def assert_packable(self, mask_BS: Tensor, labels: Tensor | None) -> None:
        """Check without synchronizing that no row of a mask, bool, must stay padded. If the labels are not available
        here, rows without tokens are assumed to have no label."""
        labels = _with_ignored(labels, len(mask_BS))
        for padded in self._padded_rows(mask_BS, None if labels is None else labels != IGNORED, False):
            torch._assert_async(~padded.any(), CHANGED)

    def _padded_rows(self, real: Any, labelled: Any, if_unknown: bool) -> Iterator[Any]:
        """For each reason, yield the rows that stay padded, bool (B,), from the real tokens (B, S) and the rows or
        tokens with a label; ``if_unknown`` is assumed of rows whose label is unknown. NumPy arrays or tensors."""
        if self.head_reads_first_slot:
            has_label = labelled if labelled is not None and labelled.ndim == 1 else if_unknown
            yield ~real[:, 0] & (real.any(-1) | has_label)
        if self.head_has_token_loss and labelled is not None and labelled.shape == real.shape:
            yield (labelled & ~real).any(-1)
        if self.max_width_with_holes is not None and real.shape[1] > self.max_width_with_holes:
            begins = real[:, 1:] & ~real[:, :-1]
            yield real[:, 0] + begins.sum(-1) > 1


def _with_ignored(labels: Tensor | None, rows: int) -> Tensor | None:
    """Labels of rows or tokens that may contain the ignored label; None otherwise, as for regression."""
    if labels is None or len(labels) != rows or (labels.ndim == 1 and labels.is_floating_point()):
        return None
    return labels


def lengths_key(mask: str) -> str:
    """The name of the batch's entry with the row lengths of a mask: ``_row_lengths`` for ``attention_mask``."""
    return mask.replace(_MASK, _LENGTHS)


def counted_values(name: str) -> str:
    """The name of the mask or labels that an entry counts."""
    return "labels" if name == ROW_LABELS else name.replace(_LENGTHS, _MASK)


def count_rows(batch: Any, rules: Sequence[RowRules], *, labels: bool = False) -> dict[str, RowLengths]:
    """The entries to add to a batch, from its masks and labels on the CPU; those on a GPU are left out.

    For each mask (B, S) or (B, texts, S), under :func:`lengths_key`: the real tokens of its rows, or
    :data:`STAYS_PADDED` if one of the encoders' rules says so; with ``labels``, also the labelled tokens of each row.
    Lengths that the batch already has, of rows with right padding, are recounted only for rules that need the mask
    itself.
    """
    entries, known = {}, labels_of(batch)
    for name, mask in token_masks(batch).items():
        own, given = known if name == _MASK and mask.ndim == 2 else None, batch.get(lengths_key(name))
        if given is not None and given.numpy().all() and not any(rule.head_has_token_loss for rule in rules):
            entries[lengths_key(name)] = given
        elif all(tensor is None or tensor.device.type == "cpu" for tensor in (mask, own)):
            counts, *others = (rule.lengths(mask.flatten(0, -2), own) for rule in rules)
            counts = functools.reduce(np.minimum, others, counts)
            entries[lengths_key(name)] = row_lengths(counts.reshape(mask.shape[:-1]))
    if labels and known is not None and known.ndim == 2 and known.device.type == "cpu":
        entries[ROW_LABELS] = row_lengths((as_numpy(known) != IGNORED).sum(-1))
    return entries


def row_lengths(numbers: Any) -> RowLengths:
    return torch.from_numpy(numbers.astype(np.int32)).as_subclass(RowLengths)


class CountedRows:
    """A collator that adds the row lengths to each batch, for loops without Composer's Trainer."""

    def __init__(self, collate: Callable[[Any], Any], rules: Sequence[RowRules], *, labels: bool) -> None:
        self.collate, self.rules, self.labels = collate, rules, labels

    def __call__(self, samples: Any) -> Any:
        batch = copy.copy(self.collate(samples))
        batch.update(count_rows(batch, self.rules, labels=self.labels))
        return batch


class IndexedRows(Dataset[Any]):
    """Wraps a dataset and its collator so that each row of a batch carries the index of its sample.

        rows = IndexedRows(dataset, collate)
        loader = DataLoader(rows, batch_size=32, shuffle=True, collate_fn=rows.collate)

    Args:
        dataset: A map-style dataset.
        collate: Makes a batch, a dict of tensors with a row per sample, from a list of samples, or from what the
            dataset's ``__getitems__`` returns.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Sequence[int], Any]:
        if hasattr(self._dataset, "__getitems__"):
            return indices, self._dataset.__getitems__(indices)
        return indices, [self._dataset[index] for index in indices]

    def collate(self, indexed: tuple[Sequence[int], Any]) -> Any:
        batch = copy.copy(self._collate(indexed[1]))
        batch[ROW_INDICES] = row_lengths(np.asarray(indexed[0]))
        return batch


def token_masks(batch: Any) -> dict[str, Tensor]:
    """The attention masks of a batch by name, (B, S), or (B, texts, S) as the ids."""
    if not isinstance(batch, Mapping):
        return {}
    masks = {}
    for name, mask in batch.items():
        if isinstance(name, str) and _MASK in name and isinstance(mask, Tensor) and mask.numel():
            ids = batch.get(name.replace(_MASK, "input_ids"))
            if mask.ndim == 2 or (mask.ndim == 3 and isinstance(ids, Tensor) and mask.shape == ids.shape):
                masks[name] = mask
    return masks


def labels_of(batch: Any) -> Tensor | None:
    """The labels of a batch; None without any."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return labels if isinstance(labels, Tensor) else None


def as_numpy(values: Tensor) -> Any:
    """A tensor's values on the host, for work on a few thousand numbers, for which torch would wake all its threads."""
    values = values.detach().cpu()
    return (values.float() if values.dtype is torch.bfloat16 else values).numpy()  # NumPy has no bfloat16
