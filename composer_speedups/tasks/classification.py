"""Single-label classification of texts and pairs of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from composer_speedups.core.errors import ConfigError
from composer_speedups.packing.tokens import IGNORED
from composer_speedups.tasks.config import ModelConfig
from composer_speedups.tasks.labels import TaskWithClasses
from composer_speedups.tasks.metrics import BinaryF1, MacroF1, Matthews, MeanLoss

__all__ = ["Classification"]


@dataclass(kw_only=True)
class Classification(TaskWithClasses):
    """Classification with labels that are names or integers; cross entropy; accuracy, macro F1, Matthews
    correlation and, with two classes, F1 of the second.

    Attributes:
        label_smoothing: Probability that the loss spreads over all classes.
        class_weights: Weight of each class in the loss; None for equal weights.
    """

    label_smoothing: float = ModelConfig.label_smoothing
    class_weights: Sequence[float] | None = None

    name = "classification"
    trains_on_random_tokens = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._weights: dict[torch.device, Tensor] = {}

    @property
    def classes(self) -> list[str]:
        return super().classes or ["0", "1"]  # two for rows of random tokens, which do not name classes

    def label(self, value: Any, where: str) -> int:
        return self.class_of(value, where)

    def head_settings(self) -> dict[str, Any]:
        names = self.classes
        if self.class_weights is not None and len(self.class_weights) != len(names):
            raise ConfigError(
                f"model.class_weights has {len(self.class_weights)} values for {len(names)} classes "
                f"({', '.join(names)}); set one per class, in this order"
            )
        # transformers would set it in the first forward pass, and torch.compile would then recompile.
        return {"problem_type": "single_label_classification", **super().head_settings()}

    def outputs(self, model: Any, batch: dict[str, Any]) -> Any:
        if self._has_own_loss():
            batch = {key: value for key, value in batch.items() if key != "labels"}
        return model(**batch)

    def loss(self, outputs: Any, batch: Mapping[str, Any]) -> Any:
        if not self._has_own_loss():
            return outputs["loss"]
        logits_RK = outputs["logits"].float()
        weights_K = self._weights_on(logits_RK.device)
        return F.cross_entropy(logits_RK, batch["labels"], weights_K, label_smoothing=self.label_smoothing)

    @property
    def weights_losses(self) -> bool:
        return self.class_weights is not None

    def loss_weight(self, batch: Mapping[str, Any]) -> float:
        """The sum of the samples' class weights."""
        labels_R = batch["labels"]
        weights_K = self._weights_on(labels_R.device)
        assert weights_K is not None
        return float(weights_K[labels_R[labels_R != IGNORED]].sum(dtype=torch.float64))

    def metrics(self, *, training: bool) -> dict[str, Metric]:
        classes = len(self.classes)
        # torch's check of the labels, which the data's own check makes unnecessary, would synchronize at each batch.
        metrics: dict[str, Metric] = {
            "MulticlassAccuracy": MulticlassAccuracy(num_classes=classes, average="micro", validate_args=False),
            # Composer's CrossEntropy averages over batches, regardless of how many samples the last one has.
            "CrossEntropy": MeanLoss(F.cross_entropy),
        }
        if not training:
            metrics |= {"MacroF1": MacroF1(classes), "MatthewsCorrelation": Matthews(classes)}
            if classes == 2:
                metrics["BinaryF1"] = BinaryF1(classes)
        return metrics

    def predictions(self, logits: Tensor, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        rows = [dict(zip(self.classes, row_K, strict=True)) for row_K in logits.float().softmax(-1).tolist()]
        best = [max(row, key=row.__getitem__) for row in rows]
        return [
            {"label": label, "probability": row[label], "probabilities": row}
            for label, row in zip(best, rows, strict=True)
        ]

    def _has_own_loss(self) -> bool:
        return self.class_weights is not None or self.label_smoothing > 0

    def _weights_on(self, device: torch.device) -> Tensor | None:
        """The class weights, (K,). They are kept, because copying them to a GPU would wait for it at each batch."""
        if self.class_weights is None:
            return None
        if device not in self._weights:
            self._weights[device] = torch.tensor(self.class_weights, dtype=torch.float32, device=device)
        return self._weights[device]
