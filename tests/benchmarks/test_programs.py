"""The programs that leave rows of their own: pytest's counts, the times of kernels, leaks, and the proteins of esm2."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from benchmarks import micro, suite
from benchmarks.proteins import proteins, write_proteins
from benchmarks.rows import Row, read_rows
from benchmarks.soak import MIB, Reading, grown, soak
from composer_speedups.core.pretrained import pretrained_tokenizer
from tests.helpers.jobs import SHORT

TESTS = """
import pytest

def test_good(): pass

@pytest.mark.parametrize("x", [1, 2])
def test_bad(x): assert False

@pytest.fixture
def broken(): raise OSError

def test_error(broken): pass

@pytest.mark.skip(reason="needs a moon")
def test_away(): pass
"""


def test_a_run_of_tests_is_a_row_unless_none_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "environment", lambda: {"gpu": "NVIDIA H200"})
    Path("test_toy.py").write_text(TESTS)
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", "/dev/null", "--rootdir=.", "test_toy.py"]
    with pytest.raises(SystemExit, match="no test ran; no row is written"):
        suite.main([*arguments, "-k", "away"], Path("results"))
    assert suite.main(arguments, Path("results")) == 1
    (row,) = read_rows(Path("results/nvidia-h200/suite.jsonl"))
    assert {kind: row[kind] for kind in ("passed", "failed", "skipped")} == {"passed": 1, "failed": 3, "skipped": 1}
    assert (row["arguments"], row["status"]) == (arguments, 1)
    assert row["seconds"] > 0


def test_lengths_have_the_distribution_of_reviews() -> None:
    lengths = micro.lengths(128, 256)
    assert len(lengths) == 128
    assert max(lengths) == 256
    assert 200 < sum(lengths) / 128 < 215
    assert min(micro.lengths(8000, 5000)) == 13


@pytest.mark.gpu
def test_every_kernel_is_timed_beside_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Row] = []
    monkeypatch.setattr(micro, "append_row", lambda row, *_: rows.append(row))
    micro.main(micro.SHAPE | {"rows": 4})
    names = {kernel["name"] for kernel in rows[0]["kernels"]}
    assert names >= {"attention", "norm", "gelu", "adapters_qkv_backward", "gelu_backward_with_adapters"}
    assert all(kernel["us"] > 0 and kernel["torch_us"] > 0 for kernel in rows[0]["kernels"])


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, set()),
        ({"host_bytes": lambda i: (900 + 100 * (i % 7 == 0)) * MIB, "open_files": lambda i: 10 * (i % 9 == 0)}, set()),
        ({"children": lambda i: 4 if i < 15 else 2}, set()),
        ({"host_bytes": lambda i: (900 + i) * MIB, "open_files": lambda i: i // 40}, {"host_bytes", "open_files"}),
        ({"gpu_bytes": lambda i: i * MIB, "children": lambda i: i}, {"gpu_bytes", "children"}),
    ],
)
def test_growth_is_distinguished_from_noise(changes: dict[str, Callable[[int], int]], found: set[str]) -> None:
    steady = {"host_bytes": 900 * MIB, "gpu_bytes": 0, "open_files": 20, "threads": 7, "children": 2}
    readings = [
        Reading(batch=10 * i, **{**steady, **{name: change(i) for name, change in changes.items()}}) for i in range(100)
    ]
    assert set(grown(readings)) == found


@pytest.mark.exhaustive
def test_a_short_run_is_measured() -> None:
    results = soak(["steps=6", *SHORT, "data.workers=0", "export=false"])
    assert len(results["readings"]) == 5
    assert json.loads(Path("runs/soak/soak.json").read_text())["steps"] == 6
    assert all(reading["host_bytes"] > 100 * MIB for reading in results["readings"])
    assert list(Path("runs/soak/checkpoints").glob("*.pt"))


@pytest.mark.long
def test_nothing_grows_over_5000_steps() -> None:
    assert soak(["steps=5000"])["grown"] == {}


def test_the_model_has_650_million_parameters_and_reads_the_proteins(tmp_path: Path) -> None:
    write_proteins(tmp_path, 8)
    config: Any = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    assert sum(p.numel() for p in model.esm.encoder.parameters()) == 33 * (12 * 1280**2 + 13 * 1280) + 2 * 1280
    assert config.position_embedding_type == "rotary"
    tokenizer = pretrained_tokenizer(str(tmp_path))
    rows = pyarrow.parquet.read_table(tmp_path / "train.parquet").to_pylist()
    assert rows == [dict(zip(("text", "label"), row, strict=True)) for row in zip(*proteins(8).values(), strict=True)]
    ids = tokenizer(rows[0]["text"]).input_ids
    special = config.pad_token_id, config.mask_token_id, tokenizer.unk_token_id
    assert len(ids) == len(rows[0]["text"]) + 2
    assert not {*special} & {*ids}
    assert (tokenizer.pad_token_id, tokenizer.mask_token_id, len(tokenizer)) == (*special[:2], config.vocab_size)


def test_proteins_are_as_long_as_real_ones_and_always_the_same() -> None:
    samples = proteins(4096)
    lengths = [len(text) for text in samples["text"]]
    assert 280 < statistics.median(lengths) < 300
    assert 345 < statistics.fmean(lengths) < 370
    assert 0.02 < statistics.fmean(length > 1022 for length in lengths) < 0.04, "most fit into 1,024 tokens"
    assert samples == proteins(4096)
