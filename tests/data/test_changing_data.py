"""Files that change before a run, while they are read, in the cache, during a run, or between ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset

from composer_speedups.core.errors import DataError
from composer_speedups.data import reader
from composer_speedups.data.loader import build_data
from composer_speedups.data.sources import load_samples
from composer_speedups.data.tokens import load_tokenizer, tokenize
from composer_speedups.tasks.classification import Classification
from composer_speedups.train.cli import exit_codes
from composer_speedups.train.config.schema import DataConfig
from tests.data.samples import ROWS, files, save
from tests.helpers.jobs import run
from tests.helpers.ranks import ends_of_ranks


def _build(config: DataConfig) -> Dataset:
    return build_data(config, Classification(), model_name="unused", on_gpu=False).train.dataloader.dataset


@pytest.mark.pins
def test_a_changed_file_is_tokenized_again_even_with_the_same_date_and_size() -> None:
    name = save({"text": ["good one", "fine two"], "label": [1, 0]}, "a.csv")
    config = files(name, train_samples=None)
    first, before = _build(config), os.stat(name)
    save({"text": ["good two", "fine one"], "label": [1, 0]}, name)
    os.utime(name, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(name).st_size == before.st_size
    second = _build(config)
    assert len(second.tokens["input_ids"]) == len(first.tokens["input_ids"])
    assert not np.array_equal(second.tokens["input_ids"], first.tokens["input_ids"])


@pytest.mark.pins
def test_a_damaged_token_cache_is_rebuilt() -> None:
    rows = {"text": ROWS["text"] * 300, "label": ROWS["label"] * 300}
    config = files(save(rows, "a.parquet"), train_samples=None)
    train, _ = load_samples(config, Classification())
    tokenizer = load_tokenizer(config, "unused", train["text_1"])
    expected = tokenize(train, tokenizer, config, Classification())[:]
    (cache,) = Path("cache/tokens").glob("*.arrow")
    whole = cache.read_bytes()
    table = pyarrow.ipc.open_stream(whole).read_all()
    with pyarrow.ipc.new_stream(short := pyarrow.BufferOutputStream(), table.schema) as stream:
        stream.write_table(table.slice(0, 1000))  # readable, but too few rows
    for damaged in (short.getvalue().to_pybytes(), b"", b"not arrow", whole[:100], whole[: len(whole) // 2]):
        cache.write_bytes(damaged)
        assert tokenize(train, tokenizer, config, Classification())[:] == expected


def test_a_damaged_tokenizer_is_refused_in_one_line() -> None:
    config = files(save(ROWS, "a.parquet"))
    train, _ = load_samples(config, Classification())
    load_tokenizer(config, "unused", train["text_1"])
    for file in Path("cache/tokenizers").rglob("tokenizer.json"):
        file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(DataError, match=r"data\.cache_dir: the tokenizer in cache/tokenizers/\w+ is damaged; delete"):
        load_tokenizer(config, "unused", train["text_1"])


def test_a_file_that_changes_while_it_is_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    read = reader._parquet_rows

    def change(*arguments: Any) -> Iterator[reader.Row]:
        yield from read(*arguments)
        save(ROWS, "a.parquet")

    save({"text": ["a", "b"], "label": [1, 0]}, "a.parquet")
    monkeypatch.setattr(reader, "_parquet_rows", change)
    with pytest.raises(DataError, match=r"data\.train_file: a\.parquet changed while it was being read; start again"):
        load_samples(files("a.parquet"), Classification())


def test_files_and_caches_truncated_during_a_run_do_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from composer_speedups.tasks.models import FinetuneModel

    name = save({"text": ROWS["text"] * 3, "label": ROWS["label"] * 3}, "a.parquet")
    job = ["data.source=files", f"data.train_file={name}", f"data.eval_file={name}", "trainer.max_duration=6ba"]
    expected = run(*job, "run_name=one")["metrics"]
    plain = FinetuneModel.loss

    def damage(self: FinetuneModel, outputs: object, batch: object) -> object:
        for path in [Path(name), *Path(".cache").rglob("*.arrow")]:
            os.truncate(path, 0)
        return plain(self, outputs, batch)

    monkeypatch.setattr(FinetuneModel, "loss", damage)
    assert run(*job, "run_name=two")["metrics"] == expected


@pytest.mark.exhaustive
def test_ranks_that_read_different_files_are_refused() -> None:
    for rank in range(2):
        save({"text": ["good one", "fine" + " and long" * rank], "label": [1, 0]}, f"{rank}.parquet")

    def read() -> None:
        rank = os.environ["RANK"]
        with exit_codes():
            _build(files(f"{rank}.parquet", batch_size=2, cache_dir=f"cache{rank}"))

    for done in ends_of_ranks(read):
        assert done.status == 2
        assert done.stderr.splitlines()[-1].startswith("train.py: data: the ranks read different samples")
