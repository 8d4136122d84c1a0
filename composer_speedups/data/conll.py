"""Read files of words and tags in the format of CoNLL's shared tasks."""

from __future__ import annotations

from pathlib import Path

import pyarrow

__all__ = ["read_conll"]


def read_conll(path: Path) -> pyarrow.Table:
    """Read lines with a word and its tags, separated by blanks, and an empty line after each sentence.

    Lines that begin with ``-DOCSTART-`` (CoNLL-2003) or with ``#`` and a blank (CoNLL-U) are skipped.

    Returns:
        Columns ``tokens``, the first field of each line, and ``ner_tags``, the last field; a list of str per sentence.

    Raises:
        ValueError: A line with one field only.
    """
    sentences: list[list[list[str]]] = [[]]
    with open(path, encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            fields = line.split()
            if not fields:
                sentences.append([])
            elif fields[0] != "-DOCSTART-" and not line.startswith("# "):
                if len(fields) == 1:
                    raise ValueError(f"line {number} has a word without a tag: {line.strip()[:40]}")
                sentences[-1].append(fields)
    found = [sentence for sentence in sentences if sentence]
    return pyarrow.table(
        {
            "tokens": pyarrow.array(
                [[fields[0] for fields in each] for each in found], pyarrow.list_(pyarrow.string())
            ),
            "ner_tags": pyarrow.array(
                [[fields[-1] for fields in each] for each in found], pyarrow.list_(pyarrow.string())
            ),
        }
    )
