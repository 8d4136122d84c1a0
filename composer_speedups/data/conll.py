"""Files of words and tags as CoNLL's shared tasks have them."""

from __future__ import annotations

from pathlib import Path

import pyarrow

__all__ = ["read_conll"]


def read_conll(path: Path) -> pyarrow.Table:
    """A word and its tags on each line, separated by blanks; an empty line after each sentence.

    Lines that begin with ``-DOCSTART-`` (CoNLL-2003) or ``#`` followed by a blank (CoNLL-U) are left out.

    Returns:
        Columns ``tokens``, the first word of each line, and ``ner_tags``, the last, a list of str for each sentence.

    Raises:
        ValueError: A line with one word only.
    """
    sentences: list[list[list[str]]] = [[]]
    with open(path, encoding="utf-8") as lines:
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
