"""Token ids of all samples in one flat array, from which a whole batch is gathered at once.

Letters in names of arrays: N samples, R rows of a batch, T tokens, Q texts per sample.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset

from composer_speedups.packing.rows import SAMPLES

Arrays = npt.NDArray[Any]

# Columns with a number per token → their name in a batch. All other columns have a number per sample, or a list of one
# length.
PER_TOKEN = {
    "input_ids": "input_ids",
    "token_type_ids": "token_type_ids",
    "token_labels": "labels",
    "word_starts": "word_starts",
}


class Ragged(NamedTuple):
    """The rows of a batch before padding."""

    tokens: dict[str, Arrays]  # (T,) each, the rows concatenated
    lengths: Arrays  # (R,), or (R, Q) if samples have several texts
    rows: dict[str, Arrays]  # (R,) or (R, K) each

    @classmethod
    def of(cls, columns: Mapping[str, Sequence[Any]]) -> Ragged:
        """From the columns of :meth:`.Task.encode`."""
        tokens = {
            PER_TOKEN[name]: np.fromiter(chain.from_iterable(values), np.int64)
            for name, values in columns.items()
            if name in PER_TOKEN
        }
        rows = {name: _values(values) for name, values in columns.items() if name not in PER_TOKEN}
        lengths = np.fromiter(map(len, columns["input_ids"]), np.int64)
        return cls(tokens, rows.pop("lengths", lengths), rows)


class FlatTokens(torch.utils.data.Dataset[Ragged]):
    """Tokenized samples in memory, 4 bytes per token; a DataLoader requests a whole batch with ``__getitems__``."""

    _filler = 0  # rows that are no samples

    def __init__(self, dataset: Dataset) -> None:
        table = dataset.with_format("arrow")[:]
        self.tokens: dict[str, Arrays] = {}
        self.rows: dict[str, Arrays] = {}
        for name in table.column_names:
            if name in PER_TOKEN:
                chunks = [chunk.flatten().to_numpy() for chunk in table.column(name).chunks]
                self.tokens[PER_TOKEN[name]] = np.concatenate(chunks).astype(np.int32, copy=False)
            else:
                self.rows[name] = _values(table.column(name).to_pylist())
        offsets = [chunk.offsets.to_numpy() for chunk in table.column("input_ids").chunks]
        self.lengths: Arrays = np.concatenate([np.diff(chunk) for chunk in offsets]).astype(np.int64)  # (N,)
        self._starts_N = np.cumsum(self.lengths) - self.lengths

    @property
    def widths(self) -> Arrays:
        """Tokens of each sample's longest text, (N,)."""
        texts_NQ = self.rows.get("lengths")
        return self.lengths if texts_NQ is None else texts_NQ.max(-1)

    def packed(self, length: int) -> FlatTokens:
        """The same tokens in rows of ``length``, the last one shorter; columns with a value per sample are dropped."""
        packed = copy.copy(self)
        total = int(self.lengths.sum())
        packed._starts_N = np.arange(0, total, length)
        packed.lengths = np.minimum(length, total - packed._starts_N)
        packed.rows = {}
        return packed

    def filled(self, values: Mapping[str, int], width: int) -> FlatTokens:
        """The same samples, with filler: row ``len(self) + n``, for ``n`` up to ``width``, has ``n`` tokens. ``values``
        are those of the filler, by name; 0 for other names."""
        filled, count = copy.copy(self), width + 1
        rows = {**self.rows, SAMPLES: np.ones(len(self), np.int32)}
        filled.tokens = {name: _extended(old, width, values.get(name, 0)) for name, old in self.tokens.items()}
        filled.rows = {name: _extended(old, count, values.get(name, 0)) for name, old in rows.items()}
        filled.lengths = np.concatenate([self.lengths, np.arange(count)])
        filled._starts_N = _extended(self._starts_N, count, int(self.lengths.sum()))
        filled._filler = count
        return filled

    def __len__(self) -> int:
        return len(self.lengths) - self._filler

    def __getitems__(self, indices: Sequence[int]) -> Ragged:
        rows_R = np.asarray(indices)
        lengths_R = self.lengths[rows_R]
        first_R = np.cumsum(lengths_R) - lengths_R  # start of each row in the batch
        places_T = np.repeat(self._starts_N[rows_R] - first_R, lengths_R)
        places_T += np.arange(len(places_T))
        rows = {name: values[rows_R] for name, values in self.rows.items()}
        return Ragged({k: v.take(places_T) for k, v in self.tokens.items()}, rows.pop("lengths", lengths_R), rows)


def _extended(array: Arrays, rows: int, value: int) -> Arrays:
    return np.concatenate([array, np.full((rows, *array.shape[1:]), value, array.dtype)])


def _values(values: Sequence[Any]) -> Arrays:
    """Numbers, or lists of one length: integers as int64, others as float32, as torch's losses expect them."""
    array = np.asarray(values)
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
