"""Samples from files, hub folders and the generator: bad rows are named, caches are used, batches are padded."""

from __future__ import annotations

import hashlib
import json
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
from composer_speedups.data.tokens import load_tokenizer, tokenize
from composer_speedups.tasks.classification import Classification
from composer_speedups.tasks.mlm import MaskedLanguageModelling
from composer_speedups.tasks.settings import TASKS
from composer_speedups.tasks.task import task_class
from composer_speedups.train.config.schema import DataConfig
from tests.data.samples import ROWS, files, save


def test_columns_may_have_other_names_and_text_may_have_line_breaks() -> None:
    rows = {"review": ['one\n"two", three'] * 2, "y": [1, 0], "more": [3, 4]}
    for name in ("a.csv", "a.parquet", "a.jsonl"):
        train, _ = load_samples(files(save(rows, name)), Classification(text_columns=["review"], label_column="y"))
        assert train[:] == {"text_1": rows["review"], "labels": rows["y"]}


def test_drawn_samples_are_random_seeded_and_unique() -> None:
    name = save(ROWS, "a.parquet")
    first, _ = load_samples(files(name, train_samples=8), Classification())
    again, _ = load_samples(files(name, train_samples=8), Classification())
    other, _ = load_samples(files(name, train_samples=8, seed=3), Classification())
    assert len(set(first["text_1"])) == 8
    assert first["text_1"] == again["text_1"] != other["text_1"]


def test_all_rows_of_a_file_are_used_by_default() -> None:
    rows = {"text": [f"text {i}" for i in range(8001)], "label": [0, 1, 0] * 2667}
    train, held = load_samples(files(save(rows, "a.csv"), "a.csv"), Classification())
    assert held is not None
    assert len(train) == len(held) == 8001


@pytest.mark.pins
def test_a_local_folder_is_read_under_its_hub_name() -> None:
    folder = Path("stanfordnlp/imdb/data")
    folder.mkdir(parents=True)
    save(ROWS, str(folder / "train-00000.parquet"))
    save({"text": ["Test."], "label": [1]}, str(folder / "test-00000.parquet"))
    train, evaluation = load_samples(DataConfig(hub_name="stanfordnlp/imdb", train_samples=5), Classification())
    assert len(train) == 5
    assert evaluation is not None
    assert evaluation[:] == {"text_1": ["Test."], "labels": [1]}


def test_an_unreachable_hub_names_the_key_and_alternatives() -> None:
    with pytest.raises(
        DataError, match=r"data\.hub_name 'no/such', split 'train': cannot be loaded .*data\.source=files"
    ):
        load_samples(DataConfig(hub_name="no/such"), Classification())


