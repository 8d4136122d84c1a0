"""Sentences of a .conll file: a word per line, with its tags, and an empty line after each sentence."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

_PART_OF_A_WORD = re.compile(r"\d+[-.]\d+")  # first fields of CoNLL-U's contractions and left-out words
_CONLL_U = 10  # fields of a line


class _Line(NamedTuple):
    number: int
    text: str

    @property
    def fields(self) -> list[str]:
        """Split at tabs or blanks. Other spaces, such as the no-break space in ``10 000``, are part of a word."""
        return [field.strip(" ") for field in self.text.split("\t")] if "\t" in self.text else re.split(" +", self.text)


def conll_rows(file: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The sentences without comments: ``tokens``, the first field of each line, and ``ner_tags``, the last one."""
    width, tags, numbered = 0, {"O"}, True
    for lines in _blocks(file):
        words = list(itertools.dropwhile(lambda line: line.text.startswith("# "), lines))
        if words and numbered:
            numbered = _counts_its_words(words)
        width = width or (len(words[0].fields) if words else 0)
        tags.update(line.fields[-1] for line in words)
        while lines and _is_comment(lines[0], width, tags):
            del lines[0]
        for line in lines:
            _check(line, width or len(lines[0].fields))
        if lines:
            yield {"tokens": [line.fields[0] for line in lines], "ner_tags": [line.fields[-1] for line in lines]}


def _blocks(file: Iterable[str]) -> Iterator[list[_Line]]:
    """The lines between empty ones."""
    lines: list[_Line] = []
    for number, line in enumerate(itertools.chain(file, [""]), start=1):
        text = line.strip(" \t\r\n")
        if not line.strip():
            yield lines
            lines = []
        elif text.split()[0] != "-DOCSTART-":
            lines.append(_Line(number, text))


def _is_comment(line: _Line, width: int, tags: Collection[str]) -> bool:
    """Whether a line is a comment, not the word ``#`` with one of the ``tags``; ValueError if unclear."""
    if not line.text.startswith("# ") or (width in (0, len(line.fields)) and line.fields[-1] in tags):
        return False
    if width != len(line.fields) or "=" in line.text:
        return True
    raise ValueError(
        f"line {line.number} may be a comment or the word '#': {line.text[:40]}; remove the comment, or separate the "
        "word from its tags by tabs"
    )


def _check(line: _Line, width: int) -> None:
    fields = line.fields
    if len(fields) == 1:
        untagged = f"line {line.number} has a word without a tag: {line.text[:40]}"
        raise ValueError(f"{untagged}; to predict tags, use a .txt file with a sentence per line")
    if len(fields) != width:
        raise ValueError(f"line {line.number} has {len(fields)} fields, and those before it have {width}")
    if any(" " in field for field in (fields[0], fields[-1])):
        raise ValueError(
            f"line {line.number} has tabs, and blanks inside a field: {line.text[:40]!r}; separate all fields by tabs, "
            "or use .jsonl for words with blanks"
        )


def _counts_its_words(lines: list[_Line]) -> bool:
    """Whether the first fields may be word numbers, as in CoNLL-U; ValueError if they certainly are."""
    first_fields = [line.fields[0] for line in lines if not line.text.startswith("#\t")]
    numbers = [field for field in first_fields if not _PART_OF_A_WORD.fullmatch(field)]
    counts = any(numbers == [str(start + i) for i in range(len(numbers))] for start in (0, 1))
    width = len(lines[-1].fields)
    if lines[0].text.startswith("#begin ") or (counts and (width == _CONLL_U or (len(numbers) > 1 and width > 2))):
        raise ValueError(
            f"line {lines[0].number}: it has numbers of words, as in CoNLL-U, where the word should be; write lines "
            "that begin with the word and end with its tag"
        )
    return counts
