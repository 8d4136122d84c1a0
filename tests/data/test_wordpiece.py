"""The WordPiece tokenizer trained on a run's texts: reproducible ids, and otherwise stock WordPiece."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from composer_speedups.data.builtin import builtin_reviews
from composer_speedups.data.tokens import load_tokenizer
from composer_speedups.train.config.schema import DataConfig

pytestmark = pytest.mark.pins
CONFIG = DataConfig(tokenizer="wordpiece", vocab_size=400)


@pytest.fixture(scope="module")
def reviews() -> dict[str, list[str]]:
    return {"text": builtin_reviews(200, seed=17, split="train")["text"]}


def trained(reviews: dict[str, list[str]], cache: str, vocab_size: int = 400) -> Tokenizer:
    config = CONFIG.replaced(cache_dir=cache)
    config.vocab_size = vocab_size  # also one that the key does not accept
    return load_tokenizer(config, "unused", reviews["text"]).backend_tokenizer


def test_training_the_tokenizer_again_gives_the_same_ids(reviews: dict[str, list[str]]) -> None:
    # Every training hashes differently.
    vocabularies = [trained(reviews, f"cache{i}").get_vocab() for i in range(4)]
    assert len(vocabularies[0]) == 400
    assert all(vocabulary == vocabularies[0] for vocabulary in vocabularies[1:])


def test_only_the_five_tokens_of_bert_are_special(reviews: dict[str, list[str]]) -> None:
    tokenizer = trained(reviews, "cache")
    assert [t.content for t in tokenizer.get_added_tokens_decoder().values()] == [
        "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]",
    ]  # fmt: skip
    # No review has a '#'.
    assert tokenizer.encode("##e", add_special_tokens=False).tokens == ["[UNK]", "[UNK]", "e"]
    parts = tokenizer.encode("goodishly", add_special_tokens=False).tokens
    assert [part.startswith("##") for part in parts] == [False] + [True] * (len(parts) - 1)
    assert "".join(part.removeprefix("##") for part in parts) == "goodishly"


def test_every_word_of_the_reviews_has_tokens(reviews: dict[str, list[str]]) -> None:
    tokenizer = trained(reviews, "cache", vocab_size=40)  # fewer than the characters: the alphabet is kept whole
    assert all("[UNK]" not in encoded.tokens for encoded in tokenizer.encode_batch(reviews["text"]))
