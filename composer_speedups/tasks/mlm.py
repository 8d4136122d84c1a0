"""Masked language modelling.

Shapes: R rows, S token positions.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from composer.metrics import LanguageCrossEntropy, LanguagePerplexity, MaskedAccuracy
from torchmetrics import Metric
from transformers import DataCollatorForLanguageModeling

from composer_speedups.core.errors import ConfigError
from composer_speedups.tasks.settings import MLMSettings
from composer_speedups.tasks.task import Task

_MAX_DRAWS = 100  # of a batch's mask, as long as it masks no token


class MaskedLanguageModelling(MLMSettings, Task):
    """Predict masked tokens. The loss is the mean over these tokens; the metrics are their accuracy and perplexity.

    Whole words are replaced by the mask token. Otherwise, of the chosen tokens, 80% are replaced by the mask token, 10%
    by random tokens, and 10% are not changed.
    """

    auto_class = "AutoModelForMaskedLM"
    loss_per_token = True

    def encode(self, examples: Mapping[str, list[Any]], tokenizer: Any, max_length: int) -> dict[str, list[Any]]:
        if self.whole_word_masking and not tokenizer.is_fast:
            raise ConfigError("data.whole_word_masking needs a fast tokenizer, which maps word pieces to words")
        truncation = {"truncation": False} if self.packing else {"truncation": True, "max_length": max_length}
        encoded = tokenizer(examples["text_1"], verbose=False, **truncation)
        columns = {"input_ids": encoded["input_ids"]}
        if self.whole_word_masking:  # 1 for the first piece of a word and for special tokens, 0 for the other pieces
            words = [encoded.word_ids(row) for row in range(len(columns["input_ids"]))]
            columns["word_starts"] = [
                [int(i == 0 or w is None or w != row[i - 1]) for i, w in enumerate(row)] for row in words
            ]
        return columns

    def arranged(self, rows: Any, max_length: int, *, training: bool) -> Any:
        return rows.packed(max_length) if self.packing else rows

    def collator(self, pad: Any, tokenizer: Any, *, training: bool) -> MaskTokens:
        return MaskTokens(pad, tokenizer, self.mlm_probability, whole_words=self.whole_word_masking, fixed=not training)

    def metrics(self, *, training: bool) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {
            "MaskedAccuracy": MaskedAccuracy(),
            "LanguageCrossEntropy": LanguageCrossEntropy(),
        }
        return metrics if training else {**metrics, "LanguagePerplexity": LanguagePerplexity()}


class MaskTokens:
    """A collator that masks tokens of a padded batch and adds ``labels``, -100 for tokens that are not masked;
    ``fixed`` masks the same row in the same way each time, and does not change the random state of training."""

    def __init__(
        self, pad: Any, tokenizer: Any, probability: float, *, whole_words: bool = False, fixed: bool = False
    ) -> None:
        self.pad, self.whole_words, self.fixed = pad, whole_words, fixed
        # With whole words, transformers uses the mask token only, and would warn about its default.
        replace: dict[str, Any] = {"mask_replace_prob": 1.0, "random_replace_prob": 0.0} if whole_words else {}
        self.collator = DataCollatorForLanguageModeling(
            tokenizer, mlm=True, mlm_probability=probability, whole_word_mask=whole_words, **replace
        )
        self._special = np.array(tokenizer.all_special_ids)

    def __call__(self, rows: Any) -> dict[str, torch.Tensor]:
        batch = self.pad(rows)
        word_starts = batch.pop("word_starts") if self.whole_words else None
        ids = batch["input_ids"]
        special = torch.from_numpy(np.isin(ids.numpy(), self._special))
        if self.fixed:
            masked, labels = ids.clone(), torch.full_like(ids, -100)
            for row, length in enumerate(batch["attention_mask"].sum(-1).tolist()):
                part = slice(row, row + 1), slice(length)
                self.collator.generator = torch.Generator().manual_seed(zlib.crc32(ids[part].numpy().tobytes()))
                starts = None if word_starts is None else word_starts[part]
                masked[part], labels[part] = self._draw(ids[part], special[part], starts)
        else:
            masked, labels = self._draw(ids, special, word_starts)
        return {**batch, "input_ids": masked, "labels": labels}

    def _draw(
        self, ids_RS: torch.Tensor, special_RS: torch.Tensor, word_starts_RS: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The masked ids and the labels, both (R, S)."""
        offsets_RS2 = None
        if word_starts_RS is not None:  # a piece that continues a word begins where the previous one ends
            starts_RS = torch.arange(word_starts_RS.shape[1]) + word_starts_RS.cumsum(-1)
            offsets_RS2 = torch.stack([starts_RS, starts_RS + 1], dim=-1)
        for _ in range(_MAX_DRAWS):
            masked_RS, labels_RS = self.collator.torch_mask_tokens(ids_RS.clone(), special_RS, offsets_RS2)
            if (labels_RS != -100).any():
                break
        return masked_RS, labels_RS
