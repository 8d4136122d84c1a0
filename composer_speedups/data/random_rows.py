"""Rows of random token ids, all of the same length: for measuring memory and speed, where nothing is to be learned."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pyarrow
from datasets import Dataset

__all__ = ["random_rows"]


def random_rows(count: int, seed: int, split: str, length: int, tokenizer: Any) -> Dataset:
    """The same rows for the same arguments on every machine.

    Args:
        count: Number of rows.
        seed: Seed of the generator.
        split: ``"train"`` or ``"eval"``; other rows each.
        length: Tokens of every row, none of them padding.
        tokenizer: Its vocabulary, special tokens left out, is what is drawn from, each token as likely as any other.

    Returns:
        Columns ``input_ids`` (list of int) and ``label`` (0 or 1, at random), as :func:`.tokens.tokenize` has them.
    """
    generator = np.random.default_rng([seed, zlib.crc32(split.encode())])
    plain = np.setdiff1d(np.arange(len(tokenizer), dtype=np.int32), tokenizer.all_special_ids)
    ids = generator.choice(plain, size=count * length)
    starts = np.arange(0, count * length + 1, length, dtype=np.int32)
    rows = pyarrow.ListArray.from_arrays(starts, ids.astype(np.int32))
    return Dataset(pyarrow.table({"input_ids": rows, "label": generator.integers(0, 2, count)}))
