"""Streamed training samples: sharding over ranks and workers, shuffling, bad rows, refused settings, resuming."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from composer.utils import dist
from datasets import Dataset
from torch.utils.data import DataLoader

from composer_speedups.core.errors import ConfigError, DataError
from composer_speedups.data import streams
from composer_speedups.data.builtin import builtin_reviews, builtin_samples
from composer_speedups.data.streams import EndlessSamples, Tokenized, stream_of_samples
from composer_speedups.tasks.classification import Classification
from composer_speedups.train.config.schema import DataConfig
from tests.helpers.jobs import assert_resumes_exactly, run
from tests.helpers.ranks import on_ranks
from tests.helpers.texts import tokenizer_of

ROWS = 64


def shards(count: int) -> DataConfig:
    """Write ``ROWS`` numbered samples to ``count`` parquet files; return the config that streams them."""
    for shard in range(count):
        rows = range(shard, ROWS, count)
        table = pyarrow.table({"text": [f"review {row}" for row in rows], "label": [row % 2 for row in rows]})
        pyarrow.parquet.write_table(table, f"part-{shard}.parquet")
    return DataConfig(source="files", train_file=f"{Path.cwd()}/part-*.parquet", streaming=True, shuffle_buffer=20)


def one_pass(monkeypatch: pytest.MonkeyPatch, config: DataConfig, ranks: int, workers: int = 0) -> list[list[str]]:
    """Return the texts that each rank reads in the first pass."""
    read = []
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    for rank in range(ranks):
        monkeypatch.setattr(dist, "get_global_rank", lambda rank=rank: rank)
        stream, _ = stream_of_samples(config, seed=3)
        assert isinstance(stream, EndlessSamples)
        loader: Any = DataLoader(stream.rows, batch_size=None, num_workers=workers)
        read.append([row["text"] for row in loader])
    return read


@pytest.mark.parametrize(("files", "ranks", "workers"), [(1, 2, 0), (4, 2, 0), (4, 2, 2), (3, 2, 0)])
def test_every_row_goes_to_one_rank_and_one_worker(
    files: int, ranks: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = one_pass(monkeypatch, shards(files), ranks, workers)
    assert Counter(text for texts in read for text in texts) == Counter(f"review {row}" for row in range(ROWS))
    assert abs(len(read[0]) - len(read[1])) <= max(1, ROWS // files % ranks)


def test_each_pass_over_a_stream_has_another_order_that_depends_on_the_seed() -> None:
    config = shards(2)
    passes = []
    for seed in (3, 3, 4):
        rows = iter(stream_of_samples(config, seed)[0])
        passes.append([[next(rows)["text"] for _ in range(ROWS)] for _ in range(2)])
    assert sorted(passes[0][0]) == sorted(passes[0][1])
    assert passes[0][0] != passes[0][1]
    assert passes[0] == passes[1] != passes[2]


def test_files_of_a_stream_are_read_in_turns() -> None:
    for label in range(2):
        Path(f"part-{label}.csv").write_text("text,label\n" + f"a,{label}\n" * 500)
    config = DataConfig(source="files", train_file="part-*.csv", streaming=True, shuffle_buffer=20)
    first = [row["label"] for row in itertools.islice(stream_of_samples(config, 1)[0], 300)]
    assert min(Counter(first).values()) > 100, "also from files that hold one class each"


def test_an_empty_stream_ends() -> None:
    class Empty:
        def set_epoch(self, epoch: int) -> None:
            assert epoch == 0

        def __iter__(self) -> Any:
            return iter(())

    assert list(EndlessSamples(Empty())) == []


def tokenizer_in(folder: str) -> Any:
    tokenizer = tokenizer_of(builtin_reviews(40, 1, "train", 0.1)["text"])
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_rows_with_token_ids_are_used_without_their_padding() -> None:
    collate: Any = Tokenized(lambda rows: rows, tokenizer_in("words"), Classification(), 256)
    row = {"input_ids": [2, 9, 3, 0, 0], "attention_mask": [1, 1, 1, 0, 0], "label": 1}
    batch = collate([row])
    assert (batch.tokens["input_ids"].tolist(), batch.rows["labels"].tolist()) == ([2, 9, 3], [1])
    assert collate([{**row, "attention_mask": np.ones(5)}]).lengths.tolist() == [5]
    assert collate([{"input_ids": np.array([2, 9], np.uint16), "label": 1}]).tokens["input_ids"].tolist() == [2, 9]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": " "}, r"a streamed row: text is empty; every sample needs text"),
        ({"words": "a"}, r"a streamed row: text is empty"),
        ({"text": "a", "label": 2}, r"a streamed row: label is 2; every label must be one of 0, 1 \(data\.labels\)"),
        ({"text": "a", "label": None}, r"a streamed row: label is empty"),
        ({"input_ids": b"\x02\x00\x09\x00"}, r"input_ids is b'.*', not a list of integers \(in MDS shards"),
        ({"input_ids": "[2, 9]"}, r"input_ids is '\[2, 9\]', not a list of integers"),
        ({"input_ids": [2.5, 9.0]}, r"input_ids is \[2\.5, 9\.0\], not a list of integers"),
        ({"input_ids": [[2, 9]]}, r"input_ids is \[\[2, 9\]\], not a list of integers"),
        ({"input_ids": []}, r"input_ids is \[\], not a list of integers"),
        ({"input_ids": [2, 3], "attention_mask": [0, 0]}, r"input_ids has no token that its attention_mask"),
        ({"input_ids": [2, 90000]}, r"input_ids has 90000, and the tokenizer's ids are 0 to .*; set data\.tok"),
        ({"input_ids": [-1, 2]}, r"input_ids has -1, and the tokenizer's ids are 0 to"),
    ],
)
def test_a_bad_streamed_row_is_refused_in_one_line(row: dict[str, Any], message: str) -> None:
    collate: Any = Tokenized(lambda rows: rows, tokenizer_in("words"), Classification(), 256)
    good = collate([{"text": "it was not dull", "label": 1.0}, {"text": "a", "label": False}])
    assert good.rows["labels"].tolist() == [1, 0]
    assert good.lengths[0] > good.lengths[1] >= 3
    with pytest.raises(DataError, match=message):
        collate([{"label": 1, **row}])


def test_a_file_of_a_stream_that_cannot_be_read_is_named() -> None:
    Path("a.csv").write_bytes("text,label\nun café noir,1\n".encode())
    Path("b.csv").write_bytes("text,label\nun café noir,1\n".encode("latin-1"))
    samples = stream_of_samples(DataConfig(source="files", train_file="*.csv", streaming=True), 1)[0]
    with pytest.raises(DataError) as error:
        list(itertools.islice(samples, 9))
    assert str(error.value).startswith("data.train_file: b.csv is not UTF-8: byte 0xe9 in line 2 ")


def write_training_files(task: str) -> None:
    tokenizer_in("words")
    pyarrow.parquet.write_table(pyarrow.table(builtin_samples(task, 44, 1, "train", 0.1)), "train.parquet")


def stream_run(*overrides: str) -> dict[str, Any]:
    job = ["data.source=files", f"data.train_file={Path.cwd()}/train.parquet", f"data.tokenizer={Path.cwd()}/words"]
    job += ["data.streaming=true", "data.train_samples=null", "data.labels=[negative,positive]"]
    return run(*job, "trainer.eval_interval=4ba", "export=false", *overrides)


@pytest.mark.exhaustive
def test_a_run_trains_on_a_stream_and_resumes_at_the_same_row() -> None:
    write_training_files("classification")
    settings = ["trainer.max_duration=8ba", "checkpoint.interval=4ba", "export=true"]
    whole = assert_resumes_exactly(*settings, checkpoints=["ep0-ba4"], train=stream_run)
    assert whole["training"]["samples"] == 64, "44 rows, then 20 of the second pass"


@pytest.mark.exhaustive
def test_another_number_of_ranks_cannot_resume_a_stream() -> None:
    write_training_files("classification")
    on_ranks(lambda: stream_run("trainer.max_duration=4ba", "checkpoint.interval=4ba", "run_name=whole"))
    checkpoint = next(Path("runs/whole/checkpoints").glob("*ba4*"))
    with pytest.raises(ConfigError) as error:
        stream_run("trainer.max_duration=8ba", f"checkpoint.load={checkpoint}", "run_name=whole")
    said = str(error.value)
    assert said.startswith("checkpoint.load: it was written while 2 ranks read the stream, and 1 would continue with")


@pytest.mark.parametrize("task", ["classification", "multilabel", "token_classification"])
def test_a_stream_without_known_classes_is_refused_before_training(task: str) -> None:
    write_training_files(task)
    with pytest.raises(ConfigError, match=r"^data\.labels is missing: without validation samples, the classes"):
        stream_run("trainer.max_duration=2ba", f"model.task={task}", "data.labels=null")


def test_mds_without_its_package_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    config = DataConfig(source="mds", train_file="nowhere")
    monkeypatch.setattr(streams.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"data\.source: mds needs the package 'streaming'; pip install"):
        stream_of_samples(config, 0)


def test_a_stream_without_rows_is_refused() -> None:
    """It has no batches, so a run of some batches would go from epoch to epoch for ever."""
    Dataset.from_dict({"text": [], "label": []}).to_parquet("a.parquet")
    Path("a.csv").write_text("text,label\n")
    Path("a.jsonl").write_text("\n")
    for name in ("a.csv", "a.jsonl", "a.parquet"):
        with pytest.raises(DataError, match=rf"^data\.train_file: {name} has no rows.*; use a file with samples$"):
            stream_of_samples(DataConfig(source="files", streaming=True, train_file=name), 0)


def test_each_address_of_mds_shards_has_a_cache_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package reads the shards in its local folder, also those of another address, without downloading."""
    streaming = pytest.importorskip("streaming", reason="needs mosaicml-streaming; docs/data.md has its install line")
    opened: list[Any] = []
    monkeypatch.setattr(streaming, "StreamingDataset", lambda **settings: opened.append(settings))
    for name in ("s3://bucket/one", "s3://bucket/other", "s3://bucket/one"):
        stream_of_samples(DataConfig(source="mds", train_file=name), 0)
    one, other, again = (Path(settings["local"]) for settings in opened)
    assert (one == again, one == other) == (True, False)
    assert one.parent == other.parent == Path(DataConfig().cache_dir) / "mds"


