"""File formats, folders, hub configurations, held-out fractions, class names, and truncated text pairs."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value

from composer_speedups.core.errors import DataError
from composer_speedups.data.config import DataConfig
from composer_speedups.data.loader import build_data
from composer_speedups.data.sources import load_samples, read_file
from composer_speedups.data.tokens import load_tokenizer
from composer_speedups.tasks.classification import Classification
from composer_speedups.tasks.multilabel import Multilabel
from composer_speedups.tasks.regression import Regression
from composer_speedups.tasks.task import Task
from composer_speedups.tasks.token_classification import TokenClassification
from tests.helpers.stand_ins import GLUE, make_glue, save_rows

Rows = dict[str, list[Any]]
ROWS: Rows = {"text": [f"It is text {i}" for i in range(6)], "label": ["no", "yes"] * 3}
TAGGED: Rows = {"tokens": [["New", "York", "!"], ["Ann"]], "ner_tags": [["B-LOC", "I-LOC", "O"], ["B-PER"]]}
NAMED = Features({"text": Value("string"), "label": ClassLabel(names=["yes", "no"])})


def save(rows: Rows, name: str) -> str:
    table, path = pyarrow.table(rows), Path(name)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
    elif path.suffix == ".conll":
        pairs = (zip(*row.values(), strict=True) for row in table.to_pylist())
        sentences = ("\n".join(f"{word} NN O {tag}" for word, tag in each) for each in pairs)
        path.write_text("-DOCSTART- -X- -X- O\n\n" + "\n\n".join(sentences) + "\n")
    elif path.suffix == ".tsv":
        lines = ["\t".join(rows), *("\t".join(map(str, row)) for row in zip(*rows.values(), strict=True))]
        path.write_text("".join(f"{line}\n" for line in lines))
    else:
        pyarrow.csv.write_csv(table, path)
    return name


Loaded = list[Any]


def load(name: str, task: Task | None = None, evaluation: str | None = None, **settings: Any) -> Loaded:
    """Return the columns of the training samples and of the validation samples (None without them)."""
    config = DataConfig(source="files", train_file=name, eval_file=evaluation, train_samples=None, **settings)
    return [None if each is None else each[:] for each in load_samples(config, task or Classification())]


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("[" * 200 + "]" * 200, 2),
        ('{"a":' * 200 + "1" + "}" * 200, 2),
        ("[\n" * 200 + "]" * 200, 51),  # Arrow reads across lines
        ('["]]]]]]", "\\\\", "\\"]]]]",' * 200 + "1" + "]" * 200, 2),  # strings with brackets and quotes
    ],
    ids=["lists", "mappings", "lines", "strings"],
)
def test_deeply_nested_json_is_refused_in_one_line(value: str, line: int) -> None:
    """10,000 levels hang Arrow's parser, and 100,000 end the process."""
    Path("deep.jsonl").write_text(f'{{"text": "a", "label": "b"}}\n{{"text": "a", "label": "b", "x": {value}}}\n')
    with pytest.raises(
        DataError, match=rf"^input: deep\.jsonl cannot be read \(line {line} is nested deeper than 50 levels; remove"
    ):
        read_file(Path("deep.jsonl"), "input")


