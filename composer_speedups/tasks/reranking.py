"""Reranking of documents by a cross-encoder, which reads query and document together."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.retrieval import RetrievalMRR, RetrievalNormalizedDCG

from composer_speedups.core.errors import DataError
from composer_speedups.core.files import write_json
from composer_speedups.tasks.metrics import MeanLoss
from composer_speedups.tasks.settings import RerankingSettings
from composer_speedups.tasks.task import Example, Task, joined, shown


class Reranking(RerankingSettings, Task):
    """Relevance of a document for a query; MRR@10 and NDCG@10 over the documents of each query.

    The losses are binary cross entropy on labels between 0 and 1 (``bce``), or RankNet's loss on a document and another
    one of the same query with a lower label (``pairwise``).

    Source: passage re-ranking with BERT, arXiv 1901.04085; RankNet, Burges et al., ICML 2005.
    """

    groups_samples = True

    def label(self, value: Any, where: str) -> float:
        label: float = super().label(value, where)
        if self.loss_name == "bce" and not 0 <= label <= 1:
            raise DataError(
                f"{where}: {self.label_column} is {shown(value)}",
                fix="with model.loss=bce every label must be between 0 and 1 (model.loss=pairwise accepts any number)",
            )
        return label

    def prepared(self, examples: list[Example], *, training: bool) -> list[Example]:
        """With the pairwise loss, pair each document except its query's best with a random better one.

        For evaluation, add ``query_id``, which is equal for equal queries.
        """
        if not training:
            numbers: dict[str, int] = {}
            return [
                {**example, "query_id": numbers.setdefault(example["text_1"], len(numbers))} for example in examples
            ]
        if self.loss_name != "pairwise":
            return examples
        rng = random.Random(0)
        pairs = []
        by_query = itemgetter("text_1")
        for query, group in groupby(sorted(examples, key=by_query), key=by_query):
            documents = list(group)
            for worse in documents:
                better = [document for document in documents if document["labels"] > worse["labels"]]
                if better:
                    texts = {"text_2": rng.choice(better)["text_2"], "text_3": worse["text_2"]}
                    pairs.append({"text_1": query, **texts})
        if not pairs:
            raise DataError(
                "data: no query has two documents with different labels, which model.loss=pairwise needs; use bce"
            )
        return pairs

    def encode(self, examples: Mapping[str, list[Any]], tokenizer: Any, max_length: int) -> dict[str, list[Any]]:
        if "text_3" not in examples:
            return super().encode(examples, tokenizer, max_length)
        sides = [
            self.tokens([examples["text_1"], examples[document]], tokenizer, max_length)
            for document in ("text_2", "text_3")
        ]
        return joined(sides)

    def head_settings(self) -> dict[str, Any]:
        return {"num_labels": 1}

    def outputs(self, model: Any, batch: dict[str, Any]) -> Any:
        ids = batch["input_ids"]
        flat = {key: x.flatten(0, -2) for key, x in batch.items() if key != "labels"}
        outputs = model(**flat)
        outputs["logits"] = outputs["logits"].reshape(*ids.shape[:-1], 1)
        return outputs

    def loss(self, outputs: Any, batch: Mapping[str, Any]) -> Any:
        logits = outputs["logits"].float().squeeze(-1)
        if logits.ndim == 2:  # (R, 2): a better and a worse document
            return F.softplus(logits[:, 1] - logits[:, 0]).mean()
        return F.binary_cross_entropy_with_logits(logits, batch["labels"])

    def metrics(self, *, training: bool) -> dict[str, Metric]:
        if training:
            return {}
        metrics: dict[str, Metric] = {
            "MRR@10": RetrievalMRR(top_k=10, empty_target_action="skip"),
            "NDCG@10": RetrievalNormalizedDCG(top_k=10, empty_target_action="skip"),
        }
        if self.loss_name == "bce":
            metrics["BinaryCrossEntropy"] = MeanLoss(F.binary_cross_entropy_with_logits)
        return metrics

    def update_metric(self, metric: Metric, logits: Tensor, labels: Tensor, batch: Mapping[str, Any]) -> None:
        scores = logits.float().reshape(-1)
        if isinstance(metric, MeanLoss):
            metric.update(scores, labels)
        else:
            graded = isinstance(metric, RetrievalNormalizedDCG)
            target = labels.clamp(min=0) if graded else (labels > 0).long()  # gains must not be negative
            # torchmetrics' MRR ignores documents with a score below 0; softplus is positive and keeps the order.
            metric.update(F.softplus(scores), target, indexes=batch["query_id"])

    def predictions(self, logits: Tensor, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        scores = logits.float().reshape(-1)
        if self.loss_name != "bce":
            return [{"score": score} for score in scores.tolist()]
        pairs = zip(scores.tolist(), scores.sigmoid().tolist(), strict=True)
        return [{"score": score, "probability": probability} for score, probability in pairs]

    def export(self, folder: Path, hidden: int, max_length: int) -> None:
        """Write the length to which sentence-transformers' CrossEncoder truncates pairs, which is that of training."""
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text())
        write_json(path, {**settings, "model_max_length": max_length})
