"""TokenClassification: labels of the first or of all word pieces, with WordPiece and byte-level BPE tokenizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import RobertaTokenizerFast

from composer_speedups.core.errors import ConfigError, DataError
from composer_speedups.data.builtin import builtin_samples
from composer_speedups.data.tokens import load_tokenizer
from composer_speedups.tasks.metrics import EntityF1
from composer_speedups.tasks.settings import DataConfig
from composer_speedups.tasks.token_classification import TokenClassification

TAGS = ["O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC"]
NEWS = builtin_samples("token_classification", 30, 1, "train", 0.1)
WORDS = [*NEWS["tokens"], ["Carter's", "naïve", "co-op", "…", "ON-AIR"]]
IDS = [[TAGS.index(tag) for tag in row] for row in [*NEWS["ner_tags"], ["B-PER", "I-PER", "B-ORG", "O", "B-LOC"]]]


def wordpiece() -> Any:
    """Return a tokenizer with so few tokens that most words have several pieces."""
    return load_tokenizer(DataConfig(tokenizer="wordpiece", vocab_size=128), "unused", [" ".join(row) for row in WORDS])


def roberta() -> Any:
    """Return a byte-level BPE tokenizer as RoBERTa's, whose pieces depend on the space before a word."""
    trained = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator([" ".join(row) for row in WORDS], vocab_size=330, special_tokens=special)
    trained.save_model(".")
    RobertaTokenizerFast(vocab="vocab.json", merges="merges.txt", add_prefix_space=False).save_pretrained("roberta")
    return load_tokenizer(DataConfig(tokenizer="roberta"), "unused", None, splits_words=True)


def plain(
    words: list[str], tags: list[int], tokenizer: Any, length: int, all_pieces: bool
) -> tuple[list[int], list[int]]:
    """Tokenize and label word by word; return the ids and labels."""
    ids, labels = [tokenizer.cls_token_id], [-100]
    for word, tag in zip(words, tags, strict=True):
        pieces = tokenizer(word, add_special_tokens=False).input_ids
        inside = TAGS.index(f"I{TAGS[tag][1:]}") if TAGS[tag].startswith("B") else tag
        ids += pieces
        labels += [tag, *([inside if all_pieces else -100] * (len(pieces) - 1))][: len(pieces)]
    return [*ids[: length - 1], tokenizer.sep_token_id], [*labels[: length - 1], -100]


@pytest.mark.parametrize("all_pieces", [False, True])
@pytest.mark.parametrize("make", [wordpiece, roberta])
def test_the_first_piece_or_all_pieces_are_labelled(make: Any, all_pieces: bool) -> None:
    tokenizer = make()
    task = TokenClassification(labels=TAGS, label_all_pieces=all_pieces)
    for length in (200, 12):
        encoded = task.encode({"text_1": WORDS, "labels": IDS}, tokenizer, length)
        expected = [plain(*row, tokenizer, length, all_pieces) for row in zip(WORDS, IDS, strict=True)]
        assert encoded["input_ids"] == [ids for ids, _ in expected]
        assert encoded["token_labels"] == [labels for _, labels in expected]
        assert all(len(ids) <= length for ids, _ in expected)
    assert any(len(tokenizer(word, add_special_tokens=False).input_ids) > 1 for word in WORDS[0])


def test_robertas_tokenizer_reads_words_with_a_space_before_each() -> None:
    tokenizer = roberta()
    encoded = TokenClassification(labels=TAGS).encode({"text_1": [["the", "town"]], "labels": [[0, 0]]}, tokenizer, 20)
    assert tokenizer.decode(encoded["input_ids"][0], skip_special_tokens=True) == " the town"


def test_entity_f1_equals_seqevals_over_batches() -> None:
    from seqeval.metrics import f1_score

    torch.manual_seed(0)
    metric, expected, predicted = EntityF1(TAGS), [], []
    for rows in (3, 2):
        logits, labels = torch.randn(rows, 9, len(TAGS)), torch.randint(len(TAGS), (rows, 9))
        labels[:, [0, 4, 8]] = -100  # -100 may also occur within an entity
        metric.update(logits, labels)
        for row, best in zip(labels.tolist(), logits.argmax(-1).tolist(), strict=True):
            expected.append([TAGS[y] for y in row if y >= 0])
            predicted.append([TAGS[x] for x, y in zip(best, row, strict=True) if y >= 0])
    assert 0 < float(metric.compute()) == pytest.approx(f1_score(expected, predicted))


@pytest.mark.parametrize("all_pieces", [False, True])
def test_a_prediction_has_the_tag_of_each_words_first_piece(all_pieces: bool) -> None:
    tokenizer = wordpiece()
    task = TokenClassification(labels=TAGS, label_all_pieces=all_pieces)
    words = [*WORDS[-1][:3], "\u200b", *WORDS[-1][3:]]  # one without pieces
    encoded = task.encode({"text_1": [words]}, tokenizer, 200)
    (ids,), (labels,) = encoded["input_ids"], encoded["token_labels"]
    first, expected = 1, {}
    for word, text in enumerate(words):
        if pieces := tokenizer(text, add_special_tokens=False).input_ids:
            expected[first], first = word, first + len(pieces)
    assert len(expected) == len(words) - 1 < len(ids) - 2 - 3, "words of several pieces"
    assert {i: label for i, label in enumerate(labels) if label != -100} == expected
    logits = torch.randn(1, len(ids), len(TAGS), generator=torch.Generator().manual_seed(0)) * 5
    (prediction,) = task.predictions(logits, {"labels": torch.tensor([labels])})
    answer = task.with_text(prediction, [words])
    of_word = {word: TAGS[int(logits[0, i].argmax())] for i, word in expected.items()}
    assert len(set(of_word.values())) > 1
    assert answer["words"] == words
    assert answer["tags"] == [of_word.get(word) for word in range(len(words))]
    assert [p is None for p in answer["probabilities"]] == [tag is None for tag in answer["tags"]]
    assert list(answer) == ["words", "tags", "probabilities"]


@pytest.mark.parametrize(
    ("words", "tags", "problem"),
    [
        (["a", "b"], ["O"], "2 words in tokens, and 1 tags in ner_tags"),
        ("a b", ["O"], "2 words in tokens, and 1 tags in ner_tags"),
        ("['a', 'b']", ["O", "O"], "tokens is .*; every sample needs words"),  # a list written as text
        (" ", [], "tokens is empty; every sample needs words"),
        ([], [], "tokens is .*; every sample needs words"),
        (["a", None], ["O", "O"], "tokens is .*; every sample needs words"),
        (["a"], "O", "ner_tags is 'O'; every label must be a list of tags, one per word"),
        (["a"], ["B-CITY"], "ner_tags holds 'B-CITY'; every label must be one of O, B-PER"),
    ],
)
def test_bad_rows_are_named(words: Any, tags: Any, problem: str) -> None:
    with pytest.raises(DataError, match=f"f, row 2: {problem}"):
        TokenClassification(labels=TAGS).example({"tokens": words, "ner_tags": tags}, "f, row 2", training=True)


def test_without_seqeval_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    task = TokenClassification(labels=TAGS)
    assert "EntityF1" in task.metrics(training=False)
    assert "EntityF1" not in TokenClassification(labels=["NOUN", "VERB"]).metrics(training=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs seqeval; pip install '\.\[ner\]' in a clone"):
        task.metrics(training=False)
