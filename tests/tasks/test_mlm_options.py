"""Masked language modelling: whole-word masking, packing, perplexity, resuming, and two ranks."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM, DataCollatorForLanguageModeling

from composer_speedups.core.errors import ConfigError
from composer_speedups.data.builtin import builtin_reviews
from composer_speedups.data.flat import Ragged
from composer_speedups.data.loader import Pad, build_data
from composer_speedups.tasks.mlm import MaskedLanguageModelling, _first_word
from composer_speedups.train.config.schema import DataConfig
from tests.helpers.jobs import assert_resumes_exactly, run
from tests.helpers.ranks import on_ranks
from tests.helpers.texts import sentence, tokenizer_of
from tests.reference.tolerance import assert_near

# Composer warns about batches shorter than the usual size.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot split .* of length:UserWarning")
OPTIONS = ["model.task=mlm", "data.whole_word_masking=true", "data.packing=true"]
TEXTS = [sentence(random.Random(i), 4, 20) for i in range(400)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Return a tokenizer that is trained on other texts, so that most words have several pieces."""
    return tokenizer_of(builtin_reviews(20, 0, "train", 0.1)["text"])


def masked(task: MaskedLanguageModelling, tokenizer: Any, *, seed: int = 0) -> tuple[dict[str, Any], list[Any]]:
    """Return all texts as one masked batch, and the word index of each token."""
    torch.manual_seed(seed)
    rows = Ragged.of(task.encode({"text_1": TEXTS}, tokenizer, 64))
    collate = task.collator(Pad(tokenizer.pad_token_id, 64, longest=False), tokenizer, training=True)
    words = [tokenizer(text, truncation=True, max_length=64).word_ids() for text in TEXTS]
    return collate(rows), words


def test_whole_words_are_masked_and_special_tokens_are_not(tokenizer: Any) -> None:
    batch, words = masked(MaskedLanguageModelling(whole_word_masking=True, mlm_probability=0.2), tokenizer)
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    chosen, pieces = [], []
    for labels, word_of in zip(batch["labels"].tolist(), words, strict=True):
        assert set(labels[len(word_of) :]) <= {-100}, "padding"
        masked_of: dict[Any, set[bool]] = {}
        for label, word in zip(labels, word_of, strict=False):
            masked_of.setdefault(word, set()).add(label != -100)
        assert masked_of.pop(None) == {False}
        assert all(len(states) == 1 for states in masked_of.values()), "a word is masked entirely or not at all"
        chosen += [states.pop() for states in masked_of.values()]
        pieces += [word_of.count(word) for word in masked_of]
    assert np.mean(np.array(pieces) > 1) > 0.5
    assert np.mean(chosen) == pytest.approx(0.2, abs=0.02)  # three standard deviations with about 4,800 words
    hidden = batch["labels"] != -100
    assert torch.equal(batch["input_ids"] == tokenizer.mask_token_id, hidden)


@pytest.mark.parametrize("whole_words", [False, True])
def test_a_batch_has_a_masked_token_at_any_probability(tokenizer: Any, whole_words: bool) -> None:
    task = MaskedLanguageModelling(whole_word_masking=whole_words, mlm_probability=1e-12)
    batch, words = masked(task, tokenizer)
    chosen = (batch["labels"] != -100).nonzero().tolist()
    word = [slot for slot, index in enumerate(words[0]) if index == 0]
    assert len(word) > 1
    assert chosen == [[0, slot] for slot in (word if whole_words else word[:1])]
    for row, slot in chosen:
        assert batch["input_ids"][row, slot] == tokenizer.mask_token_id
        assert batch["labels"][row, slot] == tokenizer(TEXTS[0])["input_ids"][slot]


@pytest.mark.parametrize(
    ("special", "starts", "expected"),
    [
        ([[1, 0, 0, 0, 1]], [[1, 1, 0, 0, 1]], [[0, 1, 1, 1, 0]]),
        ([[1, 0, 0, 0, 1]], [[1, 1, 0, 1, 1]], [[0, 1, 1, 0, 0]]),
        ([[1, 1], [0, 0], [0, 0]], [[1, 1], [0, 0], [0, 1]], [[0, 0], [1, 1], [0, 0]]),  # a packed row ends in a word
        ([[1, 0, 1, 1]], [[1, 1, 0, 0]], [[0, 1, 0, 0]]),  # padding continues no word
        ([[1, 1]], [[1, 1]], [[0, 0]]),
    ],
)
def test_the_first_word_ends_at_the_next_word_a_special_token_or_the_row(
    special: list[Any], starts: list[Any], expected: list[Any]
) -> None:
    first = _first_word(torch.tensor(special).bool(), torch.tensor(starts))
    assert torch.equal(first, torch.tensor(expected).bool())


