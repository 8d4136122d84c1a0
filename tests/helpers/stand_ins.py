"""Small local folders in the layout of the hub's datasets and models, under the names that the YAMLs use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from datasets import ClassLabel, Dataset, Features, List, Value
from transformers import BertForMaskedLM

from composer_speedups.data.builtin import builtin_reviews, builtin_samples
from composer_speedups.data.tokens import load_tokenizer
from composer_speedups.train.config.schema import DataConfig
from tests.helpers.common import tiny_config

ROWS = 12
_ENTAILMENT = ["entailment", "not_entailment"]

# Task → its text columns and the names of its classes, in the hub's order; None for scores. From the dataset's card.
GLUE: dict[str, tuple[list[str], list[str] | None]] = {
    "cola": (["sentence"], ["unacceptable", "acceptable"]),
    "sst2": (["sentence"], ["negative", "positive"]),
    "mrpc": (["sentence1", "sentence2"], ["not_equivalent", "equivalent"]),
    "stsb": (["sentence1", "sentence2"], None),
    "qqp": (["question1", "question2"], ["not_duplicate", "duplicate"]),
    "mnli": (["premise", "hypothesis"], ["entailment", "neutral", "contradiction"]),
    "qnli": (["question", "sentence"], _ENTAILMENT),
    "rte": (["sentence1", "sentence2"], _ENTAILMENT),
    "wnli": (["sentence1", "sentence2"], ["not_entailment", "entailment"]),
}
_CONLL_TAGS = ["O", *(f"{place}-{kind}" for kind in ("PER", "ORG", "LOC", "MISC") for place in "BI")]


def make_stand_ins(folder: Path) -> None:
    """Fill a folder with the datasets and models of all YAMLs."""
    reviews = builtin_reviews(30, 1, "train", 0.1)
    for name in ("stanfordnlp/imdb", "imdb"):
        for split in ("train", "test"):
            save_rows(folder / name / f"{split}.parquet", reviews)
    make_glue(folder / "nyu-mll/glue", reviews["text"])
    _conll(folder / "tomaarsen/conll2003")
    pairs = {"sentence1": reviews["text"][:ROWS], "sentence2": reviews["text"][-ROWS:]}
    for split in ("train", "validation", "test"):
        scores = {"score": [i / ROWS for i in range(ROWS)]}
        save_rows(folder / f"sentence-transformers/stsb/data/{split}-00000-of-00001.parquet", {**pairs, **scores})
    _msmarco(folder / "microsoft/ms_marco")
    tokenizer = load_tokenizer(
        DataConfig(tokenizer="wordpiece", vocab_size=150, cache_dir=str(folder / "cache")), "", reviews["text"]
    )
    encoder = BertForMaskedLM(tiny_config(vocab_size=len(tokenizer)))  # as the hub's, without a classifier
    for name in ("base-uncased", "large-uncased", "base-cased"):
        encoder.save_pretrained(folder / f"google-bert/bert-{name}")
        tokenizer.save_pretrained(folder / f"google-bert/bert-{name}")


def save_rows(path: Path, columns: dict[str, list[Any]], features: Features | None = None) -> None:
    """A parquet file, with the features of ``datasets`` where they are given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if features is None:
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    else:
        Dataset.from_dict(columns, features).to_parquet(path)


def make_glue(folder: Path, texts: list[str]) -> None:
    """A folder for each configuration, which the card's header lists."""
    configs = []
    for name, (columns, classes) in GLUE.items():
        splits = ["train", "validation_matched", "validation_mismatched"] if name == "mnli" else ["train", "validation"]
        configs.append({"config_name": name, "data_files": [{"split": s, "path": f"{name}/{s}-*"} for s in splits]})
        label = Value("float32") if classes is None else ClassLabel(names=classes)
        features = Features({**{c: Value("string") for c in columns}, "label": label, "idx": Value("int32")})
        rows: dict[str, list[Any]] = {c: texts[i : i + ROWS] for i, c in enumerate(columns)}
        rows["label"] = [i / 2 if classes is None else i % len(classes) for i in range(ROWS)]
        rows["idx"] = list(range(ROWS))
        for split in splits:
            save_rows(folder / name / f"{split}-00000-of-00001.parquet", rows, features)
    (folder / "README.md").write_text(f"---\n{json.dumps({'configs': configs})}\n---\n")


def _conll(folder: Path) -> None:
    news = builtin_samples("token_classification", ROWS, 1, "train", 0.1)
    names = {"id": Value("string"), "tokens": List(Value("string")), "pos_tags": List(Value("int64"))}
    features = Features({**names, "ner_tags": List(ClassLabel(names=_CONLL_TAGS))})
    tags = [[_CONLL_TAGS.index(tag) for tag in row] for row in news["ner_tags"]]
    rows = {"id": [str(i) for i in range(ROWS)], "tokens": news["tokens"], "pos_tags": tags, "ner_tags": tags}
    for split in ("train", "validation", "test"):
        save_rows(folder / f"data/{split}-00000-of-00001.parquet", rows, features)


def _msmarco(folder: Path) -> None:
    ranked = builtin_samples("reranking", 4 * ROWS, 1, "train", 0.1)
    passages = []
    for i in range(0, 4 * ROWS, 4):
        selected, texts = [int(label) for label in ranked["label"][i : i + 4]], ranked["document"][i : i + 4]
        passages.append({"is_selected": selected, "passage_text": texts, "url": ["…"] * 4})
    rows = {"passages": passages, "query": ranked["query"][::4], "query_id": list(range(ROWS))}
    for split in ("train", "validation", "test"):
        save_rows(folder / f"v1.1/{split}-00000-of-00001.parquet", rows)
    files = [{"split": split, "path": f"v1.1/{split}-*"} for split in ("train", "validation")]
    configs = [{"config_name": "v1.1", "data_files": files}]
    (folder / "README.md").write_text(f"---\n{json.dumps({'configs': configs})}\n---\n")