BAD_ROWS: list[tuple[dict[str, Any], str]] = [
    (
        {"txt": ["a"], "label": [1]},
        r"has no column 'text'; did you mean 'txt'\? \(it has: txt, label\); set data\.text_columns",
    ),
    ({"text": ["a"], "lable": [1]}, r"has no column 'label'"),
    ({"text": ["a", ""], "label": [1, 0]}, "row 2: text is empty"),
    ({"text": ["a", " \n"], "label": [1, 0]}, "row 2: text is empty"),
    ({"text": ["a", None], "label": [1, 0]}, "row 2: text is empty"),
    ({"text": ["a", "b", "c"], "label": [1, 0, -1]}, "row 3: label is -1; every label must be one of 0, 1"),
    ({"text": ["a", "b", "c"], "label": [0, 1, None]}, "row 3: label is empty; every label must be one of 0, 1"),
    (
        {"text": ["a", "b"], "label": ["pos", "pos"]},
        "the column label has only the class pos; there must be two or more",
    ),
    (
        {"text": ["a", "b", "c"], "label": [1.0, 0.0, 0.5]},
        r"row 3: label is 0\.5, which is not a class; .* model\.task=regression",
    ),
    ({"text": [3, 4], "label": [0, 1]}, "row 1: text is 3"),
    (
        {"text": pyarrow.array([], pyarrow.string()), "label": pyarrow.array([], pyarrow.int64())},
        "has no rows",
    ),
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
    assert held is not None
    kept = [i for i in range(20) if i not in (4, 5, 9)]
    assert train[:] == {"text_1": [rows["text"][i] for i in kept], "labels": [i % 2 for i in kept]}
    assert held["text_1"] == ["fine"]
    training, validation = summary.report()["dropped"]
    assert training == {
        "source": "data.train_file: bad.csv", "rows": 20, "dropped": 3,
        "first": ["row 5, headers not counted: text is empty", "row 6: text is empty", "row 10: text is empty"],
    }  # fmt: skip
    assert (validation["source"], validation["dropped"]) == ("data.eval_file: eval.csv", 1)
    shown = (
        "3 of 20 rows of data.train_file: bad.csv (row 5, headers not counted: text is empty, row 6: text is empty, "
    )
    assert shown in summary.lines()["dropped"]


def test_labels_that_only_dropped_rows_have_are_no_classes() -> None:
    rows = {"text": [*"abcdefgh", "", "i"], "label": [*["9", "10"] * 4, "a text in the wrong column", ""]}
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
    assert held is not None
    assert (len(train), len(held)) == (7, 3)
    assert sorted([*train["text_1"], *held["text_1"]]) == sorted(rows["text"][::2])
    assert [entry["dropped"] for entry in summary.report()["dropped"]] == [10]
    with pytest.raises(DataError, match=r"bad\.csv: 10 of 20 .* \(row 2, .*, row 20: [^…]*\); every .*drop"):
        load_samples(config.replaced(on_invalid="stop"), Classification())
    name = save({"text": ["", ""], "label": [0, 1]}, "none.csv")
    with pytest.raises(DataError, match=r"2 of 2 rows are invalid .*; use a file with valid rows"):
        load_samples(files(name, on_invalid="drop"), Classification())
    with pytest.raises(ConfigError, match=r"on_invalid drop counts invalid rows up front; streaming cannot"):
        files("bad.csv", streaming=True, on_invalid="drop")


def test_a_held_out_fraction_has_each_class_in_its_share() -> None:
    labels = ["a"] * 700 + ["b"] * 280 + ["c"] * 20 + ["once"]
    name = save({"text": [f"text {i}" for i in range(1001)], "label": labels}, "a.csv")
    drawn = set()
    for seed in range(5):
        train, held = load_samples(files(name, eval_fraction=0.1, seed=seed), Classification())
        assert held is not None
        assert sorted([*train["text_1"], *held["text_1"]]) == sorted(f"text {i}" for i in range(1001))
        counts = [held["labels"].count(label) for label in range(4)]
        assert [abs(count - share) <= 1 for count, share in zip(counts, (70, 28, 2, 0), strict=True)] == [True] * 4
        assert (sum(counts), counts[3]) == (100, 0), "the only row of a class is trained on"
        drawn.add(tuple(held["text_1"]))
    assert len(drawn) == 5
    save({"text": [*"abcdefgh"], "label": [*"aaabcccc"]}, "b.csv")
    train, _ = load_samples(files("b.csv", eval_fraction=0.5), Classification())
    assert 1 in train["labels"], "the only row of the class b, the fourth of eight in the order of the classes"


@pytest.mark.parametrize("measured", [1000, 40])
def test_truncation_is_measured_exactly_or_on_a_part_of_the_full_rows(
    measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_MEASURED", measured)
    texts = ["good " * (1 + i % 100) for i in range(200)]
    config = files(save({"text": texts, "label": [0, 1] * 100}, "a.csv"), max_length=62)
    data = build_data(config, Classification(), model_name="", on_gpu=False)
    truncation = data.summary.truncation
    assert truncation is not None
    assert truncation.exact == (measured == 1000)
    tolerance = 0 if truncation.exact else 0.1
    assert truncation.fraction == pytest.approx(0.4, abs=max(tolerance, 1e-9)), "60 words and two special tokens fit"
    assert truncation.length_for_95_percent == pytest.approx(97, rel=tolerance / 2)
    said = "40% of the samples are truncated; 97 tokens would keep 95% whole"
    assert not truncation.exact or str(truncation) == said
    assert data.tokenizer.backend_tokenizer.truncation["max_length"] == 62, "it is exported"
    longer = build_data(config.replaced(max_length=102), Classification(), model_name="", on_gpu=False)
    assert str(longer.summary.truncation) == "no sample is truncated"


@pytest.mark.pins
def test_tokens_and_tokenizer_are_cached() -> None:
    config = files(save(ROWS, "a.parquet"))
    train, _ = load_samples(config, Classification())
    tokenizer = load_tokenizer(config, "unused", train["text_1"])
    assert tokenizer.decode(tokenizer("it is good")["input_ids"]) == "[CLS] it is good [SEP]"
    tokens = tokenize(train, tokenizer, config, Classification())
    assert max(map(len, tokens["input_ids"])) <= 16
    made = {p: p.stat().st_mtime_ns for p in Path("cache").rglob("*") if p.is_file()}
    again = tokenize(train, load_tokenizer(config, "unused", train["text_1"]), config, Classification())
    assert again[:] == tokens[:]
    assert {p: p.stat().st_mtime_ns for p in Path("cache").rglob("*") if p.is_file()} == made
    shorter = tokenize(train, tokenizer, config.replaced(max_length=4), Classification())
    assert max(map(len, shorter["input_ids"])) == 4


def test_a_tokenizer_that_cannot_be_loaded_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"data\.tokenizer: 'no-such-folder' cannot be loaded .*; use a local folder"):
        load_tokenizer(DataConfig(tokenizer="no-such-folder"), "x", ROWS["text"])
    with pytest.raises(ConfigError, match=r"there is no folder no-such-folder \(relative to /.*\); use a local folder"):
        load_tokenizer(DataConfig(tokenizer="no-such-folder"), "x", ROWS["text"])
    with pytest.raises(ConfigError, match=r"data\.tokenizer: /no/folder is not a folder"):
        load_tokenizer(DataConfig(tokenizer="/no/folder"), "x", ROWS["text"])


def test_a_cache_that_cannot_be_written_is_refused_in_one_line() -> None:
    Path("file").write_text("")
    config = files("a.csv", cache_dir="file/cache", tokenizer="wordpiece")
    with pytest.raises(ConfigError, match=r"data\.cache_dir: file/cache/tokenizers \(relative .*\) cannot be created"):
        load_tokenizer(config, "x", ROWS["text"])


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
    assert data.eval is not None
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


def test_masked_lm_batches_mask_real_tokens_only() -> None:
    config = files(save(ROWS, "a.parquet"), batch_size=20)
    data = build_data(config, MaskedLanguageModelling(mlm_probability=0.5), model_name="unused", on_gpu=False)
    batch = next(iter(data.train.dataloader))
    chosen = batch["labels"] != -100
    assert chosen.any()
    assert not chosen[batch["attention_mask"] == 0].any()
    assert not chosen[:, 0].any(), "[CLS] is never masked"
    assert (batch["input_ids"][chosen] == data.tokenizer.mask_token_id).float().mean() > 0.5


@pytest.mark.pins
def test_built_in_reviews_are_reproducible() -> None:
    reviews = builtin_reviews(50, 17, "train")
    digest = hashlib.sha256(json.dumps(reviews).encode()).hexdigest()
    assert digest.startswith("48726a9c6935cfe3"), digest
    assert builtin_reviews(50, 17, "eval")["text"] != reviews["text"]
    assert builtin_reviews(50, 18, "train")["text"] != reviews["text"]


def test_built_in_reviews_have_imdbs_lengths() -> None:
    words = torch.tensor([len(t.split()) for t in builtin_reviews(3000, 1, "train")["text"]]).double()
    assert 215 < words.mean() < 250
    assert 160 < words.median() < 195
    assert words.max() > 1000
    short = builtin_reviews(500, 1, "train", 0.12)["text"]
    assert sum(len(t.split()) for t in short) / 500 < 45


@pytest.mark.exhaustive
@pytest.mark.parametrize("length_scale", [0.12, 1.0])
def test_counting_words_does_not_solve_the_built_in_reviews(length_scale: float) -> None:
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    train, evaluation = (builtin_reviews(n, 17, s, length_scale) for n, s in [(6000, "train"), (2000, "eval")])
    unigrams = CountVectorizer()
    model = LogisticRegression(max_iter=2000).fit(unigrams.fit_transform(train["text"]), train["label"])
    accuracy = model.score(unigrams.transform(evaluation["text"]), evaluation["label"])
    assert 0.55 < accuracy <= 0.75
    positive = " ".join(t for t, y in zip(train["text"], train["label"], strict=True) if y).split()
    negative = " ".join(t for t, y in zip(train["text"], train["label"], strict=True) if not y).split()
    for word in ("wonderful", "dull"):
        assert any(w.startswith(word) for w in positive)
        assert any(w.startswith(word) for w in negative)


@pytest.mark.parametrize("task", TASKS)
def test_the_token_cache_is_used_by_every_task(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DataConfig(
        source="builtin",
        tokenizer="wordpiece",
        vocab_size=200,
        train_samples=40,
        eval_samples=20,
        length_scale=0.1,
        max_length=4096,  # otherwise truncated texts are tokenized again, to measure them
    )

    def build() -> dict[str, Any]:
        kind = task_class(task)()
        data = build_data(config, kind, model_name="", on_gpu=False)
        return {name: array.tolist() for name, array in data.train.dataloader.dataset.tokens.items()}

    first = build()

    def encode(*_: Any) -> Any:
        raise AssertionError("tokenized again")

    monkeypatch.setattr(task_class(task), "encode", encode)
    assert build() == first


def test_classes_include_those_that_only_held_out_rows_have() -> None:
    rows = {"text": [f"text {i}" for i in range(12)], "label": ["b", "a", *"cdefghijkl"]}
    task = Classification()
    train, held = load_samples(files(save(rows, "a.csv"), eval_fraction=0.25), task)
    assert held is not None
    assert (len(train), len(held)) == (9, 3)
    assert task.labels == sorted(rows["label"])
    assert not set(train["labels"]) & set(held["labels"])


@pytest.mark.parametrize("seed", range(4))
def test_a_bad_row_is_numbered_as_in_the_file_despite_held_out_rows(seed: int) -> None:
    name = save({"text": ["a", "b", "c", "d", " ", "f"], "label": [0, 1] * 3}, "a.csv")
    with pytest.raises(DataError, match=r"^data\.train_file: a\.csv, row 5, headers not counted: text is empty"):
        load_samples(files(name, eval_fraction=0.5, seed=seed), Classification())
