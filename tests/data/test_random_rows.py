"""data.source: random draws rows of one length from the vocabulary, reproducibly for a seed."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from composer_speedups.core.errors import ConfigError
from composer_speedups.data.builtin import builtin_reviews
from composer_speedups.data.loader import build_data
from composer_speedups.data.tokens import load_tokenizer
from composer_speedups.tasks.classification import Classification
from composer_speedups.train.config.load import load_config
from composer_speedups.train.config.schema import DataConfig
from tests.conftest import ROOT


def test_random_rows_have_max_length_and_no_special_tokens() -> None:
    reviews = Dataset.from_dict(builtin_reviews(20, 1, "train", 0.1))
    tokenizer = load_tokenizer(DataConfig(tokenizer="wordpiece", vocab_size=200), "", reviews["text"])
    tokenizer.save_pretrained("tokenizer")
    settings: dict[str, Any] = {
        "tokenizer": "tokenizer",
        "max_length": 12,
        "train_samples": 40,
        "eval_samples": 8,
        "batch_size": 4,
    }
    config = DataConfig(source="random", **settings)
    data, again = (build_data(config, Classification(), model_name="", on_gpu=False) for _ in range(2))
    other = build_data(config.replaced(seed=3), Classification(), model_name="", on_gpu=False)
    assert data.eval is not None
    drawn: list[Any] = [spec.dataloader.dataset for spec in (data.train, data.eval, other.train, again.train)]
    train, evaluation, elsewhere, again_train = drawn
    assert (len(train), len(evaluation)) == (40, 8)
    assert set(train.lengths.tolist()) == {12}
    assert set(train.rows["labels"].tolist()) == {0, 1}
    assert not set(train.tokens["input_ids"].tolist()) & set(tokenizer.all_special_ids)
    assert len(set(train.tokens["input_ids"].tolist())) > 40
    assert train.tokens["input_ids"].tolist() == again_train.tokens["input_ids"].tolist()
    assert train.tokens["input_ids"].tolist()[:96] != evaluation.tokens["input_ids"].tolist()
    assert train.tokens["input_ids"].tolist() != elsewhere.tokens["input_ids"].tolist()
    batch = next(iter(data.train.dataloader))
    assert batch["input_ids"].shape == (4, 12)
    assert bool(batch["attention_mask"].all())


def test_wordpiece_is_refused_without_texts_to_train_it_on() -> None:
    with pytest.raises(ConfigError, match=r"data\.tokenizer wordpiece is trained on texts, .*none; name a tokenizer"):
        load_config(ROOT / "yamls" / "bert_large_dummy.yaml", ["data.tokenizer=wordpiece"])
