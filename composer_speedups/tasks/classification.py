"""Single-label classification of texts and pairs of texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from composer_speedups.core.errors import ConfigError, did_you_mean
from composer_speedups.packing.rows import IGNORED
from composer_speedups.tasks.labels import TaskWithClasses
from composer_speedups.tasks.metrics import BinaryF1, MacroF1, Matthews, MeanLoss
from composer_speedups.tasks.settings import ClassificationSettings


class Classification(ClassificationSettings, TaskWithClasses):
    """Classification with labels that are names or integers; cross entropy; accuracy, macro F1, Matthews
    correlation and, with two classes, F1 of the second.

    ``class_weights: balanced`` is the number of training samples divided by the number of classes and by the class's
    own samples, as in scikit-learn; :meth:`learn_frequencies` counts them.
    """

    def reset(self) -> None:
        super().reset()
        self._balanced: list[float] | None = None
        self._weights: dict[torch.device, Tensor] = {}

    @property
    def classes(self) -> list[str]:
        return super().classes or ["0", "1"]  # two for rows of random tokens, which do not name classes

    def label(self, value: Any, where: str) -> int:
        return self.class_of(value, where)

    def best_constant(self, labels: Sequence[int]) -> dict[str, Any]:
        return self.most_frequent(labels)

    def learn_frequencies(self, labels: Sequence[int]) -> None:
        if not isinstance(self.class_weights, str):
            return
        counts = Counter(labels)
        classes = range(len(self.classes))
        self._balanced = [counts.total() / (len(counts) * counts[k]) if k in counts else 1.0 for k in classes]
        self._weights = {}

    def weights(self) -> list[float] | None:
        """The weight of each class, in their order; None for equal weights.

        Raises:
            ConfigError: ``class_weights`` does not fit the classes, or is balanced before the labels are known.
        """
        weights, names = self.class_weights, self.classes
        if isinstance(weights, str):
            if self._balanced is None:
                raise ConfigError(
                    "model.class_weights: balanced needs the labels of the training samples; call "
                    "task.learn_frequencies(labels), or give the weights by class name"
                )
            return self._balanced
        if isinstance(weights, Mapping):
            by_name = {str(name): weight for name, weight in weights.items()}
            if unknown := [name for name in by_name if name not in names]:
                raise ConfigError(f"model.class_weights has no class {unknown[0]!r}{did_you_mean(unknown[0], names)}")
            return [by_name.get(name, 1.0) for name in names]
        if weights is not None and len(weights) != len(names):
            raise ConfigError(
                f"model.class_weights has {len(weights)} values for {len(names)} classes ({', '.join(names)}); set one "
                f"per class, in this order, or by name, as in {{{names[-1]}: 3.0}}"
            )
        return weights

    def head_settings(self) -> dict[str, Any]:
        self.weights()  # checks them
        # transformers would set it in the first forward pass, and torch.compile would then recompile.
        return {"problem_type": "single_label_classification", **super().head_settings()}

    def outputs(self, model: Any, batch: dict[str, Any]) -> Any:
        if self._has_own_loss:
            batch = {key: value for key, value in batch.items() if key != "labels"}
        return model(**batch)

    def loss(self, outputs: Any, batch: Mapping[str, Any]) -> Any:
        if not self._has_own_loss:
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
        # torch's check of the labels, which the data's own check makes unnecessary, would synchronize at each batch, as
        # ignored labels do, which only training has.
        settings: dict[str, Any] = {"validate_args": False, "ignore_index": IGNORED if training else None}
        metrics: dict[str, Metric] = {
            "MulticlassAccuracy": MulticlassAccuracy(num_classes=classes, average="micro", **settings),
            # Composer's CrossEntropy averages over batches, regardless of how many samples the last one has.
            "CrossEntropy": MeanLoss(F.cross_entropy),
        }
        if not training:
            metrics |= {"MacroF1": MacroF1(classes, self.classes), "MatthewsCorrelation": Matthews(classes)}
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

    @property
    def _has_own_loss(self) -> bool:
        return self.weights_losses or self.label_smoothing > 0

    def _weights_on(self, device: torch.device) -> Tensor | None:
        """The class weights, (K,). They are kept, because copying them to a GPU would wait for it at each batch."""
        if self.weights_losses and device not in self._weights:
            self._weights[device] = torch.tensor(self.weights(), dtype=torch.float32, device=device)
        return self._weights.get(device)