def test_mds_shards_go_to_one_rank_each(monkeypatch: pytest.MonkeyPatch) -> None:
    streaming = pytest.importorskip("streaming", reason="needs mosaicml-streaming; docs/data.md has its install line")
    with streaming.MDSWriter(out="shards", columns={"text": "str", "label": "int"}) as writer:
        for row in range(ROWS):
            writer.write({"text": f"review {row}", "label": row % 2})
    config = DataConfig(source="mds", train_file="shards", batch_size=4)
    rows = [row["text"] for row in stream_of_samples(config, 1)[0]]
    assert sorted(rows) == sorted(f"review {row}" for row in range(ROWS))
    with pytest.raises(DataError, match=r"nowhere .* has no index\.json"):
        stream_of_samples(DataConfig(source="mds", train_file="nowhere"), 0)
    Path("broken").mkdir()
    for index, problem in {"{}": "KeyError: 'version'", "": "JSONDecodeError: .*"}.items():
        Path("broken/index.json").write_text(index)
        with pytest.raises(DataError, match=rf"^data\.train_file: broken cannot be opened as MDS shards \({problem}\)"):
            stream_of_samples(DataConfig(source="mds", train_file="broken"), 0)
    with pytest.raises(DataError, match=r"^data\.train_file: nothing://at/all cannot be opened as MDS shards \(.*"):
        stream_of_samples(DataConfig(source="mds", train_file="nothing://at/all"), 0)
    tokenizer_in("words")
    settings = ["data.streaming=false", "data.source=mds", f"data.train_file={Path.cwd()}/shards"]
    settings += ["trainer.max_duration=1ep", "checkpoint.interval=4ba", "export=true"]
    whole = assert_resumes_exactly(*settings, checkpoints=["ep0-ba4"], train=stream_run)
    assert whole["training"]["samples"] == ROWS