def test_brackets_in_texts_are_not_nesting() -> None:
    texts = ["[" * 200, '"[' * 200, "\\" + '"{' * 200, "}]" * 200, "{\n" * 200]
    rows = [{"text": text, "label": "no", "x": [[[0, 1]] * 60]} for text in texts]
    Path("flat.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows * 3))
    assert read_file(Path("flat.jsonl"), "input").to_pylist() == rows * 3


EXPECTED = {"text_1": ROWS["text"], "labels": [0, 1] * 3}


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
@pytest.mark.parametrize("labels", [["no", "yes"] * 3, [0, 1] * 3, [4, 7] * 3])
def test_labels_are_strings_or_integers_in_each_format(suffix: str, labels: list[Any]) -> None:
    rows = {**ROWS, "label": labels}
    for name in (f"a.{suffix}", f"a.{suffix.upper()}"):
        task = Classification()
        written = save(rows, f"a.{suffix}")
        Path(written).rename(name)
        assert load(name, task) == [EXPECTED, None]
        assert task.labels == [str(label) for label in labels[:2]]


def test_quotes_are_literal_in_tsv_and_parsed_in_csv() -> None:
    text = ['"Quoted" at the start', 'an inch is 1"', "a, b", "plain"]
    rows = {"text": text, "label": [0, 1, 0, 1]}
    for name in ("a.tsv", "a.csv"):
        assert load(save(rows, name))[0] == {"text_1": text, "labels": [0, 1, 0, 1]}


def test_a_pattern_reads_all_matching_files_in_order() -> None:
    Path("parts").mkdir()
    for i in range(3):
        save({name: values[2 * i : 2 * i + 2] for name, values in ROWS.items()}, f"parts/part-{i}.csv")
    assert load("parts/part-*.csv")[0] == EXPECTED
    save({"text": ["x"], "label": [3]}, "parts/part-3.csv")
    with pytest.raises(DataError, match=r"parts/part-\*\.csv: the files have different columns"):
        load("parts/part-*.csv")
    with pytest.raises(DataError, match=r"data\.train_file: there is no file other-\*\.csv \(relative to /"):
        load("other-*.csv")
    save({"text": ["x", ""], "label": ["no", "no"]}, "parts/part-3.csv")
    with pytest.raises(DataError, match=r"parts/part-\*\.csv, row 8: text is empty"):
        load("parts/part-*.csv")


def test_a_folder_that_datasets_wrote_is_read_with_its_class_names() -> None:
    dataset = Dataset.from_dict({**ROWS, "label": [1, 0] * 3}, NAMED)
    dataset.save_to_disk("saved")
    dataset.select([5, 0]).save_to_disk("part")
    task = Classification()
    train, evaluation = load("saved", task, "part")
    assert train == {"text_1": ROWS["text"], "labels": [1, 0] * 3}
    assert evaluation == {"text_1": [ROWS["text"][5], ROWS["text"][0]], "labels": [0, 1]}
    assert task.labels == ["yes", "no"], "in the dataset's order"
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk("splits")
    with pytest.raises(DataError, match=r"splits contains the splits train, test; name .* such as splits/train"):
        load("splits")
    assert load("splits/train")[0] == train
    Path("empty").mkdir()
    with pytest.raises(DataError, match=r"empty is not a folder that datasets\.save_to_disk .* as empty/\*\.parquet"):
        load("empty")


@pytest.mark.parametrize("suffix", ["conll", "jsonl", "parquet"])
def test_words_and_tags_are_read(suffix: str) -> None:
    task = TokenClassification()
    train, _ = load(save(TAGGED, f"a.{suffix}"), task)
    assert task.labels == ["B-LOC", "B-PER", "I-LOC", "O"]
    assert train == {"text_1": TAGGED["tokens"], "labels": [[0, 2, 3], [1]]}


def test_a_conll_line_without_a_tag_is_named() -> None:
    Path("a.conll").write_text("# id 1\nAnn B-PER\nran\n")
    with pytest.raises(DataError, match=r"a\.conll cannot be read \(line 3 has a word without a tag: ran\)"):
        load("a.conll", TokenClassification())
    Path("a.conll").write_text("# id 1\nAnn B-PER\nran O\n \nBob\tB-PER")
    assert load("a.conll", TokenClassification())[0] == {"text_1": [["Ann", "ran"], ["Bob"]], "labels": [[0, 1], [0]]}


def test_class_names_of_label_lists_come_from_the_dataset() -> None:
    features = Features({"text": Value("string"), "labels": List(ClassLabel(names=["joy", "anger", "fear"]))})
    save_rows(Path("a.parquet"), {"text": ["a", "b"], "labels": [[2, 0], []]}, features)
    task = Multilabel()
    assert load("a.parquet", task)[0] == {"text_1": ["a", "b"], "labels": [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]}
    assert task.labels == ["joy", "anger", "fear"]


def test_configured_labels_order_the_head_and_refuse_other_labels() -> None:
    task = Classification(labels=["yes", "no"])
    assert load(save(ROWS, "a.csv"), task)[0] == {**EXPECTED, "labels": [1, 0] * 3}
    with pytest.raises(DataError, match=r"b\.csv, row 2: label is 'maybe'; it must be one of yes, no \(data\.labels\)"):
        load("a.csv", task, save({"text": ["a", "b"], "label": ["no", "maybe"]}, "b.csv"))


def test_regression_labels_are_read_and_nonfinite_ones_are_named() -> None:
    scores: Rows = {"text": ["a", "b", "c"], "label": [1, 2.5, -3.0]}
    assert load(save(scores, "a.csv"), Regression())[0] == {"text_1": ["a", "b", "c"], "labels": [1.0, 2.5, -3.0]}
    for bad, shown in ((float("nan"), "nan"), (None, "empty"), (float("inf"), "inf")):
        name = save({**scores, "label": [1.0, bad, 2.0]}, "b.parquet")
        with pytest.raises(DataError, match=rf"b\.parquet, row 2: label is {shown}; it must be a finite number"):
            load(name, Regression())


def test_held_out_rows_are_not_trained_on() -> None:
    rows: Rows = {"text": [f"text {i}" for i in range(50)], "label": [0, 1] * 25}
    name = save(rows, "a.csv")
    train, held = load(name, eval_fraction=0.2)
    assert train is not None
    assert held is not None
    assert (len(train["text_1"]), len(held["text_1"])) == (40, 10)
    assert sorted(train["text_1"] + held["text_1"]) == sorted(rows["text"])
    assert load(name, eval_fraction=0.2) == [train, held]
    assert load(name, eval_fraction=0.2, seed=3)[1] != held
    two = save({"text": ["a", "b"], "label": [0, 1]}, "b.csv")
    assert load(two, Classification(labels=["0", "1"]), eval_fraction=0.01)[1] is not None, "at least one row"
    with pytest.raises(DataError, match=r"c\.csv has only one row, which data\.eval_fraction cannot split"):
        load(save({"text": ["a"], "label": [0]}, "c.csv"), eval_fraction=0.5)


@pytest.mark.parametrize("name", ["mrpc", "mnli"])
@pytest.mark.usefixtures("datasets_cache")
def test_a_hub_configuration_is_read_with_its_splits_and_class_names(name: str) -> None:
    make_glue(Path("nyu-mll/glue"), [f"text {i}" for i in range(20)])
    texts, classes = GLUE[name]
    split = "validation_matched" if name == "mnli" else "validation"
    task = Classification(text_columns=texts)
    config = DataConfig(hub_name="nyu-mll/glue", hub_config=name, eval_split=split, train_samples=None)
    train, evaluation = load_samples(config, task)
    assert task.labels == classes
    assert train[0] == {"text_1": "text 0", "text_2": "text 1", "labels": 0}
    assert evaluation is not None
    with pytest.raises(DataError, match="hub_name 'nyu-mll/glue', split 'test': cannot be"):
        load_samples(DataConfig(hub_name="nyu-mll/glue", hub_config=name), task)
    with pytest.raises(
        DataError, match=rf"no column 'text' \(it has: {', '.join(texts)}, label, idx\); set data\.text_co"
    ):
        load_samples(config, Classification())


def test_configuration_and_revision_reach_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(*args: Any, **kwargs: Any) -> Dataset:
        calls.append((args, kwargs))
        return Dataset.from_dict(ROWS)

    monkeypatch.setattr("composer_speedups.data.sources.load_dataset", load_dataset)
    load_samples(DataConfig(hub_name="a/b", hub_config="c", hub_revision="v2", eval_split=None), Classification())
    assert calls == [(("a/b", "c"), {"split": "train", "revision": "v2"})]


def test_a_label_of_minus_one_is_refused_as_missing() -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    save_rows(Path("a.parquet"), {"text": ["a", "b"], "label": [0, -1]}, features)
    with pytest.raises(DataError, match=r"a\.parquet, row 2: label is empty; it must be one of no, yes"):
        load("a.parquet")


def test_missing_labels_are_refused_although_a_class_is_called_none() -> None:
    texts, tags = [*"abcd"], ["O", "None"]
    missing: list[tuple[str, Rows, Task, str]] = [
        ("a.csv", {"text": texts, "label": ["None", "", "yes", ""]}, Classification(), "label is empty"),
        ("a.parquet", {"text": texts, "label": ["None", None, "yes", None]}, Classification(), "label is empty"),
        ("b.parquet", {"text": texts[:2], "label": [1.0, 0.5]}, Classification(labels=["1", "None"]), "label is 0.5"),
        ("c.parquet", {"tokens": [["a", "b"]], "ner_tags": [["O", None]]}, TokenClassification(labels=tags), "empty"),
        ("d.parquet", {"text": ["a"], "labels": [["joy", None]]}, Multilabel(labels=["joy", "None"]), "empty"),
    ]
    for name, rows, task, said in missing:
        with pytest.raises(DataError, match=rf"^data\.train_file: {name}, row \d: .*{said}"):
            load(save(rows, name), task)
    with pytest.raises(DataError, match=r"a\.csv, row 2: label is empty; .* None, yes .*; 2 rows are invalid: 2, 4$"):
        load("a.csv")
    many: Rows = {"text": ["a"] * 3000, "label": ["", "no", "yes"] * 1000}
    with pytest.raises(DataError, match=r"row 1: .*; 1,000 rows are invalid: 1, 4, 7, 10, 13, …$"):
        load(save(many, "e.csv"))


def test_labels_may_be_dates_or_whole_decimals_and_other_types_are_named() -> None:
    when = [date(2026, 11, day) for day in (24, 25)]
    decimals = [Decimal("1.00"), Decimal("2.00")]
    task = Classification()
    assert load(save({"text": ["a", "b"], "label": when[::-1]}, "a.csv"), task)[0] is not None
    assert task.labels == ["2026-11-24", "2026-11-25"], "Arrow reads a CSV's names as dates"
    assert load(save({"text": ["a", "b"], "label": decimals}, "b.parquet"), task := Classification())[0] is not None
    assert task.labels == ["1", "2"]
    rows: Rows = {"text": ["a", "b"], "label": [Decimal("1.50"), Decimal("2.00")]}
    with pytest.raises(DataError, match=r"row 1: label is Decimal\('1\.50'\), which is not a class; for numbers set"):
        load(save(rows, "c.parquet"), Classification(labels=["1", "2"]))
    with pytest.raises(DataError, match=r"the column label holds b'x'; a class is text or an integer$"):
        load(save({"text": ["a", "b"], "label": [b"x", b"y"]}, "d.parquet"))


def test_rows_of_megabytes_are_read() -> None:
    rows: Rows = {"text": ["a", "long " * 600_000, "c"], "label": [0, 1, 0]}
    for suffix in ("csv", "tsv", "jsonl"):
        assert load(save(rows, f"a.{suffix}"))[0] == {"text_1": rows["text"], "labels": [0, 1, 0]}, suffix


def test_a_byte_order_mark_is_not_text() -> None:
    for suffix, text in (
        ("conll", "New NN O B-LOC\n"),
        ("conll", "-DOCSTART- -X- -X- O\n\nNew NN O B-LOC\n"),
        ("txt", "New\n"),
        ("csv", "text,label\nNew,1\n"),
        ("tsv", "text\tlabel\nNew\t1\n"),
        ("jsonl", '{"text": "New", "label": 1}\n'),
    ):
        path = Path(f"a.{suffix}")
        path.write_text(text, encoding="utf-8-sig")
        (row,) = read_file(path, "key").to_pylist()
        assert row[next(iter(row))] == (["New"] if suffix == "conll" else "New"), suffix


@pytest.mark.parametrize(
    "metadata",
    ["no JSON", '{"info": {"features": {"text": 3}}}', '{"info": {"features": {"label": {"_type": "Nope"}}}}', b"\xff"],
)
def test_invalid_metadata_of_a_parquet_file_is_named(metadata: str | bytes) -> None:
    table = pyarrow.table(ROWS).replace_schema_metadata({"huggingface": metadata})
    pyarrow.parquet.write_table(table, "a.parquet")
    with pytest.raises(DataError, match=r"^data\.train_file: a\.parquet: the metadata 'huggingface', .* is invalid \("):
        load("a.parquet")


PAIRS: Rows = {
    "one": ["a short one", " ".join(f"w{i}" for i in range(30)), "mid " * 9],
    "two": [" ".join(f"v{i}" for i in range(30)), "short", "dle " * 9],
    "label": [0, 1, 0],
}


@pytest.mark.parametrize("truncation", ["longest_first", "only_first", "only_second"])
def test_pairs_are_truncated_and_typed_as_by_the_tokenizer(truncation: Any) -> None:
    rows = PAIRS
    if truncation != "longest_first":  # keep the rows whose other text fits
        keep = [1, 2] if truncation == "only_first" else [0, 2]
        rows = {name: [values[i] for i in keep] for name, values in PAIRS.items()}
    name = save(rows, "a.jsonl")
    config = DataConfig(
        source="files",
        train_file=name,
        eval_file=name,
        tokenizer="wordpiece",
        vocab_size=200,
        max_length=60,
        batch_size=3,
    )
    task = Classification(text_columns=["one", "two"], truncation=truncation, labels=["0", "1"])
    data = build_data(config, task, model_name="", on_gpu=False)
    assert data.eval is not None
    (batch,) = list(data.eval.dataloader)
    tokenizer = load_tokenizer(config, "", rows["one"] + rows["two"])
    expected = tokenizer(
        rows["one"], rows["two"], truncation=truncation, max_length=60, padding="max_length", return_tensors="pt"
    )
    assert set(batch) == {"input_ids", "attention_mask", "token_type_ids", "labels"}
    for key in expected:
        assert batch[key].equal(expected[key]), key
    assert batch["token_type_ids"].any()


def test_a_pair_that_the_strategy_cannot_truncate_is_refused_in_one_line() -> None:
    name = save(PAIRS, "a.jsonl")
    config = DataConfig(source="files", train_file=name, tokenizer="wordpiece", vocab_size=200, max_length=16)
    task = Classification(text_columns=["one", "two"], truncation="only_second")
    with pytest.raises(
        DataError,
        match=r"^data\.truncation: only_second cannot cut .*max_length=16, .* longest_first",
    ):
        build_data(config, task, model_name="", on_gpu=False)


def test_a_column_of_two_types_is_named() -> None:
    Path("rows.jsonl").write_text('{"text": "a", "label": 1.5}\n{"text": "b", "label": "many"}\n')
    message = r"rows\.jsonl: the column 'label' has both number and string values; use one type"
    with pytest.raises(DataError, match=message):
        read_file(Path("rows.jsonl"), "data.train_file")
