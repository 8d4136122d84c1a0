"""Masked language modelling."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from composer.metrics import LanguageCrossEntropy, LanguagePerplexity, MaskedAccuracy
from torchmetrics import Metric
from transformers import DataCollatorForLanguageModeling

from composer_speedups.core.errors import ConfigError
from composer_speedups.tasks.task import Task

__all__ = ["MaskTokens", "MaskedLanguageModelling"]

_DRAWS = 20  # number of attempts to draw at least one token to mask


@dataclass(kw_only=True)
class MaskedLanguageModelling(Task):
    """Predict masked tokens; the loss is the mean over them; accuracy and perplexity.

    Attributes:
        mlm_probability: Fraction of the tokens (or words) that are masked.
        whole_word_masking: Mask all pieces of a word together, all by the mask token. Otherwise a tenth of the masked
            tokens is kept, and a tenth replaced by random ones.
        packing: Concatenate the texts and cut them into rows of the maximum length.
    """

    mlm_probability: float = 0.15
    whole_word_masking: bool = False
    packing: bool = False

    name = "mlm"
    default_label = None
    most_texts = 1
    auto_class = "AutoModelForMaskedLM"
    loss_per_token = True

    def encode(self, examples: Mapping[str, list[Any]], tokenizer: Any, max_length: int) -> dict[str, list[Any]]:
        if self.whole_word_masking and not tokenizer.is_fast:
            raise ConfigError("data.whole_word_masking needs a fast tokenizer, which maps word pieces to words")
        limit = {"truncation": False} if self.packing else {"truncation": True, "max_length": max_length}
        encoded = tokenizer(examples["text_1"], verbose=False, **limit)
        found = {"input_ids": encoded["input_ids"]}
        if self.whole_word_masking:
            words = [encoded.word_ids(row) for row in range(len(found["input_ids"]))]
            found["word_starts"] = [
                [int(i == 0 or w is None or w != row[i - 1]) for i, w in enumerate(row)] for row in words
            ]
        return found

    def arranged(self, rows: Any, max_length: int, *, training: bool) -> Any:
        return rows.packed(max_length) if self.packing else rows

    def collator(self, pad: Any, tokenizer: Any, *, training: bool) -> MaskTokens:
        return MaskTokens(pad, tokenizer, self.mlm_probability, whole_words=self.whole_word_masking, fixed=not training)

    def metrics(self, *, training: bool) -> dict[str, Metric]:
        found: list[Metric] = [MaskedAccuracy(), LanguageCrossEntropy()]
        if not training:
            found.append(LanguagePerplexity())
        return {type(metric).__name__: metric for metric in found}


class MaskTokens:
    """Add ``labels`` for masked language modelling, (rows, length), to a padded batch; -100 for tokens that are not
    masked. If the draw masks nothing, the first token (or word) is masked, because the batch would have no loss.

    Args:
        pad: Creates the batch, with ``word_starts`` if whole words are masked.
        tokenizer: Defines the mask token and the special tokens, which are never masked.
        probability: Fraction of the tokens to mask.
        whole_words: Mask all pieces of a word together.
        fixed: Mask the same batch in the same way each time, so that evaluations are comparable, and do not change the
            random state of training.
    """

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
        if self.fixed:
            seed = zlib.crc32(batch["input_ids"].numpy().tobytes())
            self.collator.generator = torch.Generator().manual_seed(seed)
        special = torch.from_numpy(np.isin(batch["input_ids"].numpy(), self._special))
        starts = batch.pop("word_starts") if self.whole_words else None
        offsets = None if starts is None else _offsets(starts)
        for _ in range(_DRAWS):  # a batch without a masked token has no loss
            ids, labels = self.collator.torch_mask_tokens(batch["input_ids"].clone(), special, offsets)
            if (labels != -100).any():
                break
        else:  # a small probability, or few tokens
            for row, slot in (~special).nonzero()[:1].tolist():  # empty if all tokens are special
                end = slot + 1
                while starts is not None and end < ids.shape[1] and not starts[row, end] and not special[row, end]:
                    end += 1
                labels[row, slot:end] = batch["input_ids"][row, slot:end]
                ids[row, slot:end] = self.collator.tokenizer.mask_token_id
        return {**batch, "input_ids": ids, "labels": labels}


def _offsets(word_starts_RS: torch.Tensor) -> torch.Tensor:
    """Token offsets, (R, S, 2), in which a piece that continues a word begins where the previous piece ends."""
    starts_RS = torch.arange(word_starts_RS.shape[1]) + word_starts_RS.cumsum(-1)
    return torch.stack([starts_RS, starts_RS + 1], dim=-1)
