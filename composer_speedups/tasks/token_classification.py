"""Token classification: named entities, parts of speech."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from composer.metrics import LanguageCrossEntropy, MaskedAccuracy
from torch import Tensor
from torchmetrics import Metric

from composer_speedups.core.errors import ConfigError, DataError
from composer_speedups.packing.rows import IGNORED
from composer_speedups.tasks.labels import TaskWithClasses
from composer_speedups.tasks.metrics import EntityF1
from composer_speedups.tasks.settings import TokenClassificationSettings
from composer_speedups.tasks.task import shown


class TokenClassification(TokenClassificationSettings, TaskWithClasses):
    """A tag per word. Cross entropy over labelled tokens; F1 of whole entities.

    With ``label_all_pieces``, the further pieces of a word with a ``B-`` tag get its ``I-`` tag.
    """

    auto_class = "AutoModelForTokenClassification"
    loss_per_token = True

    def text(self, row: Mapping[str, Any], column: str, where: str) -> list[str]:
        """The words of a sample: a list of words, or text, which is split at whitespace."""
        words = row.get(column)
        if isinstance(words, str) and words[:2] not in ("['", '["'):  # otherwise a list that is written as text
            words = words.split()
        if not isinstance(words, (list, tuple)) or not words or not all(isinstance(word, str) for word in words):
            raise DataError(f"{where}: {column} is {shown(row.get(column))}", fix="every sample needs words")
        tags = row.get(str(self.label_column))
        if isinstance(tags, (list, tuple)) and len(tags) != len(words):
            raise DataError(f"{where}: {len(words)} words in {column}, and {len(tags)} tags in {self.label_column}")
        return list(words)

    def label(self, value: Any, where: str) -> list[int]:
        return self.classes_of(value, where, "a list of tags, one per word")

    def classes_in(self, label: Sequence[int]) -> Iterable[int]:
        return {*label}

    def best_constant(self, labels: Sequence[Sequence[int]]) -> dict[str, Any]:
        return self.most_frequent(tag for row in labels for tag in row if tag != IGNORED)

    def encode(self, examples: Mapping[str, list[Any]], tokenizer: Any, max_length: int) -> dict[str, list[Any]]:
        """Token ids and the label of every token. Without tags, the first piece of each word has the word's index."""
        if not tokenizer.is_fast:
            raise ConfigError(
                "data.tokenizer: task token_classification needs a fast tokenizer, which maps word pieces to words"
            )
        encoded = tokenizer(examples["text_1"], is_split_into_words=True, truncation=True, max_length=max_length)
        word_ids = [encoded.word_ids(row) for row in range(len(examples["text_1"]))]
        tags = examples.get("labels", [None] * len(word_ids))
        aligned = [self._aligned(ids, row) for ids, row in zip(word_ids, tags, strict=True)]
        return {"input_ids": encoded["input_ids"], "token_labels": aligned}

    def _aligned(self, word_of: list[int | None], tags: list[int] | None) -> list[int]:
        """The label of each token: its word's tag, or its word's index without tags."""
        labels: list[int] = []
        for word, before in zip(word_of, [None, *word_of], strict=False):
            if word is None:
                labels.append(IGNORED)
            elif word != before:
                labels.append(word if tags is None else tags[word])
            else:
                labels.append(self._continued(tags[word]) if tags and self.label_all_pieces else IGNORED)
        return labels

    def _continued(self, tag: int) -> int:
        names = self.classes
        inside = f"I-{names[tag][2:]}"
        return names.index(inside) if names[tag].startswith("B-") and inside in names else tag

    def metrics(self, *, training: bool) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {
            "MaskedAccuracy": MaskedAccuracy(),
            "LanguageCrossEntropy": LanguageCrossEntropy(),
        }
        names = self.classes
        if not training and any(name.startswith(("B-", "I-")) for name in names):
            if importlib.util.find_spec("seqeval") is None:
                raise ConfigError(
                    "model.task: the F1 of token_classification needs seqeval; pip install '.[ner]' in a clone"
                )
            metrics["EntityF1"] = EntityF1(names)
        return metrics

    def predictions(self, logits: Tensor, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The tag of each word that has a first piece within the maximum length, with the words' indices."""
        names = self.classes
        best_RS, probability_RS = (x.cpu() for x in reversed(logits.float().softmax(-1).max(-1)))
        words_RS = batch["labels"].cpu()
        return [
            {
                "words": words_RS[row][held].tolist(),
                "tags": [names[i] for i in best_RS[row][held].tolist()],
                "probabilities": probability_RS[row][held].tolist(),
            }
            for row, held in enumerate(words_RS != IGNORED)
        ]

    def with_text(self, prediction: dict[str, Any], texts: Sequence[Any]) -> dict[str, Any]:
        """All words of the sample, each with its tag and probability; both are None for a word that has none."""
        (words,) = texts
        of_word = {word: i for i, word in enumerate(prediction["words"])}
        places = [of_word.get(word) for word in range(len(words))]
        values = {key: prediction[key] for key in ("tags", "probabilities")}
        return {"words": words, **{k: [None if i is None else v[i] for i in places] for k, v in values.items()}}
