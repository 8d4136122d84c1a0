"""Embeddings of texts by a bi-encoder, as in sentence-transformers.

Shapes: R samples, N texts per sample, S slots per text, C candidates of all ranks, H hidden units.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist
from torch import Tensor
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchmetrics import Metric
from torchmetrics.regression import SpearmanCorrCoef

from composer_speedups.core.files import write_json
from composer_speedups.core.trainer_state import loss_ranks
from composer_speedups.packing.call import known_batch
from composer_speedups.tasks.metrics import Recall
from composer_speedups.tasks.settings import EmbeddingSettings
from composer_speedups.tasks.task import Task, joined


class Embedding(EmbeddingSettings, Task):
    """Text embeddings. A sample is an anchor, a positive and any number of negatives, or two texts and a score.

    The ``ranking`` loss trains each anchor to be closer to its positive than to every other positive and negative of
    the batch, over all ranks. False negatives are excluded per anchor: texts equal to the anchor or to its positive,
    and the positives of equal anchors. (A sample may be repeated so that all ranks have equally many.) The ``cosine``
    loss fits the cosine similarity of two texts to their score. Evaluation computes recall@1 and recall@10 among all
    positives, or Spearman correlation if there are scores.

    Sources: multiple negatives ranking loss, arXiv 1705.00652; Sentence-BERT, arXiv 1908.10084; gradient caching, arXiv
    2101.06983.
    """

    auto_class = "AutoModel"
    pools_real_tokens = True

    def encode(self, examples: Mapping[str, list[Any]], tokenizer: Any, max_length: int) -> dict[str, list[Any]]:
        texts = [values for key, values in examples.items() if key.startswith("text_")]
        tokens = joined([self.tokens([text], tokenizer, max_length) for text in texts])
        return tokens if "labels" not in examples else {**tokens, "labels": examples["labels"]}

    def model_arguments(self, kind: type) -> dict[str, Any]:
        # omit the pooler, which would be neither used nor trained
        return {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(kind).parameters else {}

    def outputs(self, model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
        """``logits``: unit vectors in float32, (R, N, H)."""
        names = ("input_ids", "attention_mask")
        texts: dict[str, Tensor] = {name: batch[name].flatten(0, -2) for name in names}
        if self.gradient_cache is None or not torch.is_grad_enabled():
            vectors = self._encode(model, texts)
        else:
            texts |= known_batch().lengths_of(texts["attention_mask"])
            each = zip(*(values.split(self.gradient_cache) for values in texts.values()), strict=True)
            chunks = [dict(zip(texts, chunk, strict=True)) for chunk in each]
            vectors = torch.cat([checkpoint(self._encode, model, chunk, use_reentrant=False) for chunk in chunks])
        return {"logits": vectors.reshape(*batch["input_ids"].shape[:-1], -1)}

    def _encode(self, model: Any, texts: Mapping[str, Tensor]) -> Tensor:
        hidden, mask = model(**texts)["last_hidden_state"].float(), texts["attention_mask"]
        if self.pooling == "cls":
            pooled = hidden[:, 0]
        else:
            real = mask.to(hidden.dtype)[..., None]
            pooled = (hidden * real).sum(1) / real.sum(1).clamp(min=1)
        return F.normalize(pooled, dim=-1)

    def loss(self, outputs: Any, batch: Mapping[str, Any]) -> Any:
        vectors = outputs["logits"]
        # In float32: bfloat16 has 8 significant bits, and dividing by the temperature amplifies the rounding error.
        with torch.autocast(vectors.device.type, enabled=False):
            if self.loss_name == "cosine":
                return F.mse_loss((vectors[:, 0] * vectors[:, 1]).sum(-1), batch["labels"])
            return self._ranking_loss(vectors, _text_keys(batch["input_ids"], batch["attention_mask"]))

    def _ranking_loss(self, vectors: Tensor, keys_RN: Tensor) -> Tensor:
        """The mean loss over this rank's anchors; DDP averages the gradients over ranks."""
        anchors, candidates = vectors[:, 0], vectors[:, 1:].transpose(0, 1).flatten(0, 1)  # positives precede negatives
        # For each candidate its own key, and the key of the anchor whose positive it is (0 for a negative).
        answered_RC = F.pad(keys_RN[:, :1], (0, keys_RN.shape[1] - 2))
        keys_C2 = torch.stack([keys_RN[:, 1:], answered_RC], dim=-1).transpose(0, 1).flatten(0, 1)
        first = 0
        if (ranks := loss_ranks()) > 1:
            first = dist.get_global_rank() * len(candidates)
            candidates = torch.cat(all_gather(candidates.contiguous()))
            gathered = [torch.empty_like(keys_C2) for _ in range(ranks)]
            torch.distributed.all_gather(gathered, keys_C2)
            keys_C2 = torch.cat(gathered)
        target_R = torch.arange(first, first + len(anchors), device=vectors.device)
        text_C, answered_C = keys_C2.unbind(-1)
        anchor_R1, positive_R1 = keys_RN[:, :1], keys_RN[:, 1:2]
        false_negative_RC = (text_C == anchor_R1) | (text_C == positive_R1) | (answered_C == anchor_R1)
        false_negative_RC &= torch.arange(len(candidates), device=target_R.device) != target_R[:, None]
        scores = anchors @ candidates.T / self.temperature
        return F.cross_entropy(scores.masked_fill(false_negative_RC, -torch.inf), target_R)

    def metrics(self, *, training: bool) -> dict[str, Metric]:
        if training:
            return {}
        if self.reads_label(training=False):
            return {"SpearmanCorrCoef": SpearmanCorrCoef()}
        return {"Recall@1": Recall(1), "Recall@10": Recall(10)}

    def update_metric(self, metric: Metric, logits: Tensor, labels: Tensor, batch: Mapping[str, Any]) -> None:
        if isinstance(metric, Recall):
            metric.update(logits[:, 0], logits[:, 1])
        else:
            metric.update((logits[:, 0] * logits[:, 1]).sum(-1), labels)

    def predictions(self, logits: Tensor, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{"embedding": vector} for vector in logits[:, 0].float().tolist()]

    def export(self, folder: Path, hidden: int, max_length: int) -> None:
        """Write the files from which sentence-transformers 3 and later load the folder."""
        paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
        files: dict[str, Any] = {
            "modules.json": [
                {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
                for i, (kind, path) in enumerate(paths.items())
            ],
            "1_Pooling/config.json": {
                "word_embedding_dimension": hidden,
                "pooling_mode_cls_token": self.pooling == "cls",
                "pooling_mode_mean_tokens": self.pooling == "mean",
                "pooling_mode_max_tokens": False,
                "pooling_mode_mean_sqrt_len_tokens": False,
            },
            "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
            "config_sentence_transformers.json": {
                "model_type": "SentenceTransformer",
                "prompts": {},
                "default_prompt_name": None,
                "similarity_fn_name": "cosine",
            },
        }
        (folder / "2_Normalize").mkdir(exist_ok=True)
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            write_json(folder / name, content)


def _text_keys(ids_RNS: Tensor, mask_RNS: Tensor) -> Tensor:
    """A number per text, (R, N), int64, equal for texts with the same real tokens, whatever their padding."""
    # The token ids' sum modulo 2**64 with a pseudo-random coefficient per position: other texts collide with 2**-60.
    position_RNS = mask_RNS.cumsum(-1)
    mixed = position_RNS * -0x61C8864680B583EB  # the multipliers of splitmix64 as signed integers
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 27)) * -0x6B2FB644ECCEEE15
    return ((ids_RNS + 1) * mask_RNS * mixed).sum(-1)
