"""A finished run's model for predictions and evaluation: unpadded, and in 16 bits on a GPU."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset

from composer_speedups.callbacks.history import metrics_by_class
from composer_speedups.core.errors import ConfigError
from composer_speedups.core.pretrained import pretrained_config, pretrained_model, pretrained_tokenizer
from composer_speedups.data.flat import PER_TOKEN, FlatTokens, Ragged
from composer_speedups.data.loader import Pad
from composer_speedups.packing.encoder import with_counted_rows
from composer_speedups.predict import exported_folder, loading, read_task
from composer_speedups.recommendation import apply_recommended
from composer_speedups.tasks.metrics import ByClass, computed, loss_of
from composer_speedups.tasks.models import FinetuneModel, has_token_types
from composer_speedups.tasks.settings import TaskSettings
from composer_speedups.tasks.task import Task, build_task

Columns = dict[str, list[Any]]


class FinishedModel:
    """The exported model of a run with its task and tokenizer."""

    def __init__(self, model: Any, task: Task, tokenizer: Any, max_length: int, precision: str) -> None:
        self.model, self.task, self.tokenizer, self.max_length = model, task, tokenizer, max_length
        self.precision = precision
        self.engaged: list[str] = []
        self._pad = Pad(tokenizer.pad_token_id, max_length, longest=True, multiple=8)

    @classmethod
    def load(
        cls,
        run: Path,
        *,
        device: str = "auto",
        precision: str = "auto",
        task: tuple[TaskSettings, int] | None = None,
        evaluates: bool = False,
    ) -> FinishedModel:
        """Load the model from the folder of a run, or from the folder ``model`` that train.py exported; ``task`` is
        what :func:`.read_task` returned for it."""
        if device == "gpu" and not torch.cuda.is_available():
            raise ConfigError("device: there is no GPU here; set device=cpu or auto")
        on_gpu = device != "cpu" and torch.cuda.is_available()
        exported = exported_folder(run)
        folder = str(exported)
        settings, max_length = task or read_task(exported, evaluates=evaluates)
        with loading(exported):
            built = build_task(settings)
            if hasattr(built, "labels"):
                labels = json.loads((exported / "config.json").read_text())["id2label"]
                built.labels = [labels[str(number)] for number in range(len(labels))]
            auto = getattr(transformers, built.auto_class)
            config = pretrained_config(folder)
            arguments = built.model_arguments(auto._model_mapping[type(config)])
            model, info = pretrained_model(auto, folder, config, "RUN", **arguments)
            if other := sorted(info["missing_keys"]) or sorted(info["unexpected_keys"]):
                raise ValueError(f"its weights do not fit its config.json: {other[0]}")
            tokenizer = pretrained_tokenizer(folder)
        if on_gpu:
            model.cuda()
        chosen = ("bf16" if on_gpu else "fp32") if precision == "auto" else precision
        finished = cls(model, built, tokenizer, max_length, chosen)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            done = apply_recommended(model).evidence
        finished.engaged = [f"techniques: {', '.join(done) or 'none'}", *(str(warning.message) for warning in caught)]
        return finished

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> Columns:
        """Token ids of rows, each a mapping from its columns to texts."""
        texts = [self.texts(row) for row in rows]
        columns = {f"text_{i}": list(column) for i, column in enumerate(zip(*texts, strict=True), start=1)}
        return self.task.encode(columns, self.tokenizer, self.max_length)

    def texts(self, row: Mapping[str, Any], where: str = "input") -> list[Any]:
        """The checked texts of a row: strings, or lists of words. ``where`` is the row in an error message."""
        columns = self.task.predicted_columns
        given = {name: row.get(name) for name in columns}
        return [self.task.text(given, name, where) for name in columns]

    @torch.no_grad()
    def predict(self, encoded: Columns, batch_size: int) -> list[dict[str, Any]]:
        """Predictions for encoded rows in their order; computed in batches of similar lengths, the longest first."""
        lengths = [len(ids) for ids in encoded["input_ids"]]
        order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        parts = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        # Results are copied after all batches are launched, because copying one waits for the GPU.
        batches = [self._pad(Ragged.of({name: [v[i] for i in part] for name, v in encoded.items()})) for part in parts]
        outputs = [(self._logits(batch), batch) for batch in batches]
        predictions = [prediction for logits, batch in outputs for prediction in self.task.predictions(logits, batch)]
        return [prediction for _, prediction in sorted(zip(order, predictions, strict=True), key=itemgetter(0))]

    @torch.no_grad()
    def evaluate(
        self, samples: Dataset, batch_size: int, *, by_row: bool = False
    ) -> tuple[dict[str, float], dict[str, dict[str, Any]], list[float]]:
        """The metrics of samples (from :func:`.labelled_samples`) as in training, those of each class, and ``by_row``
        the loss of each sample: the metric ``loss`` of that sample alone."""
        encoded = samples.map(
            lambda rows: self.task.encode(rows, self.tokenizer, self.max_length),
            batched=True,
            remove_columns=samples.column_names,
            keep_in_memory=True,
            new_fingerprint="tokens",  # otherwise datasets would hash the function, and with it the model
            desc="tokenizing",
        )
        tokens = self.task.arranged(FlatTokens(encoded), self.max_length, training=False)
        collate = self.task.collator(self._pad, self.tokenizer, training=False)
        wrapped = FinetuneModel(self.model, self.task, self.tokenizer, self.max_length, train_metrics=False)
        metrics = wrapped.get_metrics(is_train=False)
        device = self.model.device
        for metric in metrics.values():
            metric.to(device)
        alone, losses = copy.deepcopy(loss_of(metrics)) if by_row else None, np.zeros(len(tokens))
        order = np.argsort(-tokens.widths, kind="stable")
        for start in range(0, len(order), batch_size):
            batch = collate(tokens.__getitems__(order[start : start + batch_size]))
            logits = self._logits(batch)
            batch = {name: x.to(device) for name, x in batch.items()}
            outputs = wrapped.eval_forward(batch, {"logits": logits})  # as in training, it takes the labels out of it
            for metric in metrics.values():
                wrapped.update_metric(batch, outputs, metric)
            if alone is not None and wrapped.labels is not None:
                of_rows = zip(outputs.float().cpu().split(1), wrapped.labels.cpu().split(1), strict=True)
                for place, (output, label) in zip(order[start : start + batch_size], of_rows, strict=True):
                    alone.reset()
                    self.task.update_metric(alone, output, label, {})
                    losses[place] = alone.compute()
        values, classes = computed(metrics), dict[str, dict[str, Any]]()
        for metric in metrics.values():
            if isinstance(metric, ByClass) and metric.seen is not None:
                classes = metrics_by_class(metric.names, metric.seen.cpu().numpy())
        return values, classes, losses.tolist() if by_row else []

    def _logits(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        device = self.model.device
        names = _INPUTS if has_token_types(self.model) else _INPUTS - {"token_type_ids"}
        inputs = {name: x.to(device, non_blocking=True) for name, x in batch.items() if name in names}
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16")
        with autocast, with_counted_rows(self.model, batch, inputs):
            logits: torch.Tensor = self.task.outputs(self.model, inputs)["logits"]
        return logits


# Token classification encodes labels to mark where words begin; the model would compute a loss with them.
_INPUTS = {"attention_mask", *(name for name in PER_TOKEN.values() if name not in ("labels", "word_starts"))}
