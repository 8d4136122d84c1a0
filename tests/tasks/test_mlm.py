"""Masked language modelling: masks, packing, techniques with a tied head, perplexity, export, and resuming."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM, DataCollatorForLanguageModeling

from composer_speedups.core.errors import Refusal
from composer_speedups.data.builtin import builtin_reviews
from composer_speedups.data.flat import Ragged
from composer_speedups.data.loader import Pad, build_data
from composer_speedups.tasks.mlm import MaskedLanguageModelling
from composer_speedups.tasks.settings import DataConfig
from tests.helpers.common import make_trainer, plain_batches, trained
from tests.helpers.jobs import assert_resumes_exactly
from tests.helpers.models import fit_batches, tiny_model
from tests.helpers.settings import Case, cases
from tests.helpers.texts import sentence, tokenizer_of

# Composer warns about batches shorter than the usual size.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot split .* of length:UserWarning")
TEXTS = [sentence(random.Random(i), 4, 20) for i in range(400)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Return a tokenizer that is trained on other texts, so that most words have several pieces."""
    return tokenizer_of(builtin_reviews(20, 0, "train", 0.1)["text"])


def is_tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def reviews(**settings: Any) -> DataConfig:
    return DataConfig(source="builtin", tokenizer="wordpiece", **settings)


def test_evaluation_always_masks_the_same_tokens_and_training_does_not() -> None:
    config = reviews(train_samples=40, eval_samples=24, length_scale=0.1, vocab_size=300, max_length=32, batch_size=8)
    data = build_data(config, MaskedLanguageModelling(), model_name="unused", on_gpu=False)
    drew, passes = [], []
    for loader in (data.eval, data.train):
        batches = iter(loader.dataloader)  # draws one random number, the workers' base seed
        state = torch.get_rng_state()
        first = list(batches)
        drew.append(not torch.equal(torch.get_rng_state(), state))
        passes.append((first, list(loader.dataloader)))
    evaluation, training = passes
    assert drew == [False, True]
    torch.testing.assert_close(evaluation[0], evaluation[1], rtol=0, atol=0)
    masks = [batch["labels"] != -100 for batch in evaluation[0]]
    assert not torch.equal(masks[0], masks[1]), "batches have different masks"
    real = sum(int(batch["attention_mask"].sum()) for batch in evaluation[0])
    assert 0.08 < sum(int(mask.sum()) for mask in masks) / real < 0.22
    assert not all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(*training, strict=True))


def test_a_batch_is_drawn_again_until_a_token_is_masked(tokenizer: Any) -> None:
    task = MaskedLanguageModelling(mlm_probability=0.2)
    for training in (True, False):
        collate = task.collator(Pad(0, 8, longest=True), tokenizer, training=training)
        for _ in range(30):
            batch = collate(Ragged.of(task.encode({"text_1": ["a"]}, tokenizer, 8)))
            assert (batch["labels"] != -100).any()


def test_the_mask_equals_transformers_with_the_same_seed(tokenizer: Any) -> None:
    """transformers separates words at gaps between offsets, which is right here: the texts have no punctuation."""
    task = MaskedLanguageModelling(whole_word_masking=True)
    torch.manual_seed(0)
    collate = task.collator(Pad(tokenizer.pad_token_id, 64, longest=False), tokenizer, training=True)
    batch = collate(Ragged.of(task.encode({"text_1": TEXTS}, tokenizer, 64)))
    assert set(batch) == {"input_ids", "attention_mask", "labels", "_row_lengths"}
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


@pytest.mark.parametrize("whole_words", [False, True])
def test_packed_rows_are_full_and_contain_every_token_in_order(whole_words: bool) -> None:
    task = MaskedLanguageModelling(packing=True, whole_word_masking=whole_words)
    config = reviews(train_samples=30, eval_samples=12, length_scale=0.2, vocab_size=200, max_length=32, batch_size=4)
    data = build_data(config, task, model_name="", on_gpu=False)
    for spec, split, count in ((data.train, "train", 30), (data.eval, "eval", 12)):
        rows = spec.dataloader.dataset
        texts = builtin_reviews(count, 17, split, 0.2)["text"]
        encoded = [data.tokenizer(text, verbose=False) for text in texts]
        expected = [i for text in encoded for i in text["input_ids"]]
        assert len(expected) > 32 * count, "texts are longer than a row and are not truncated"
        assert rows.lengths[:-1].tolist() == [32] * (len(expected) // 32)
        assert rows.lengths.sum() == len(expected)
        tokens = rows.__getitems__(range(len(rows))).tokens
        assert tokens["input_ids"].tolist() == expected
        if whole_words:
            starts = [i == 0 or word is None or word != text.word_ids()[i - 1]
                      for text in encoded for i, word in enumerate(text.word_ids())]  # fmt: skip
            assert tokens["word_starts"].tolist() == starts
    batches = list(data.train.dataloader)
    drawn = sum(int(batch["attention_mask"].sum()) for batch in batches)
    assert drawn == data.train.dataloader.dataset.lengths.sum(), "an epoch contains every token"
    assert sum(not bool(batch["attention_mask"].all()) for batch in batches) <= 1, "only the last row is shorter"


@pytest.mark.supports("resume", "export", task="mlm")
def test_a_run_reports_the_perplexity_of_its_export_and_resumes_exactly() -> None:
    settings = ["model.task=mlm", "data.whole_word_masking=true", "data.packing=true", "trainer.max_duration=6ba"]
    settings += ["model.dropout=0.1", "algorithms.sdpa_attention=null", "algorithms.unpadding={}"]
    settings += ["algorithms.fused_layers={}", "data.eval_batch_size=4", "checkpoint.interval=3ba"]
    whole = assert_resumes_exactly(*settings, checkpoints=["ep0-ba3"])
    assert whole["throughput"]["padding_fraction"] < 0.05

    config = reviews(
        length_scale=0.12, train_samples=48, eval_samples=16, vocab_size=400, max_length=48, padding="longest",
        batch_size=8, eval_batch_size=4,
    )  # fmt: skip
    task = MaskedLanguageModelling(packing=True, whole_word_masking=True)
    data = build_data(config, task, model_name="", on_gpu=False)
    model = AutoModelForMaskedLM.from_pretrained("runs/whole/model").eval()
    assert is_tied(model)
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


@pytest.mark.parametrize("case", cases())
def test_every_technique_trains_a_masked_lm_and_keeps_its_head_tied(case: Case) -> None:
    model: Any = tiny_model("bert", "mlm")
    assert is_tied(model)
    *others, technique = case.build_all()
    if technique.name == "layer_freezing":  # the embeddings that it freezes are the head's, too
        with pytest.raises(Refusal, match="is tied to the embeddings and would be frozen"):
            make_trainer([*others, technique], model=model)
        return
    trainer = trained([*others, technique], model=model, batches=fit_batches(model, plain_batches(2)))
    assert technique.engaged is True
    assert float(trainer.state.total_loss_dict["loss/train/total"]) < 10
    if case.entry.stock_checkpoint:
        assert is_tied(trainer.state.model.model)
