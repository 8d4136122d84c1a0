"""Tasks whose loss is a mean over samples or tokens, compared with transformers, scikit-learn and seqeval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from composer_speedups import FusedLayers, FusedOptimizer, Unpadding
from composer_speedups.data.builtin import builtin_samples
from composer_speedups.data.loader import build_data
from composer_speedups.tasks.models import build_model
from composer_speedups.tasks.settings import DataConfig, ModelConfig
from composer_speedups.tasks.task import task_class
from tests.data.samples import Rows, save
from tests.helpers.common import Recorder, trained
from tests.helpers.jobs import assert_resumes_exactly
from tests.reference.loop import train_plainly

pytestmark = pytest.mark.filterwarnings("ignore:Cannot split:UserWarning")  # a short last batch
TASKS = ["classification", "multilabel", "regression", "token_classification"]
LENGTH = 40
FAST = ["algorithms.sdpa_attention=null", "algorithms.unpadding={}", "algorithms.fused_layers={}"]
CLASSES = ["bad", "fair", "good"]


def rows_of(task: str, split: str = "train", count: int = 16) -> Rows:
    """Return ``count`` samples of a task; classification and regression get text pairs."""
    if task == "token_classification":
        return builtin_samples(task, count, 1, split, 0.1)
    rows = builtin_samples("multilabel" if task == "multilabel" else "regression", count, 1, split, 0.1)
    if task != "multilabel":
        rows["other"] = [f"And {text}" for text in reversed(rows["text"])]
    if task == "classification":
        rows["label"] = [CLASSES[min(int(stars * 0.6), 2)] for stars in rows["label"]]
        rows["label"][:3] = CLASSES
    return rows


def inputs_of(task: str, rows: Rows, tokenizer: Any) -> dict[str, Tensor]:
    """Return the model inputs that transformers' tokenizer makes of the texts."""
    if task != "token_classification":
        texts = [rows["text"]] if task == "multilabel" else [rows["text"], rows["other"]]
        encoded = tokenizer(*texts, truncation=True, max_length=LENGTH, padding=True, return_tensors="pt")
        return dict(encoded)
    ids = [piece_ids(words, tokenizer)[0] for words in rows["tokens"]]
    return dict(tokenizer.pad({"input_ids": ids}, return_tensors="pt"))


