"""Sentences of .conll files: what separates words and tags, what is a comment, and what is refused."""

from __future__ import annotations

import pytest

from composer_speedups.data.conll import conll_rows

Sentences = list[tuple[list[str], list[str]]]


def read(text: str) -> Sentences:
    return [(row["tokens"], row["ner_tags"]) for row in conll_rows(text.splitlines(keepends=True))]


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("# id 1\nAnn B-PER\nran O\n \nBob\tB-PER", [(["Ann", "ran"], ["B-PER", "O"]), (["Bob"], ["B-PER"])]),
        ("-DOCSTART- -X- O\n\nAnn NNP O\r\n\r\n-DOCSTART- O\n", [(["Ann"], ["O"])]),
        (
            "Ann   B-PER \n\n\n10\u00a0000 O\n10\u00a0000\tB-SUM\t\n",
            [(["Ann"], ["B-PER"]), (["10\u00a0000"] * 2, ["O", "B-SUM"])],
        ),
        ("# O\nAnn B-PER\n# O\n#\tO\n#2 O\n", [(["#", "Ann", "#", "#", "#2"], ["O", "B-PER", "O", "O", "O"])]),
        ("# # O\nAnn NNP O\n", [(["#", "Ann"], ["O", "O"])]),
        ("Ann NNP\n# SYM\n\n# SYM\n1 CD\n", [(["Ann", "#"], ["NNP", "SYM"]), (["#", "1"], ["SYM", "CD"])]),
        ("# comment\n\nAnn O\n", [(["Ann"], ["O"])]),
        ("# id x1 domain=en\nAnn _ _ B-PER\n", [(["Ann"], ["B-PER"])]),
        ("1 O\n2 O\n", [(["1", "2"], ["O", "O"])]),
        ("1 CD O\n3 CD O\n\n1 CD O\n2 CD O\n", [(["1", "3"], ["O", "O"]), (["1", "2"], ["O", "O"])]),
    ],
)
def test_words_tags_and_comments(text: str, sentences: Sentences) -> None:
    assert read(text) == sentences


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("New York\tB-LOC\n", r"line 1 has tabs, and blanks inside a field: 'New York\\tB-LOC'"),
        ("Ann\tO\nAnn NNP\tB-PER\n", "line 2 has tabs, and blanks inside a field"),
        ("Ann O\nNew York B-LOC\n", "line 2 has 3 fields, and those before it have 2"),
        ("Ann NNP O\n\nBob O\n", "line 3 has 2 fields, and those before it have 3"),
        ("Ann\t\n", "line 1 has a word without a tag: Ann; to predict"),
        ("\tO\n", "line 1 has a word without a tag: O; to predict"),
        ("# SYM\n1 CD\n", "line 1 may be a comment or the word '#': # SYM; remove"),
        ("# text = Yes\n1\tYes\tyes\tINTJ\tUH\t_\t0\troot\t_\t_\n", "line 2: it has numbers of words, as in CoNLL-U"),
        (
            "1\tYes\t_\tO\n\n1-2\tdel\t_\t_\n1\tde\t_\tO\n2\tel\t_\tO\n2.1\tno\t_\tO\n3\tmar\t_\tB-X\n",
            "line 3: it has numbers of words",
        ),
        ("0 Ann NNP\n1 ran VBD\n", "line 1: it has numbers of words"),
        ("#\thttp://a.b\t[2009-10-17]\n1\tAnn\tB-PER\tO\n2\tran\tO\tO\n", "line 1: it has numbers of words"),
        ("#begin document (a/b); part 000\na/b 0 0 Ann NNP\n", "line 1: it has numbers of words"),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read(text)
