"""File formats, folders, patterns and their errors, the same for samples in memory and for streams; hub configurations
and truncated text pairs."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zipfile
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value
from transformers import EsmTokenizer

from composer_speedups.core.errors import ConfigError, DataError
from composer_speedups.data.loader import build_data
from composer_speedups.data.paths import find_files
from composer_speedups.data.reader import check_data_files, load_rows
from composer_speedups.data.sources import load_samples
from composer_speedups.data.tokens import load_tokenizer
from composer_speedups.tasks.classification import Classification
from composer_speedups.tasks.embedding import Embedding
from composer_speedups.tasks.mlm import MaskedLanguageModelling
from composer_speedups.tasks.multilabel import Multilabel
from composer_speedups.tasks.regression import Regression
from composer_speedups.tasks.settings import DataConfig
from composer_speedups.tasks.task import Task
from composer_speedups.tasks.token_classification import TokenClassification
from tests.data.samples import READERS, ROWS, Reader, Rows, files, in_memory, save, streamed
from tests.helpers.stand_ins import GLUE, make_glue, save_rows

TAGGED: Rows = {"tokens": [["New", "York", "!"], ["Ann"]], "ner_tags": [["B-LOC", "I-LOC", "O"], ["B-PER"]]}
NAMED = Features({"text": Value("string"), "label": ClassLabel(names=["yes", "no"])})

pytestmark = pytest.mark.pins
both = pytest.mark.parametrize("read", READERS)


@both
@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet", "CSV", "PARQUET"])
@pytest.mark.parametrize("labels", [["no", "yes"], [0, 1], [4, 7], [9, 10]])
def test_labels_are_names_or_integers_in_each_format(suffix: str, labels: list[Any], read: Reader) -> None:
    written = save({**ROWS, "label": labels * 10}, f"a.{suffix.lower()}")
    name = str(Path(written).rename(f"a.{suffix}"))
    task = Classification()
    assert read(name, task) == {"text_1": ROWS["text"], "labels": [0, 1] * 10}
    assert task.labels == [str(label) for label in labels], "integers in their order"


@both
def test_cells_of_text_files_are_text_as_written(read: Reader) -> None:
    texts = ["NA", "007", "1.0", "null", "2026-11-24", "True", '"Quoted" at the start', 'an inch is 1"', "a, b"]
    names = ["NA", "no"] * 4 + ["no"]
    for name in ("a.csv", "a.tsv"):
        task = Classification()
        columns = read(save({"text": texts, "label": names}, name), task)
        assert columns == {"text_1": texts, "labels": [0, 1] * 4 + [1]}
        assert task.labels == ["NA", "no"]
    lines = {"text": ['one\n"two", three', "x" * 200_000], "label": [0, 1]}
    assert read(save(lines, "lines.csv"))["text_1"] == lines["text"]


@both
def test_numbers_in_text_files_are_labels_as_in_other_formats(read: Reader) -> None:
    texts = ["a", "b", "c"]
    for name in ("a.csv", "a.parquet"):
        floats = save({"text": texts, "label": [1.0, 10.0, 2.0]}, name)  # as pandas writes integers with gaps
        task = Classification()
        assert read(floats, task)["labels"] == [0, 2, 1]
        assert task.labels == ["1", "2", "10"]
        named = Classification(labels=["bad", "good"])
        assert read(save({"text": texts, "label": [0, 1, 0]}, name), named)["labels"] == [0, 1, 0]
        assert read(save({"text": texts, "label": [1, 2.5, -3.0]}, name), Regression())["labels"] == [1.0, 2.5, -3.0]
        flags = save({"text": texts, "joy": [0, 1, 1], "fear": [True, False, True]}, name)
        task = Multilabel(label_columns=["joy", "fear"])
        assert read(flags, task)["labels"] == [[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
        fraction = r"label is '?0\.5'?; every label must be one of 0, 1 .*; for numbers set model\.task=regression"
        with pytest.raises(DataError, match=fraction):
            read(save({"text": texts, "label": [1.0, 0.0, 0.5]}, name))
        with pytest.raises(DataError, match=r"joy is '?2'?; every label must be 0 or 1"):
            read(save({"text": texts, "joy": [0, 1, 2], "fear": [0] * 3}, name), task)
    with pytest.raises(DataError, match=r"label is 'NA'; every label must be one of 0, 1 "):
        read(save({"text": texts, "label": ["0", "1", "NA"]}, "a.csv"))


@both
def test_lines_of_a_txt_file_are_texts(read: Reader) -> None:
    texts = ["one", "two\u2028lines, for Unicode", "three\fpages"]
    Path("a.txt").write_bytes("\r\n".join(texts).encode())
    assert read("a.txt", MaskedLanguageModelling()) == {"text_1": texts}


@both
@pytest.mark.parametrize("suffix", ["conll", "jsonl", "parquet"])
def test_words_and_tags_are_read(suffix: str, read: Reader) -> None:
    task = TokenClassification()
    assert read(save(TAGGED, f"a.{suffix}"), task) == {"text_1": TAGGED["tokens"], "labels": [[0, 2, 3], [1]]}
    assert task.labels == ["B-LOC", "B-PER", "I-LOC", "O"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_columns_are_checked_up_front_as_they_are_when_rows_are_read(suffix: str) -> None:
    name, cut = f"a.{suffix}", f"cut.{suffix}"
    save(ROWS, name)
    save({key: values[:0] for key, values in ROWS.items()}, cut)
    if suffix == "jsonl":
        Path(cut).write_text("\n")
        Path("gaps.jsonl").write_text('{"note": 1}\n{"text": "a", "label": 0}\n')  # rows may lack keys
        check_data_files(files("gaps.jsonl"), Classification())
    check_data_files(files(name, name), Classification())
    check_data_files(files(cut), Classification(label_column="lable"))  # without rows
    for text, label, missing in (("txt", "label", ["text"]), ("text", "lable", ["label"]), ("txt", "lable", [*ROWS])):
        config, task = files(name, name), Classification(text_columns=[text], label_column=label)
        with pytest.raises(DataError) as late:
            load_samples(config, task)
        with pytest.raises(DataError) as early:
            check_data_files(config, task)
        assert str(early.value) == str(late.value)
        for line, meant in zip(early.value.lines, missing, strict=True):
            assert f"did you mean '{meant}'" in line


def test_columns_that_only_one_of_two_files_lacks_are_named_together() -> None:
    save({"anchor": ["a"], "positiv": ["b"]}, "train.csv")
    save({"anchor": ["a"], "positive": ["b"]}, "eval.csv")
    with pytest.raises(DataError) as error:
        check_data_files(files("train.csv", "eval.csv"), Embedding(label_column="score"))
    train, held = error.value.lines
    assert train.startswith("data.train_file: train.csv has no column 'positive'; did you mean 'positiv'?")
    assert held.startswith("data.eval_file: eval.csv has no column 'score'")


@pytest.mark.parametrize("kind", ["a.csv", "a.parquet", "saved"])
def test_columns_of_streams_and_saved_datasets_are_checked_up_front(kind: str) -> None:
    def write(rows: Rows) -> None:
        Dataset.from_dict(rows).save_to_disk(kind) if kind == "saved" else save(rows, kind)

    write({"text": ["a"], "labels": [0]})
    for streaming in (False, True):
        with pytest.raises(DataError, match=rf"{kind} has no column 'label'; did you mean 'labels'\?"):
            check_data_files(files(kind, streaming=streaming), Classification())
    write({"input_ids": [[1]], "label": [0]})
    check_data_files(files(kind, streaming=True), Classification())
    with pytest.raises(DataError, match=f"{kind} has no column 'text'"):
        check_data_files(files(kind), Classification())


@both
def test_a_pattern_reads_all_matching_files(read: Reader) -> None:
    Path("parts").mkdir()
    for i in range(4):
        save({name: values[5 * i : 5 * i + 5] for name, values in ROWS.items()}, f"parts/part-{i}.csv")
    for pattern in ("parts/part-*.csv", f"file://{Path.cwd()}/parts/part-*.csv"):
        columns = read(pattern)
        assert read is streamed or columns["text_1"] == ROWS["text"], "in the order of the names"
        assert sorted(zip(columns["text_1"], columns["labels"], strict=True)) == sorted(
            zip(*ROWS.values(), strict=True)
        )


def test_files_of_a_pattern_must_have_the_columns_and_rows_are_numbered_through() -> None:
    save({"text": ["a"] * 6, "label": [0, 1] * 3}, "part-0.csv")
    save({"text": ["x", ""], "label": [0, 0]}, "part-1.csv")
    with pytest.raises(DataError, match=r"data\.train_file: part-\*\.csv, row 8: text is empty"):
        in_memory("part-*.csv")
    save({"texts": ["x"], "label": [3]}, "part-1.csv")
    message = r"part-1\.csv has no column 'text'; did you mean 'texts'\? \(it has: texts, label\)"
    with pytest.raises(DataError, match=message):
        in_memory("part-*.csv")
    with pytest.raises(DataError, match=message):
        check_data_files(files("part-*.csv", streaming=True), Classification())


@both
@pytest.mark.parametrize("mark", ";\t|")
def test_a_csv_file_with_another_separator_is_read(mark: str, read: Reader) -> None:
    rows = [["text", "label"], ["fine, really", "1"], [f'"not{mark}so ""good"", no"', "0"]]
    Path("a.csv").write_text("".join(mark.join(row) + "\r\n" for row in rows), newline="")
    assert read("a.csv") == {"text_1": ["fine, really", f'not{mark}so "good", no'], "labels": [1, 0]}
    Path("b.csv").write_text(mark.join(["text", "label"]) + "\n" + mark.join(["a", "b", "1"]) + "\n")
    with pytest.raises(DataError, match=r"line 2 has 3 cells, and the header has 2; put texts with '.+' in double"):
        read("b.csv", Classification(labels=["0", "1"]))


@both
def test_a_folder_that_datasets_wrote_is_read_with_its_class_names(read: Reader) -> None:
    dataset = Dataset.from_dict({**ROWS, "label": [1, 0] * 10}, NAMED)
    dataset.with_format("torch").save_to_disk("saved")
    task = Classification()
    columns = read("saved", task)
    assert dict(zip(*columns.values(), strict=True)) == dict(zip(ROWS["text"], [1, 0] * 10, strict=True))
    assert task.labels == ["yes", "no"], "in the dataset's order"
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk("splits")
    with pytest.raises(DataError, match=r"splits contains the splits train, test; name .* such as splits/train"):
        read("splits", task)
    Path("empty").mkdir()
    with pytest.raises(DataError, match=r"empty is not a folder that datasets\.save_to_disk .* as empty/\*\.parquet"):
        read("empty", task)


@both
def test_class_names_come_from_the_dataset_and_minus_one_is_missing(read: Reader) -> None:
    features = Features({"text": Value("string"), "labels": List(ClassLabel(names=["joy", "anger", "fear"]))})
    save_rows(Path("a.parquet"), {"text": ["a", "b"], "labels": [[2, 0], []]}, features)
    task = Multilabel()
    assert read("a.parquet", task) == {"text_1": ["a", "b"], "labels": [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]}
    assert task.labels == ["joy", "anger", "fear"]
    save_rows(Path("b.parquet"), {"text": ["a", "b"], "label": [0, -1]}, NAMED)
    with pytest.raises(DataError, match=r"label is empty; every label must be one of yes, no "):
        read("b.parquet")


@both
def test_nested_json_is_read(read: Reader) -> None:
    texts = ["[" * 200, '"[' * 200, "\\" + '"{' * 200, "}]" * 200, "{\n" * 200]
    rows = [{"text": text, "label": "no", "x": [[[0, 1]] * 60]} for text in texts]
    Path("a.jsonl").write_text("".join(f"{json.dumps(row)}\n\n" for row in rows))
    assert read("a.jsonl", Classification(labels=["yes", "no"]))["text_1"] == texts


@both
def test_values_of_json_keep_their_types_and_missing_ones_are_refused(read: Reader) -> None:
    lines = [{"text": "a", "label": 1}, {"label": "x", "text": "b"}, {"text": "c", "label": 1.0, "more": {"x": []}}]
    Path("a.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert read("a.jsonl", Classification(labels=["1", "x"])) == {"text_1": ["a", "b", "c"], "labels": [0, 1, 0]}
    Path("b.jsonl").write_text("{}\n" * 3)
    with pytest.raises(DataError, match=r"text is empty.*; every sample needs text"):
        read("b.jsonl", Classification(labels=["1", "x"]))


def zipped(content: bytes) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("xl/worksheets/sheet1.xml", content)
    return archive.getvalue()


def packed(pack: Callable[[bytes], bytes]) -> bytes:
    return pack("".join(f"text {number} é,1\n" for number in range(500)).encode())


def parquet(table: pyarrow.Table, metadata: str | bytes | None = None) -> bytes:
    buffer = io.BytesIO()
    table = table if metadata is None else table.replace_schema_metadata({"huggingface": metadata})
    pyarrow.parquet.write_table(table, buffer)
    return buffer.getvalue()


NO_TEXT = pyarrow.StringArray.from_buffers(1, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xff\xfe"))
ONE = pyarrow.array([1])
ICONV = r"save it as UTF-8, for example with: iconv -f {} -t utf-8 {} > new\.\w+$"
DEEP = '{{"text": "a", "label": 0}}\n{{"text": "b", "label": 1, "x": {}}}\n'  # a parser may recurse without a limit
REFUSED: list[tuple[str, str | bytes, str]] = [
    ("cut.jsonl", '{"text": "a", "label": 1}\n{"text": ', r"cannot be read \(line 2 is not JSON: .*\)$"),
    ("half.jsonl", '{"text": "\\ud800", "label": 1}\n', r"cannot be read \(line 1 is not JSON: .*surrogates"),
    ("twice.jsonl", '{"text": "a", "label": 1, "label": 0}\n', r"cannot be read \(line 1 .* two columns 'label'\)$"),
    ("list.jsonl", '["a", 1]\n', r"cannot be read \(line 1 is not a JSON object\)$"),
    ("deep.jsonl", DEEP.format("[" * 100_000 + "]" * 100_000), r"cannot be read \(line 2 is nested too deeply; remove"),
    ("quoted.csv", 'text,label\nfine,1\n"a"b,1\n', "cannot be read \\(line 3: ',' expected after '\"'\\)$"),
    ("long.csv", "text,label\na,1\na,1,2,3\n", r"cannot .*\(line 3 has 4 cells, and the header has 2; put texts with"),
    ("short.csv", "text,label\nfine,1\na\n", r"cannot be read \(line 3 has 1 cells, and the header has 2\)$"),
    ("long.tsv", "text\tlabel\nfine\t1\ta\n", r"cannot be read \(line 2 has 3 cells, and the header has 2\)$"),
    ("open.csv", 'text,label\nfine,1\n"never closed,0\nfine,1\n', r"cannot be read \(.*end of data\)$"),
    ("twice.csv", "text,text,label\na,b,1\n", r"cannot be read \(it has two columns 'text'\)$"),
    ("a.conll", "# id 1\nAnn B-PER\nran\n", r"cannot be read \(line 3 has a word without a tag: ran; .* use a .txt"),
    ("cut.parquet", "PAR1" + "\0" * 50, r"cannot be read \(.*\)$"),
    ("twice.parquet", parquet(pyarrow.Table.from_arrays([ONE] * 2, ["text"] * 2)), r"cannot .* two columns 'text'\)$"),
    ("b.parquet", parquet(pyarrow.Table.from_arrays([NO_TEXT, ONE], ["text", "label"])), "cannot be read"),
    *(("c.parquet", parquet(pyarrow.table(ROWS), text), r"cannot be read \(the metadata 'huggingface', .* is invalid: ")
      for text in ("no JSON", b"\xff", '{"info": {"features": {"label": {"_type": "Nope"}}}}')),
    ("latin.csv", "text,label\na,1\nun café noir,0\n".encode("latin1"), r"is not UTF-8: byte 0xe9 in line 3 \(byte 22"),
    ("a.jsonl", '{"text": "é"}\n'.encode("latin1"), f"is not UTF-8: .* line 1 .*{ICONV.format('latin1', 'a.jsonl')}"),
    ("utf16.csv", "text,label\n".encode("utf-16"), f"is not UTF-8: .* line 1 .*{ICONV.format('utf-16', 'utf16.csv')}"),
    # with iconv, the bytes of packed files would become text
    *(("a.csv", packed(pack), "is compressed or a spreadsheet; save") for pack in (gzip.compress, lzma.compress)),
    *(("b.jsonl", packed(pack), "is compressed or a spreadsheet; save") for pack in (bz2.compress, zipped)),
    ("empty.csv", "", "is empty"),
    ("a.xlsx", "x", "must end in .parquet, .csv, .tsv, .jsonl, .conll, .txt"),
]  # fmt: skip


@both
@pytest.mark.parametrize(("name", "content", "problem"), REFUSED, ids=[case[0] for case in REFUSED])
def test_unreadable_files_are_refused_in_one_line(name: str, content: str | bytes, problem: str, read: Reader) -> None:
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    task = TokenClassification(labels=["O", "B-PER"]) if name == "a.conll" else Classification(labels=["0", "1"])
    with pytest.raises(DataError, match=rf"^data\.train_file: {name} {problem}"):
        read(name, task)


@both
def test_files_that_cannot_be_found_are_refused_in_one_line(read: Reader) -> None:
    fsspec.register_implementation("absent", "no_such_package.Files", clobber=True, errtxt="Install no_such_package")
    for name, message in {
        "missing.csv": rf"missing.csv \(relative to {Path.cwd()}\) is not a file",
        "other-*.csv": r"there is no file other-\*\.csv \(relative to /",
        "~nobody-at-all/x.csv": ".* is not a file",
        "x" * 5000 + ".csv": ".* is not a file",
        "absent://bucket/a.csv": r"absent://.* cannot be read \(Install no_such_package\)$",
        "absent://bucket/*.csv": r"absent://.* cannot be read \(Install no_such_package\)$",
    }.items():
        with pytest.raises(DataError, match=rf"^data\.train_file: {message}"):
            read(name, Classification(labels=["0", "1"]))


@both
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.conll", "Né NN O B-LOC\n"),
        ("a.txt", "Né\n"),
        ("a.csv", "text,label\nNé,1\n"),
        ("a.jsonl", '{"text": "Né", "label": 1}\n'),
    ],
)
def test_a_byte_order_mark_is_not_text(name: str, text: str, read: Reader) -> None:
    tasks: dict[str, Task] = {"a.conll": TokenClassification(labels=["B-LOC"]), "a.txt": MaskedLanguageModelling()}
    for encoding in ("utf-8", "utf-8-sig"):
        Path(name).write_text(text, encoding=encoding)
        columns = read(name, tasks.get(name, Classification(labels=["0", "1"])))
        assert columns["text_1"] == ([["Né"]] if name == "a.conll" else ["Né"])


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
        with pytest.raises(DataError, match=rf"^data\.train_file: {name}.* row \d: .*{said}"):
            in_memory(save(rows, name), task)
    with pytest.raises(
        DataError, match=r"a\.csv: 2 of 4 .* \(row 2: label is empty, row 4: label is empty\); .* None, yes"
    ):
        in_memory("a.csv")
    many: Rows = {"text": ["a"] * 3000, "label": ["", "no", "yes"] * 1000}
    with pytest.raises(DataError, match=r"e\.csv: 1,000 of 3,000 .* \(row 1: .*, row 28: [^,]*, …\); every"):
        in_memory(save(many, "e.csv"))


def test_labels_may_be_dates_or_whole_decimals_and_other_types_are_named() -> None:
    def read(labels: list[Any], names: list[str] | None = None) -> Any:
        task = Classification(labels=names)
        in_memory(save({"text": ["a", "b"], "label": labels}, "a.parquet"), task)
        return task.labels

    assert read([date(2026, 11, 25), date(2026, 11, 24)]) == ["2026-11-24", "2026-11-25"]
    assert read([Decimal("1.00"), Decimal("2.00")]) == ["1", "2"]
    with pytest.raises(DataError, match=r"row 1: label is Decimal\('1\.50'\); every label must be one of 1, 2"):
        read([Decimal("1.50"), Decimal("2.00")], names=["1", "2"])
    for labels in ([b"x", b"y"], [0.12, 0.5]):
        with pytest.raises(DataError, match=r"has only the class \(none\); .* for numbers set model\.task=regression"):
            read(labels)
    for bad, shown in ((float("nan"), "nan"), (None, "empty"), (float("inf"), "inf")):
        name = save({"text": ["a", "b"], "label": [1.0, bad]}, "b.parquet")
        with pytest.raises(DataError, match=rf"b\.parquet, row 2: label is {shown}; every label must be a finite"):
            in_memory(name, Regression())


def test_only_the_columns_that_are_read_are_kept() -> None:
    name = save({**ROWS, "vector": [[0.5] * 3] * 20}, "a.parquet")
    rows = load_rows([name], "input", [("text", "text_columns")])
    assert rows == [{"text": text} for text in ROWS["text"]]


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
        DataError, match=rf"no column 'text' \(it has: {', '.join(texts)}, label, idx\); set data\.text"
    ):
        load_samples(config, Classification())


def test_configuration_and_revision_reach_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(*args: Any, **kwargs: Any) -> Dataset:
        calls.append((args, kwargs))
        return Dataset.from_dict(ROWS)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    load_samples(DataConfig(hub_name="a/b", hub_config="c", hub_revision="v2", eval_split=None), Classification())
    assert calls == [(("a/b", "c"), {"split": "train", "revision": "v2", "streaming": False})]


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
    config = files(name, name, max_length=60, batch_size=3)
    task = Classification(text_columns=["one", "two"], truncation=truncation, labels=["0", "1"])
    data = build_data(config, task, model_name="", on_gpu=False)
    (batch,) = list(data.eval.dataloader)
    tokenizer = load_tokenizer(config, "", rows["one"] + rows["two"])
    expected = tokenizer(
        rows["one"], rows["two"], truncation=truncation, max_length=60, padding="max_length", return_tensors="pt"
    )
    assert set(batch) == {"input_ids", "attention_mask", "token_type_ids", "labels", "_row_lengths"}
    for key in expected:
        assert batch[key].equal(expected[key]), key
    assert batch["token_type_ids"].any()


def test_a_pair_that_the_strategy_cannot_truncate_is_refused_in_one_line() -> None:
    config = files(save(PAIRS, "a.jsonl"), max_length=16)
    task = Classification(text_columns=["one", "two"], truncation="only_second")
    with pytest.raises(DataError, match=r"^data\.truncation: only_second cannot cut .*max_length=16, .* longest_first"):
        build_data(config, task, model_name="", on_gpu=False)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (TokenClassification(labels=["x", "y"]), "data.tokenizer: task token_classification needs a fast tokenizer"),
        (MaskedLanguageModelling(whole_word_masking=True), "data.whole_word_masking needs a fast tokenizer"),
        (Classification(truncation="only_second"), "data.truncation: only_second cannot cut .*max_length=8, "),
    ],
)
def test_what_a_tokenizer_in_python_cannot_do_is_refused(task: Any, message: str) -> None:
    Path("vocab.txt").write_text("<cls>\n<pad>\n<eos>\n<unk>\na\nb\n<mask>")
    with pytest.raises((ConfigError, DataError), match=f"^{message}"):
        task.encode({"text_1": ["a " * 20], "text_2": ["b"]}, EsmTokenizer("vocab.txt"), 8)


@pytest.mark.parametrize("name", ["jupyter://x.csv", "jupyter://*.csv"])
def test_an_address_that_needs_further_arguments_is_one_line(name: str) -> None:
    with pytest.raises(DataError, match=r"^data\.train_file: jupyter://\S+ cannot be read \(\w+"):
        load_rows(find_files(name, "data.train_file"), "data.train_file", None)
