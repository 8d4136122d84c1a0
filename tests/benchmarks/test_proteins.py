"""What the table esm2 trains: ESM-2's shape, and proteins that are the same everywhere."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pyarrow.parquet
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from benchmarks.proteins import proteins, write_proteins
from composer_speedups.core.pretrained import pretrained_tokenizer


def test_the_model_has_650_million_parameters_and_reads_the_proteins(tmp_path: Path) -> None:
    write_proteins(tmp_path, 8)
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    assert sum(p.numel() for p in model.esm.encoder.parameters()) == 33 * (12 * 1280**2 + 13 * 1280) + 2 * 1280
    tokenizer = pretrained_tokenizer(str(tmp_path))
    rows = pyarrow.parquet.read_table(tmp_path / "train.parquet").to_pylist()
    assert rows == [dict(zip(("text", "label"), row, strict=True)) for row in zip(*proteins(8).values(), strict=True)]
    ids = tokenizer(rows[0]["text"]).input_ids
    special = config.pad_token_id, config.mask_token_id, tokenizer.unk_token_id
    assert len(ids) == len(rows[0]["text"]) + 2
    assert not {*special} & {*ids}
    assert (tokenizer.pad_token_id, tokenizer.mask_token_id, len(tokenizer)) == (*special[:2], config.vocab_size)
    assert json.loads((tmp_path / "config.json").read_text())["position_embedding_type"] == "rotary"


def test_proteins_are_as_long_as_real_ones_and_always_the_same() -> None:
    samples = proteins(4096)
    lengths = [len(text) for text in samples["text"]]
    assert 280 < statistics.median(lengths) < 300
    assert 345 < statistics.fmean(lengths) < 370
    assert 0.02 < statistics.fmean(length > 1022 for length in lengths) < 0.04, "most fit into 1,024 tokens"
    assert 0.45 < statistics.fmean(samples["label"]) < 0.55
    assert samples == proteins(4096)
