"""Samples from files and hub folders: bad rows are named, caches are used, WordPiece is stock, batches are padded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch

from composer_speedups.core.errors import ConfigError, DataError
from composer_speedups.data import tokens
from composer_speedups.data.builtin import builtin_reviews
from composer_speedups.data.flat import Ragged
from composer_speedups.data.loader import Pad, build_data
from composer_speedups.data.sources import load_samples
from composer_speedups.data.summary import DataSummary
from composer_speedups.data.tokens import load_tokenizer
from composer_speedups.tasks.classification import Classification
from composer_speedups.tasks.settings import TASKS
from composer_speedups.tasks.task import task_class
from composer_speedups.train.config.schema import DataConfig
from tests.data.samples import ROWS, files, save


def test_drawn_samples_are_random_seeded_and_unique() -> None:
    name = save(ROWS, "a.parquet")
    first, _ = load_samples(files(name, train_samples=8), Classification())
    again, _ = load_samples(files(name, train_samples=8), Classification())
    other, _ = load_samples(files(name, train_samples=8, seed=3), Classification())
    assert len(set(first["text_1"])) == 8
    assert first["text_1"] == again["text_1"] != other["text_1"]


@pytest.mark.pins
def test_a_local_folder_is_read_under_its_hub_name() -> None:
    folder = Path("stanfordnlp/imdb/data")
    folder.mkdir(parents=True)
    save(ROWS, str(folder / "train-00000.parquet"))
    save({"text": ["Test."], "label": [1]}, str(folder / "test-00000.parquet"))
    train, evaluation = load_samples(DataConfig(hub_name="stanfordnlp/imdb", train_samples=5), Classification())
    assert len(train) == 5
    assert evaluation[:] == {"text_1": ["Test."], "labels": [1]}


def test_an_unreachable_hub_names_the_key_and_alternatives() -> None:
    with pytest.raises(DataError, match=r"data\.hub_name 'no/such', split 'train': cannot be .*data\.source=files"):
        load_samples(DataConfig(hub_name="no/such"), Classification())


NOTHING = {"text": pyarrow.array([], pyarrow.string()), "label": pyarrow.array([], pyarrow.int64())}
BAD_ROWS: list[tuple[dict[str, Any], str]] = [
    (
        {"txt": ["a"], "label": [1]},
        r"has no column 'text'; did you mean 'txt'\? \(it has: txt, label\); set data\.text_columns=\[NAME\]$",
    ),
    ({"text": ["a"], "lable": [1]}, r"has no column 'label'.*; set data\.label_column=NAME$"),
    ({"txt": ["a"], "lable": [1]}, r"has no column 'text'; .*\n.*bad\.parquet has no column 'label'; .*_column=NAME$"),
    ({"text": ["a", " \n"], "label": [1, 0]}, "row 2: text is empty; every sample needs text"),
    ({"text": ["a", None], "label": [1, 0]}, "row 2: text is empty"),
    ({"text": [3, 4], "label": [0, 1]}, "row 1: text is 3"),
    ({"text": ["a", "b", "c"], "label": [1, 0, -1]}, "row 3: label is -1; every label must be one of 0, 1"),
    ({"text": ["a", "b", "c"], "label": [0, 1, None]}, "row 3: label is empty; every label must be one of 0, 1"),
    ({"text": ["a", "b", "c"], "label": [1.0, 0.0, 0.5]}, r"row 3: label is 0\.5; every label must be one of 0, 1"),
    ({"text": ["a", "b"], "label": ["x", "x"]}, "the column label has only the class x; there must be two or more"),
    (NOTHING, "has no rows"),
]


@pytest.mark.parametrize(("rows", "message"), BAD_ROWS)
@pytest.mark.pins
def test_bad_rows_are_named(rows: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        load_samples(files(save(rows, "bad.parquet")), Classification())
    assert "bad.parquet" in str(error.value)


def test_invalid_rows_can_be_dropped_from_training_and_validation_and_are_counted() -> None:
    rows = {**ROWS, "text": ["" if i in (4, 5, 9) else text for i, text in enumerate(ROWS["text"])]}
    bad, summary = save(rows, "bad.csv"), DataSummary()
    config = files(bad, save({"text": ["fine", ""], "label": [0, 2]}, "eval.csv"), on_invalid="drop")
    train, held = load_samples(config, Classification(labels=["0", "1"]), summary)
    kept = [i for i in range(20) if i not in (4, 5, 9)]
    assert train[:] == {"text_1": [rows["text"][i] for i in kept], "labels": [i % 2 for i in kept]}
    assert held["text_1"] == ["fine"]
    training, validation = summary.report()["dropped"]
    assert training == {
        "source": "data.train_file: bad.csv", "rows": 20, "dropped": 3,
        "first": ["row 5: text is empty", "row 6: text is empty", "row 10: text is empty"],
    }  # fmt: skip
    assert (validation["source"], validation["dropped"]) == ("data.eval_file: eval.csv", 1)
    shown = "3 of 20 rows of data.train_file: bad.csv (row 5: text is empty, row 6: text is empty, row 10: "
    assert shown in summary.lines()["dropped"]


def test_labels_and_classes_with_a_semicolon_are_shown_whole() -> None:
    bad, task = (
        save({"text": [*"abcd"], "label": ["p; q", "r; s", "t; u", ""]}, "bad.csv"),
        Classification(labels=["p; q", "r"]),
    )
    shown = "row 2: label is 'r; s', row 3: label is 't; u', row 4: label is empty"
    with pytest.raises(DataError) as error:
        load_samples(files(bad), task)
    assert str(error.value) == (
        f"data.train_file: {bad}: 3 of 4 rows are invalid ({shown}); every label must be one of p; q, r (data.labels); "
        "data.on_invalid=drop leaves out invalid rows"
    )
    load_samples(files(bad, on_invalid="drop"), task, summary := DataSummary())
    assert summary.lines()["dropped"] == f"3 of 4 rows of data.train_file: {bad} ({shown})"


def test_labels_that_only_dropped_rows_have_are_no_classes() -> None:
    rows = {"text": [*"abcdefgh", "", "i"], "label": [*["9", "10"] * 4, "lines\nof a wrong column", ""]}
    task = Classification()
    train, _ = load_samples(files(save(rows, "bad.csv"), on_invalid="drop"), task)
    assert task.classes == ["9", "10"]
    assert train["labels"] == [0, 1] * 4
    rows["label"] = [*["9"] * 8, "10", "9"]
    with pytest.raises(DataError, match="has only the class 9"):
        load_samples(files(save(rows, "bad.csv"), on_invalid="drop"), Classification())


def test_a_held_out_fraction_is_of_the_valid_rows_and_all_invalid_rows_are_listed() -> None:
    rows = {**ROWS, "text": ["" if i % 2 else text for i, text in enumerate(ROWS["text"])], "label": [0, 0, 1, 1] * 5}
    config = files(save(rows, "bad.csv"), eval_fraction=0.3, on_invalid="drop")
    train, held = load_samples(config, Classification(labels=["0", "1"]), summary := DataSummary())
    assert (len(train), len(held)) == (7, 3)
    assert sorted([*train["text_1"], *held["text_1"]]) == sorted(rows["text"][::2])
    assert [entry["dropped"] for entry in summary.report()["dropped"]] == [10]
    with pytest.raises(DataError, match=r"bad\.csv: 10 of 20 .* \(row 2: .*, row 20: [^…]*\); every .*drop"):
        load_samples(config.replaced(on_invalid="stop"), Classification())
    with pytest.raises(DataError, match=r"2 of 2 rows are invalid .*; use a file with valid rows"):
        load_samples(files(save({"text": ["", ""], "label": [0, 1]}, "a.csv"), on_invalid="drop"), Classification())


def test_a_held_out_fraction_has_each_class_in_its_share() -> None:
    labels = ["a"] * 700 + ["b"] * 280 + ["c"] * 20 + ["once"]
    name = save({"text": [f"text {i}" for i in range(1001)], "label": labels}, "a.csv")
    drawn = set()
    for seed in (0, 1, 2, 3, 4, 4):
        train, held = load_samples(files(name, eval_fraction=0.1, seed=seed), Classification())
        assert sorted([*train["text_1"], *held["text_1"]]) == sorted(f"text {i}" for i in range(1001))
        counts = [held["labels"].count(label) for label in range(4)]
        assert [abs(count - share) <= 1 for count, share in zip(counts, (70, 28, 2, 0), strict=True)] == [True] * 4
        assert (sum(counts), counts[3]) == (100, 0), "the only row of a class is trained on"
        drawn.add(tuple(held["text_1"]))
    assert len(drawn) == 5
    save({"text": [*"abcdefgh"], "label": [*"aaabcccc"]}, "b.csv")
    train, _ = load_samples(files("b.csv", eval_fraction=0.5), Classification())
    assert 1 in train["labels"], "the only row of the class b, the fourth of eight in the order of the classes"
    with pytest.raises(DataError, match=r"c\.csv has only one row, which data\.eval_fraction cannot split"):
        load_samples(
            files(save({"text": ["a"], "label": [0]}, "c.csv"), eval_fraction=0.5), Classification(labels=["0"])
        )


@pytest.mark.parametrize("measured", [1000, 60])
def test_truncation_is_measured_on_all_samples_or_on_a_part_of_them(
    measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_MEASURED", measured)
    texts = ["good " * (1 + i % 100) for i in range(200)]
    config = files(save({"text": texts, "label": [0, 1] * 100}, "a.csv"), max_length=62)
    data = build_data(config, Classification(), model_name="", on_gpu=False)
    truncation = data.summary.truncation
    assert truncation.exact == (measured == 1000)
    assert truncation.fraction == pytest.approx(0.4, abs=1e-9 if truncation.exact else 0.1), "60 words and [CLS], [SEP]"
    assert truncation.length_for_95_percent == pytest.approx(97, abs=0 if truncation.exact else 5)
    said = "40% of the samples are truncated; 97 tokens would keep 95% whole"
    assert str(truncation) == said if truncation.exact else str(truncation).startswith("about ")
    assert data.tokenizer.backend_tokenizer.truncation["max_length"] == 62, "it is exported"
    longer = build_data(config.replaced(max_length=102), Classification(), model_name="", on_gpu=False)
    assert not truncation.exact or str(longer.summary.truncation) == "no sample is truncated"


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.pins
def test_tokens_and_tokenizer_are_cached(task: str) -> None:
    def build(max_length: int) -> tuple[Any, dict[Path, int]]:
        config = DataConfig(
            source="builtin", tokenizer="wordpiece", vocab_size=200, train_samples=40, eval_samples=20,
            length_scale=0.1, max_length=max_length, cache_dir="cache",
        )  # fmt: skip
        data = build_data(config, task_class(task)(), model_name="", on_gpu=False)
        found = {path: path.stat().st_mtime_ns for path in Path("cache").rglob("*") if path.is_file()}
        return data.train.dataloader.dataset.tokens["input_ids"].tolist(), found

    first, made = build(16)
    assert build(16) == (first, made)
    shorter, more = build(4)
    assert len(shorter) < len(first)
    assert more.keys() > made.keys()


def test_padding_to_max_length_and_to_the_longest() -> None:
    rows = Ragged.of({"input_ids": [[5, 6, 7], [8]], "labels": [1, 0]})
    full = Pad(0, 6, longest=False)(rows)
    torch.testing.assert_close(full["input_ids"], torch.tensor([[5, 6, 7, 0, 0, 0], [8, 0, 0, 0, 0, 0]]))
    torch.testing.assert_close(full["attention_mask"], torch.tensor([[1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]]))
    assert full["labels"].tolist() == [1, 0]
    assert Pad(0, 6, longest=True, multiple=1)(rows)["input_ids"].shape == (2, 3)
    assert Pad(0, 9, longest=True, multiple=4)(rows)["input_ids"].shape == (2, 4)
    assert Pad(0, 3, longest=True, multiple=8)(rows)["input_ids"].shape == (2, 3), "never past max_length"


def test_loaders_count_real_tokens_and_follow_the_keys() -> None:
    name = save(ROWS, "a.parquet")
    config = files(name, name, batch_size=8, eval_batch_size=8, drop_last=True, padding="longest", workers=1)
    data = build_data(config, Classification(), model_name="unused", on_gpu=False)
    batches = list(data.train.dataloader)
    assert [len(b["labels"]) for b in batches] == [8, 8]
    assert [len(b["labels"]) for b in data.eval.dataloader] == [8, 8, 4], "evaluation keeps its last batch"
    assert data.train.get_num_tokens_in_batch(batches[0]) == int(batches[0]["attention_mask"].sum())
    assert data.train.dataloader.num_workers == 1
    with pytest.raises(ConfigError, match=r"data\.drop_last: the 20 training samples do not fill one batch of 64"):
        build_data(config.replaced(batch_size=64), Classification(), model_name="", on_gpu=False)


def test_ranks_that_cannot_share_a_batch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer.utils.dist.get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"data\.batch_size: 7 samples cannot be shared by 2 ranks"):
        build_data(files("a.csv", batch_size=7), Classification(), model_name="", on_gpu=False)


def test_classes_include_those_that_only_held_out_rows_have() -> None:
    rows = {"text": [f"text {i}" for i in range(12)], "label": ["b", "a", *"cdefghijkl"]}
    task = Classification()
    train, held = load_samples(files(save(rows, "a.csv"), eval_fraction=0.25), task)
    assert (len(train), len(held)) == (9, 3)
    assert task.labels == sorted(rows["label"])
    assert not set(train["labels"]) & set(held["labels"])


def test_a_bad_row_is_numbered_as_in_the_file_despite_held_out_rows() -> None:
    name = save({"text": ["a", "b", "c", "d", " ", "f"], "label": [0, 1] * 3}, "a.csv")
    for seed in range(4):
        with pytest.raises(DataError, match=r"^data\.train_file: a\.csv, row 5: text is empty"):
            load_samples(files(name, eval_fraction=0.5, seed=seed), Classification())


@pytest.mark.pins
def test_wordpiece_has_the_same_ids_in_every_training_and_is_otherwise_stock() -> None:
    reviews = builtin_reviews(200, seed=17, split="train")["text"]

    def trained(cache: str, vocab_size: int = 400) -> Any:
        config = DataConfig(tokenizer="wordpiece", vocab_size=400, cache_dir=cache)
        config.vocab_size = vocab_size  # also one that the key does not accept
        return load_tokenizer(config, "unused", reviews).backend_tokenizer

    tokenizers = [trained(f"cache{i}") for i in range(4)]  # every training hashes differently
    assert len(tokenizers[0].get_vocab()) == 400
    assert all(tokenizer.get_vocab() == tokenizers[0].get_vocab() for tokenizer in tokenizers)
    special = [token.content for token in tokenizers[0].get_added_tokens_decoder().values()]
    assert special == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert tokenizers[0].encode("##e", add_special_tokens=False).tokens == ["[UNK]", "[UNK]", "e"], "no review has a #"
    parts = tokenizers[0].encode("goodishly", add_special_tokens=False).tokens
    assert [part.startswith("##") for part in parts] == [False] + [True] * (len(parts) - 1)
    few = trained("few", vocab_size=40)  # fewer than the characters: the alphabet is kept whole
    assert all("[UNK]" not in encoded.tokens for encoded in few.encode_batch(reviews))
