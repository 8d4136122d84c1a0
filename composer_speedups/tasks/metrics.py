"""Losses and metrics over all ranks, and the metric names of reports and dashboards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from composer.core import State
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.classification import MultilabelF1Score
from torchmetrics.functional import pearson_corrcoef
from torchmetrics.utilities import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors

from composer_speedups.packing.rows import IGNORED

_CHUNK = 1024  # number of anchors compared at a time
_MOST_PAIRED = 100  # classes of a confusion matrix
_EQUAL = 1e-5  # cosine similarities that differ by less count as equal

_REPORTED_NAMES = {
    "MulticlassAccuracy": "accuracy",
    "CrossEntropy": "loss",
    "MaskedAccuracy": "accuracy",
    "LanguageCrossEntropy": "loss",
    "LanguagePerplexity": "perplexity",
    "MatthewsCorrelation": "matthews",
    "BinaryCrossEntropy": "loss",
    "BinaryF1": "binary_f1",
    "MicroF1": "micro_f1",
    "MacroF1": "macro_f1",
    "MeanAveragePrecision": "map",
    "MeanSquaredError": "loss",
    "RootMeanSquaredError": "rmse",
    "MeanAbsoluteError": "mae",
    "PearsonCorrCoef": "pearson",
    "SpearmanCorrCoef": "spearman",
    "EntityF1": "entity_f1",
    "MRR@10": "mrr@10",
    "NDCG@10": "ndcg@10",
    "Recall@1": "recall@1",
    "Recall@10": "recall@10",
}


def reported_name(logged: str) -> str:
    """The name in reports and dashboards of a metric that is logged as ``logged``; the same for an unknown one."""
    return _REPORTED_NAMES.get(logged, logged)


def loss_of(metrics: Mapping[str, Metric]) -> Metric | None:
    """The metric that is reported as ``loss``; None if a single sample has no loss."""
    return next((metric for name, metric in metrics.items() if reported_name(name) == "loss"), None)


def reported_values(values: Mapping[str, Any]) -> dict[str, float]:
    """The values of an evaluation's scalar metrics by their names in report.json."""
    return {reported_name(name): float(value) for name, value in values.items() if not getattr(value, "ndim", 0)}


def final_metrics(state: State) -> dict[str, float]:
    """The metrics of the last training batch (``train_``) and of the last evaluation. Collective."""
    metrics: dict[str, float] = {}
    if state.total_loss_dict:
        metrics["train_loss"] = float(state.total_loss_dict["loss/train/total"])
    for prefix, group in [("train_", state.train_metrics or {}), *(("", m) for m in state.eval_metrics.values())]:
        for name, value in computed(group).items():
            metrics.setdefault(prefix + name, value)
    return metrics


