"""Rows with several texts, files of such rows, and tiny encoders for them."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import BertModel

from composer_speedups.data.flat import Ragged
from composer_speedups.data.loader import Pad
from composer_speedups.data.tokens import load_tokenizer
from composer_speedups.tasks.settings import DataConfig
from composer_speedups.tasks.task import Task
from tests.helpers.common import Batch, tiny_config

WORDS = """amber birch cedar dune ember fern grove harbour island juniper kelp lagoon meadow nectar orchard prairie
quartz reef sparrow thicket umber valley willow yarrow zephyr""".split()


def sentence(rng: random.Random, least: int = 1, most: int = 11) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))


def triples(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows with an ``anchor``, a ``positive`` with the same words, a ``negative``, and a ``score``."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        anchor = sentence(rng)
        positive = " ".join(rng.sample(anchor.split(), k=len(anchor.split()))) + " " + rng.choice(WORDS)
        score = round(rng.random(), 3)
        rows.append({"anchor": anchor, "positive": positive, "negative": sentence(rng), "score": score})
    return rows


def write_rows(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Write a jsonl file to the current folder, and return its name."""
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def tokenizer_of(texts: Sequence[str]) -> Any:
    """A WordPiece tokenizer trained on them."""
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(DataConfig(tokenizer="wordpiece", vocab_size=300, cache_dir=folder), "", texts)


def collated(task: Task, rows: Sequence[Mapping[str, Any]], tokenizer: Any, length: int = 12) -> Batch:
    """Return the training batch that a loader makes of raw rows."""
    examples = [task.example(row, f"row {i}", training=True) for i, row in enumerate(rows, start=1)]
    examples = task.prepared(examples, training=True)
    columns = {key: [example[key] for example in examples] for key in examples[0]}
    pad = Pad(tokenizer.pad_token_id, length, longest=True)
    return task.collator(pad, tokenizer, training=True)(Ragged.of(task.encode(columns, tokenizer, length)))


def tiny_encoder(tokenizer: Any, *, dropout: float = 0.0, kind: Any = BertModel, **settings: Any) -> Any:
    """Two layers of 32 with eager attention; weights large enough that a wrong mask shows."""
    torch.manual_seed(0)
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = tiny_config(vocab_size=len(tokenizer), initializer_range=0.2, pad_token_id=tokenizer.pad_token_id, **rates)
    return kind._from_config(config, attn_implementation="eager", **settings)