def test_the_mask_equals_transformers_with_the_same_seed(tokenizer: Any) -> None:
    """transformers separates words at gaps between offsets, which is right here: the texts have no punctuation."""
    batch, _ = masked(MaskedLanguageModelling(whole_word_masking=True), tokenizer)
    whole = {"truncation": True, "max_length": 64, "padding": "max_length"}
    encoded = [tokenizer(text, return_offsets_mapping=True, **whole) for text in TEXTS]
    for row in encoded:
        special = tokenizer.get_special_tokens_mask(row["input_ids"], already_has_special_tokens=True)
        row["special_tokens_mask"] = special
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="Random token replacement is not supported with whole word masking"):
        collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15, whole_word_mask=True)
    expected = collator(encoded)
    assert torch.equal(batch["labels"], expected["labels"])
    assert torch.equal(batch["input_ids"], expected["input_ids"])


def packed(whole_words: bool) -> tuple[Any, Any]:
    """Return the dataloaders of packed built-in reviews, and the tokenizer."""
    config = DataConfig(
        source="builtin", train_samples=30, eval_samples=12, length_scale=0.2, tokenizer="wordpiece", vocab_size=200,
        max_length=32, batch_size=4,
    )  # fmt: skip
    task = MaskedLanguageModelling(packing=True, whole_word_masking=whole_words)
    data = build_data(config, task, model_name="", on_gpu=False)
    return data, data.tokenizer


@pytest.mark.parametrize("whole_words", [False, True])
def test_packed_rows_are_full_and_contain_every_token_in_order(whole_words: bool) -> None:
    data, tokenizer = packed(whole_words)
    for spec, split, count in ((data.train, "train", 30), (data.eval, "eval", 12)):
        rows = spec.dataloader.dataset
        texts = builtin_reviews(count, 17, split, 0.2)["text"]
        expected = [i for text in texts for i in tokenizer(text, verbose=False)["input_ids"]]
        assert len(expected) > 32 * count, "texts are longer than a row and are not truncated"
        assert rows.lengths[:-1].tolist() == [32] * (len(expected) // 32)
        assert rows.lengths.sum() == len(expected)
        tokens = rows.__getitems__(range(len(rows))).tokens
        assert tokens["input_ids"].tolist() == expected
        if whole_words:
            starts = [i == 0 or word is None or word != before
                      for words in (tokenizer(text, verbose=False).word_ids() for text in texts)
                      for i, (word, before) in enumerate(zip(words, [None, *words], strict=False))]  # fmt: skip
            assert tokens["word_starts"].tolist() == starts
    batches = list(data.train.dataloader)
    drawn = sum(int(batch["attention_mask"].sum()) for batch in batches)
    assert drawn == data.train.dataloader.dataset.lengths.sum(), "an epoch contains every token"
    assert sum(not bool(batch["attention_mask"].all()) for batch in batches) <= 1, "only the last row is shorter"


@pytest.mark.supports("resume", "export", task="mlm")
def test_a_run_reports_the_perplexity_of_its_export_and_resumes_exactly() -> None:
    settings = [*OPTIONS, "trainer.max_duration=6ba", "checkpoint.interval=3ba"]
    settings += ["model.dropout=0.1", "algorithms.sdpa_attention=null", "algorithms.unpadding={}"]
    settings += ["algorithms.fused_layers={}", "data.eval_batch_size=4"]
    whole = assert_resumes_exactly(*settings, checkpoints=["ep0-ba3"])
    assert whole["throughput"]["padding_fraction"] < 0.05

    config = DataConfig(
        source="builtin", length_scale=0.12, train_samples=48, eval_samples=16, tokenizer="wordpiece", vocab_size=400,
        max_length=48, padding="longest", batch_size=8, eval_batch_size=4,
    )  # fmt: skip
    task = MaskedLanguageModelling(packing=True, whole_word_masking=True)
    data = build_data(config, task, model_name="", on_gpu=False)
    assert data.eval is not None
    model = AutoModelForMaskedLM.from_pretrained("runs/whole/model").eval()
    total, count, right = 0.0, 0, 0
    with torch.no_grad():
        for batch in data.eval.dataloader:
            labels = batch.pop("labels")
            logits = model(**batch).logits
            total += float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
            count += int((labels != -100).sum())
            right += int((logits.argmax(-1) == labels).sum())
    metrics = whole["metrics"]
    assert metrics["loss"] == pytest.approx(total / count, rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert metrics["accuracy"] == pytest.approx(right / count, rel=1e-5)


@pytest.mark.exhaustive
def test_two_ranks_train_on_packed_rows() -> None:
    settings = [*OPTIONS, "trainer.max_duration=2ba", "data.drop_last=true"]
    metrics, _ = on_ranks(lambda: run(*settings)["metrics"])
    assert_near([math.exp(metrics["loss"])], [metrics["perplexity"]], what="perplexity")


def test_whole_words_need_a_fast_tokenizer() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(ConfigError, match=r"data.whole_word_masking needs a fast tokenizer"):
        MaskedLanguageModelling(whole_word_masking=True).encode({"text_1": ["a"]}, Slow(), 8)