def computed(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The values of metrics by their names in reports, without those that were not updated. Collective."""
    return reported_values({k: metric.compute() for k, metric in metrics.items() if metric.update_called})


def gather_alike(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """``dist_sync_fn`` for tensors of one shape; torchmetrics' own waits for the GPU for each state of each batch."""
    gathered = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(gathered, tensor.contiguous(), group)
    return gathered


def gather_lists(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """``dist_sync_fn`` for samples. For a rank without samples, torchmetrics passes an empty float tensor."""
    kinds: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(kinds, (tensor.dtype, tensor.shape[1:]) if tensor.numel() else None, group)
    kind = next((kind for kind in kinds if kind is not None), None)
    if kind is not None and not tensor.numel():
        tensor = tensor.new_empty((0, *kind[1]), dtype=kind[0])
    return gather_all_tensors(tensor, group)


class ClassCounts(Metric):
    """How often each class is the true one, the predicted one, and both; torchmetrics' ``bincount`` would wait."""

    full_state_update = False
    counts: Tensor  # (3, K); a whole confusion matrix would take K² numbers

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.add_state("counts", default=torch.zeros(3, num_classes, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits_RK: Tensor, labels_R: Tensor) -> None:
        predicted_R = logits_RK.argmax(-1)
        true_K, predicted_K, hits_K = self.counts
        true_K.index_add_(0, labels_R, torch.ones_like(labels_R))
        predicted_K.index_add_(0, predicted_R, torch.ones_like(labels_R))
        hits_K.index_add_(0, labels_R, (labels_R == predicted_R).long())


class ByClass:
    """The counts by class that a metric keeps after :meth:`compute`, for reports."""

    names: list[str]  # of the K classes
    seen: Tensor | None = None  # ClassCounts.counts over all ranks
    confusion: Tensor | None = None  # how often each true class was predicted as each class, (K, K)


class MacroF1(ClassCounts, ByClass):
    """The mean of F1 over classes. Classes that occur neither as true nor as predicted class are ignored."""

    pairs: Tensor

    def __init__(self, num_classes: int, names: Sequence[str] | None = None) -> None:
        super().__init__(num_classes)
        self.names = list(names or map(str, range(num_classes)))
        size = num_classes if num_classes <= _MOST_PAIRED else 0
        self.add_state("pairs", default=torch.zeros(size, size, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits_RK: Tensor, labels_R: Tensor) -> None:
        super().update(logits_RK, labels_R)
        if len(self.pairs):
            pairs_R = labels_R * len(self.pairs) + logits_RK.argmax(-1)
            self.pairs.view(-1).index_add_(0, pairs_R, torch.ones_like(pairs_R))

    def compute(self) -> Tensor:
        self.seen, self.confusion = self.counts.clone(), self.pairs.clone() if len(self.pairs) else None
        true_K, predicted_K, hits_K = self.counts
        all_K = true_K + predicted_K
        return (2 * hits_K[all_K > 0] / all_K[all_K > 0]).mean()


class MultilabelMacroF1(MultilabelF1Score, ByClass):
    """torchmetrics' mean of F1 over labels, at a probability of 0.5."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(num_labels=len(names), average="macro", validate_args=False)
        self.names = list(names)

    def compute(self) -> Tensor:
        hits_K: Any = self.tp
        self.seen = torch.stack([hits_K + self.fn, hits_K + self.fp, hits_K])
        return super().compute()


class BinaryF1(ClassCounts):
    """F1 of the second of two classes, as in GLUE's MRPC and QQP; 0 if it is neither a true nor a predicted class."""

    def compute(self) -> Tensor:
        true, predicted, hits = self.counts[:, 1]
        return 2 * hits / (true + predicted).clamp(min=1)


class Matthews(ClassCounts):
    """Matthews correlation of any number of classes; 0 if all true or all predicted classes are the same."""

    def compute(self) -> Tensor:
        true_K, predicted_K, hits_K = self.counts.double()
        total, hits = true_K.sum(), hits_K.sum()
        spread = (total**2 - (predicted_K**2).sum()) * (total**2 - (true_K**2).sum())
        return ((hits * total - (true_K * predicted_K).sum()) / spread.sqrt().clamp(min=1)).float()


class MeanLoss(Metric):
    """The mean over samples of a loss that is averaged over each batch; MeanMetric waits at each batch."""

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.add_state("total", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", default=torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        count = len(labels) if labels.is_floating_point() else (labels != IGNORED).sum()
        self.total += self.function(logits.float(), labels) * count
        self.count += count

    def compute(self) -> Tensor:
        return self.total / self.count


class KeptPairs(Metric):
    """Base of metrics over all pairs of a prediction and its target, which are kept until the end of an evaluation."""

    full_state_update = False
    predicted: list[Tensor]
    expected: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("predicted", default=[], dist_reduce_fx="cat")
        self.add_state("expected", default=[], dist_reduce_fx="cat")

    def update(self, predicted_R: Tensor, expected_R: Tensor) -> None:
        self.predicted.append(predicted_R)
        self.expected.append(expected_R)

    def pairs(self) -> tuple[Tensor, Tensor]:
        return dim_zero_cat(self.predicted), dim_zero_cat(self.expected)


class Pearson(KeptPairs):
    """The Pearson correlation. torchmetrics' own merges running sums of the ranks, and is NaN if one has one sample."""

    def compute(self) -> Tensor:
        return pearson_corrcoef(*(values.double() for values in self.pairs())).float()


class EntityF1(KeptPairs):
    """Micro-averaged F1 of whole entities as in CoNLL-2003, computed by seqeval."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = list(names)

    def update(self, logits_RSK: Tensor, labels_RS: Tensor) -> None:
        # One list for all sentences; -1 separates two of them, because entities do not continue across sentences.
        held_RS = F.pad(labels_RS != IGNORED, (0, 1), value=True)
        tags_RS = logits_RSK.argmax(-1)
        super().update(*(F.pad(ids_RS, (0, 1), value=-1)[held_RS] for ids_RS in (tags_RS, labels_RS)))

    def compute(self) -> Tensor:
        from seqeval.metrics import f1_score

        predicted, expected = ([self.names[i] if i >= 0 else "O" for i in ids.tolist()] for ids in self.pairs())
        return torch.tensor(f1_score([expected], [predicted], zero_division=0))


class Recall(KeptPairs):
    """The fraction of anchors whose positive is among the ``k`` nearest of all positives, for unit vectors (R, H)."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def compute(self) -> Tensor:
        # In float64, because TF32 and autocast would make equal texts differ by more than _EQUAL.
        anchors, positives = (vectors.double() for vectors in self.pairs())
        found = torch.zeros((), device=anchors.device)
        for chunk, own in zip(anchors.split(_CHUNK), positives.split(_CHUNK), strict=True):
            nearer = chunk @ positives.T > (chunk * own).sum(-1, keepdim=True) + _EQUAL
            found += (nearer.sum(-1) < self.k).sum()
        return found / len(anchors)