def piece_ids(words: list[str], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the token ids of the words, and the word index of each token (-1 for [CLS] and [SEP])."""
    of_words = [tokenizer(word, add_special_tokens=False).input_ids for word in words]
    pieces = [(piece, i) for i, of_word in enumerate(of_words) for piece in of_word]
    pieces = [(tokenizer.cls_token_id, -1), *pieces[: LENGTH - 2], (tokenizer.sep_token_id, -1)]
    return [piece for piece, _ in pieces], [word for _, word in pieces]


def labels_of(task: str, rows: Rows, names: list[str], tokenizer: Any) -> Tensor:
    if task == "regression":
        return torch.tensor(rows["label"])
    if task == "classification":
        return torch.tensor([names.index(label) for label in rows["label"]])
    if task == "multilabel":
        return torch.tensor([[float(name in labels) for name in names] for labels in rows["labels"]])
    labels = []
    for words, tags in zip(rows["tokens"], rows["ner_tags"], strict=True):
        of = piece_ids(words, tokenizer)[1]
        first = [w >= 0 and w != before for w, before in zip(of, [-1, *of], strict=False)]
        labels.append(torch.tensor([names.index(tags[w]) if f else -100 for w, f in zip(of, first, strict=True)]))
    return torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)


@pytest.mark.supports("in code")
@pytest.mark.parametrize("task", TASKS)
def test_losses_and_gradients_equal_transformers_in_a_plain_loop(task: str) -> None:
    """From texts to losses and gradients, with the techniques that run on a CPU."""
    config = DataConfig(
        source="files", train_file=save(rows_of(task), "train.jsonl"), eval_file="train.jsonl", batch_size=4,
        tokenizer="wordpiece", vocab_size=300, max_length=LENGTH, padding="longest",
    )  # fmt: skip
    two = {"text_columns": ["text", "other"]} if task in ("classification", "regression") else {}
    built = task_class(task)(**two)  # type: ignore[arg-type]
    data = build_data(config, built, model_name="", on_gpu=False)
    torch.manual_seed(3)
    ours = build_model(ModelConfig(init="random", size="tiny", dropout=0.0), built, data.tokenizer, LENGTH)
    torch.manual_seed(3)
    settings = {**ours.config.to_diff_dict(), "vocab_size": len(data.tokenizer)}
    plain = getattr(transformers, built.auto_class).from_config(transformers.BertConfig(**settings))
    plain.load_state_dict(ours.model.state_dict())
    assert type(plain) is type(ours.model)
    batches = list(data.eval.dataloader)  # rows in the order of the file
    recorder = Recorder()
    techniques = [Unpadding(), FusedLayers(), FusedOptimizer()]
    trained(techniques, model=ours, batches=batches, callbacks=[recorder])

    rows, names = rows_of(task), list(getattr(built, "labels", None) or [])
    parts = [{name: values[start : start + 4] for name, values in rows.items()} for start in range(0, 16, 4)]
    expected = train_plainly(
        plain,
        [{**inputs_of(task, p, data.tokenizer), "labels": labels_of(task, p, names, data.tokenizer)} for p in parts],
    )
    assert recorder.losses == pytest.approx(expected.losses, rel=2e-4)
    torch.testing.assert_close(recorder.first_gradients, expected.first_gradients, rtol=1e-3, atol=1e-5)


def metrics_of_the_export(task: str, folder: Path) -> dict[str, float]:
    """Compute the exported model's metrics with transformers, scikit-learn, scipy and seqeval only."""
    from scipy.stats import pearsonr, spearmanr
    from seqeval.metrics import f1_score as entity_f1
    from sklearn import metrics

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    kind = "AutoModelForTokenClassification" if task == "token_classification" else "AutoModelForSequenceClassification"
    model = getattr(transformers, kind).from_pretrained(folder).eval()
    names = [model.config.id2label[i] for i in range(model.config.num_labels)]
    rows = rows_of(task, "eval", 13)
    labels = labels_of(task, rows, names, tokenizer).numpy()
    with torch.no_grad():
        logits = model(**inputs_of(task, rows, tokenizer)).logits
    if task == "regression":
        values = logits[:, 0].numpy()
        return {
            "loss": metrics.mean_squared_error(labels, values),
            "rmse": metrics.root_mean_squared_error(labels, values),
            "mae": metrics.mean_absolute_error(labels, values),
            "pearson": pearsonr(labels, values).statistic,
            "spearman": spearmanr(labels, values).statistic,
        }
    if task == "classification":
        best, log_probabilities = logits.argmax(-1).numpy(), logits.log_softmax(-1).numpy()
        return {
            "loss": float(-log_probabilities[np.arange(len(labels)), labels].mean()),
            "accuracy": metrics.accuracy_score(labels, best),
            "macro_f1": metrics.f1_score(labels, best, average="macro"),
            "matthews": metrics.matthews_corrcoef(labels, best),
        }
    if task == "multilabel":
        probabilities = logits.sigmoid().numpy()
        predicted = probabilities > 0.5
        return {
            "loss": metrics.log_loss(labels.flatten(), probabilities.flatten()),
            "micro_f1": metrics.f1_score(labels, predicted, average="micro"),
            "macro_f1": metrics.f1_score(labels, predicted, average="macro"),
            "map": metrics.average_precision_score(labels, probabilities, average="macro"),
        }
    best = logits.argmax(-1).numpy()
    kept = labels != -100
    tagged = [[[names[i] for i in row[k]] for row, k in zip(ids, kept, strict=True)] for ids in (labels, best)]
    return {
        "accuracy": metrics.accuracy_score(labels[kept], best[kept]),
        "entity_f1": entity_f1(tagged[0], tagged[1], zero_division=0),
    }


@pytest.mark.supports("resume", "export")
@pytest.mark.parametrize(
    "task", [task if task == "classification" else pytest.param(task, marks=pytest.mark.exhaustive) for task in TASKS]
)
def test_the_export_reproduces_the_metrics_and_a_resumed_run_ends_the_same(task: str) -> None:
    save(rows_of(task, count=24), "train.jsonl")
    save(rows_of(task, "eval", 13), "eval.jsonl")
    columns = ["data.text_columns=[text,other]"] if task in ("classification", "regression") else []
    files = ["data.source=files", "data.train_file=train.jsonl", "data.eval_file=eval.jsonl"]
    settings = [f"model.task={task}", f"data.max_length={LENGTH}", "trainer.max_duration=2ep", "optimizer.lr=3e-3"]
    settings += [*files, *columns, *FAST, "checkpoint.interval=2ba"]
    whole = assert_resumes_exactly(*settings, checkpoints=["ep0-ba2"])
    for name, value in metrics_of_the_export(task, Path("runs/whole/model")).items():
        assert whole["metrics"][name] == pytest.approx(value, abs=1e-4), name
