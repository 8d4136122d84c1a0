"""Token ids of all reviews in one flat array: a batch is taken out at once, not row by row.

Letters in names of arrays: N reviews, R rows of a batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset

__all__ = ["FlatTokens", "Ragged"]

Integers = npt.NDArray[Any]


class Ragged(NamedTuple):
    """Rows of a batch before they are padded."""

    ids_T: Integers  # of all rows, one after another
    lengths_R: Integers
    labels_R: Integers

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Ragged:
        """From rows with ``input_ids`` (list of int) and ``label``."""
        return cls(
            np.fromiter((i for row in rows for i in row["input_ids"]), np.int64),
            np.fromiter((len(row["input_ids"]) for row in rows), np.int64),
            np.fromiter((row["label"] for row in rows), np.int64),
        )


class FlatTokens(torch.utils.data.Dataset[dict[str, Any]]):
    """Tokenized reviews in memory: 4 bytes a token. DataLoader workers that are forked share it.

    A DataLoader asks for a whole batch by ``__getitems__`` and hands the :class:`Ragged` on to its ``collate_fn``.

    Args:
        tokens: Columns ``input_ids`` (lists of int) and ``label``, as :func:`.tokens.tokenize` returns them.
    """

    def __init__(self, tokens: Dataset) -> None:
        table = tokens.with_format("arrow")[:]
        chunks = table.column("input_ids").chunks
        self.ids: Integers = np.concatenate([c.flatten().to_numpy() for c in chunks]).astype(np.int32, copy=False)
        self.lengths: Integers = np.concatenate([np.diff(c.offsets.to_numpy()) for c in chunks]).astype(np.int64)
        self.labels: Integers = table.column("label").to_numpy().astype(np.int64)
        self._starts_N = np.cumsum(self.lengths) - self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = self._starts_N[index]
        ids = self.ids[start : start + self.lengths[index]].tolist()
        return {"input_ids": ids, "label": int(self.labels[index])}

    def __getitems__(self, indices: Sequence[int]) -> Ragged:
        rows_R = np.asarray(indices)
        lengths_R = self.lengths[rows_R]
        first_R = np.cumsum(lengths_R) - lengths_R  # where each row begins in the batch
        places_T = np.arange(lengths_R.sum()) + np.repeat(self._starts_N[rows_R] - first_R, lengths_R)
        return Ragged(self.ids[places_T], lengths_R, self.labels[rows_R])
