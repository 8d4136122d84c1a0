"""Which class or number a cell is: the same on every path, and refused where a program could only guess."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, List, Value

from composer_speedups.core.errors import DataError
from composer_speedups.data.flat import Ragged
from composer_speedups.data.sources import labelled_samples, load_samples
from composer_speedups.data.streams import Tokenized, stream_of_samples
from composer_speedups.data.summary import DataSummary
from composer_speedups.data.tokens import load_tokenizer
from composer_speedups.predict.__main__ import main
from composer_speedups.tasks.classification import Classification
from composer_speedups.tasks.multilabel import Multilabel
from composer_speedups.tasks.regression import Regression
from composer_speedups.tasks.settings import DataConfig
from composer_speedups.tasks.token_classification import TokenClassification
from tests.data.samples import READERS, Reader, files, in_memory, save, streamed
from tests.helpers.jobs import run
from tests.helpers.stand_ins import save_rows

both = pytest.mark.parametrize("read", READERS)
NAMES = ["no", "yes"]


def declared(names: list[str], rows: list[str]) -> Dataset:
    """Rows whose text is the name of their class, which is stored as an integer."""
    integers = [names.index(row) for row in rows]
    tokens = [[2, 10 if row == "yes" else 9, 3] for row in rows]
    features = Features({"text": Value("string"), "input_ids": List(Value("int32")), "label": ClassLabel(names=names)})
    return Dataset.from_dict({"text": rows, "input_ids": tokens, "label": integers}, features)


@pytest.mark.parametrize("tokens", [False, True], ids=["texts", "input_ids"])
@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_a_stream_has_the_classes_that_its_rows_declare(kind: str, tokens: bool) -> None:
    rows = ["no", "yes", "yes", "no"] * 8
    for part, names in enumerate((["yes", "no"], ["no", "yes"])):
        dataset = declared(names, rows)
        dataset = dataset if tokens else dataset.remove_columns("input_ids")
        dataset.to_parquet(f"part-{part}.parquet")
        dataset.save_to_disk("saved") if part == 0 else None
    name = "saved" if kind == "saved" else "part-*.parquet"
    stream, _ = stream_of_samples(files(name, streaming=True), seed=1)
    vocabulary = load_tokenizer(DataConfig(tokenizer="wordpiece", vocab_size=200), "", [*NAMES, "abcdefghijklmn"])
    ids: dict[int, str] = {9: "no", 10: "yes"} if tokens else {vocabulary(name).input_ids[1]: name for name in NAMES}
    plain: Any = Tokenized(lambda rows: rows, vocabulary, Classification(labels=NAMES), 16)
    read = list(stream.rows)
    batch: Ragged = plain(read)
    assert len(read) == (64 if kind == "parquet" else 32)
    firsts = batch.tokens["input_ids"].reshape(len(read), -1)[:, 1].tolist()
    assert [ids[first] for first in firsts] == [NAMES[label] for label in batch.rows["labels"].tolist()]


def test_each_file_of_a_pattern_has_its_own_integers_for_the_classes() -> None:
    declared(["yes", "no"], ["no", "yes"]).to_parquet("part-0.parquet")
    declared(["no", "yes"], ["no", "yes"]).to_parquet("part-1.parquet")
    task = Classification()
    assert in_memory("part-*.parquet", task) == {"text_1": ["no", "yes"] * 2, "labels": [1, 0] * 2}
    assert task.labels == ["yes", "no"], "in the order of the first file"
    declared(["no", "maybe", "yes"], ["maybe"]).to_parquet("part-2.parquet")
    with pytest.raises(DataError, match=r"row 5: label is 'maybe'; every label must be one of yes, no"):
        in_memory("part-*.parquet")


@both
@pytest.mark.parametrize("plain", ["part-0.parquet", "part-2.parquet", "part-2.csv"])
def test_files_with_and_without_declared_names_are_not_mixed(plain: str, read: Reader) -> None:
    declared(["yes", "no"], ["no", "yes"]).to_parquet("part-1.parquet")
    save({"text": ["a", "b"], "label": [0, 1]}, plain)
    with pytest.raises(DataError, match=r"part-\d\.\w+ cannot be read \(.* declares class names for 'label', and "):
        read("part-*", Classification(labels=["yes", "no"]))


CELLS: dict[str, list[str]] = {
    '["billing", "tech"]': ["billing", "tech"],
    "['billing', 'tech']": ["billing", "tech"],
    "{'tech', 'billing'}": ["billing", "tech"],
    "('billing',)": ["billing"],
    "billing;tech": ["billing", "tech"],
    "(other)": ["(other)"],
    "[]": [],
    "set()": [],
    "": [],
}


@both
@pytest.mark.parametrize("cell", CELLS)
def test_a_written_list_is_read(cell: str, read: Reader) -> None:
    others = [*CELLS] if cell == "billing;tech" else ["billing;(other)", "tech"]
    name = save({"text": ["a"] * (len(others) + 1), "labels": [cell, *others]}, "a.csv")
    task = Multilabel()
    row = read(name, task)["labels"][0]
    assert task.labels == ["(other)", "billing", "tech"]
    assert [label for label, present in zip(task.labels, row, strict=True) if present] == CELLS[cell]


@both
@pytest.mark.parametrize(
    "cell",
    [
        "['billing' 'tech']",  # as pandas writes an array
        "[billing, tech]",
        "[0 1]",
        "['billing', nan]",
        "['billing'",
        "{'billing': 1}",
        '{"billing": 1}',
        "array(['billing'])",
        "Index(['billing'], dtype='object')",
        "('billing' 'tech')",
        "[['billing'], ['tech']]",
        "nan",
        "<NA>",
    ],
)
def test_a_cell_that_is_no_list_is_no_class_either(cell: str, read: Reader) -> None:
    name = save({"text": ["a", "b"], "labels": [cell, "billing;tech"]}, "a.csv")
    with pytest.raises(DataError, match=r"labels (is|holds) .*; every label must be|only the class \(none\)") as error:
        read(name, Multilabel(labels=["billing", "tech"]) if read is streamed else Multilabel())
    assert "billing\\'tech" not in str(error.value)


@both
@pytest.mark.parametrize("cells", [[[0, 1, 1], [1, 0, 0]], ["[1.0, 0.0, 1.0]"] * 2, ["0;1;1"] * 2])
def test_a_vector_of_0_and_1_is_no_list_of_labels(cells: list[Any], read: Reader) -> None:
    """Its values would be taken for the first and the second label."""
    name = save({"text": ["a", "b"], "labels": cells}, "a.parquet")
    with pytest.raises(DataError, match=r"which has an integer twice.* \(data\.label_columns\)"):
        read(name, Multilabel(labels=["billing", "tech", "other"]))
    two = save({"text": ["a", "b"], "labels": [[0, 1], [1, 0]]}, "b.parquet")
    with pytest.raises(DataError, match="labels has 0 and 1 in each row"):
        in_memory(two, Multilabel())


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        (["x", "x\u200b"], r"the classes 'x' and 'x\\u200b', which are the same to a reader"),
        (["caf\u00e9", "cafe\u0301"], "which are the same to a reader"),
        (["'x'", "x"], "which are the same to a reader"),
        (["1", "1.0", "01"], "the classes '01' and '1', which are the same"),
        (["True", "1", "0"], "which are the same to a reader"),
        (["TRUE", "true", "no"], "the classes 'TRUE' and 'true', which are the same"),
        (
            ["0.12", "0.5"],
            r"only the class \(none\); .* \(name them with data\.labels; for numbers .* model\.task=regression",
        ),
        (["['x']", "y"], r"""holds "\['x'\]", a written list or several lines"""),
        (["[0]", "[1]"], r"holds '\[0\]', a written list or several lines"),
        (["x", "y\nz,x"], r"holds 'y\\nz,x', a written list or several lines"),
    ],
)
def test_classes_that_a_reader_made_by_mistake_are_refused(labels: list[str], problem: str) -> None:
    name = save({"text": ["a"] * len(labels), "label": labels}, "a.csv")
    with pytest.raises(DataError, match=problem):
        in_memory(name)
    if "0.5" not in labels:
        assert in_memory(name, Classification(labels=labels))["labels"] == [*range(len(labels))]


def test_punctuation_of_tagsets_is_no_mistake() -> None:
    tags = ["#", "$", '"', "''", "(", ")", ",", ".", ":", "``", "'s", "s", "PRP", "PRP$"]
    tokens = save({"tokens": [tags], "ner_tags": [tags]}, "a.jsonl")
    assert in_memory(tokens, TokenClassification())["labels"] == [[sorted(tags).index(tag) for tag in tags]]


def test_a_written_list_is_refused_although_invalid_rows_are_dropped() -> None:
    name = save({"text": ["a", "b", "c"], "label": ["x", "y", "['x']"]}, "a.csv")
    with pytest.raises(DataError, match="a written list"):
        load_samples(files(name, on_invalid="drop"), Classification())


@both
def test_nan_is_a_class_only_if_it_is_named(read: Reader) -> None:
    name = save({"text": ["a", "b", "c"], "label": ["nan", "yes", "no"]}, "a.csv")
    assert read(name, Classification(labels=["nan", "no", "yes"]))["labels"] == [0, 2, 1]
    with pytest.raises(DataError, match="label is 'nan'; every label must be one of no, yes"):
        read(name, Classification(labels=["no", "yes"]))
    task = Classification()
    train, _ = load_samples(files(name, on_invalid="drop"), task)
    assert (task.labels, train["text_1"]) == (["no", "yes"], ["b", "c"])


@both
@pytest.mark.parametrize(("cell", "value"), [("1e3", 1000.0), (" -1.5 ", -1.5), ("1_000", None), ("1e39", None)])
def test_only_plain_finite_numbers_are_scores(cell: str, value: float | None, read: Reader) -> None:
    name = save({"text": ["a"], "label": [cell]}, "a.csv")
    if value is not None:
        assert read(name, Regression())["labels"] == [value]
        return
    with pytest.raises(DataError, match="f: label is True; every label must be a finite number"):
        Regression().label(True, "f")
    with pytest.raises(DataError, match=f"label is '{cell}'; every label must be a finite number"):
        read(name, Regression())


@pytest.mark.parametrize("invalid", ["stop", "drop"])
@pytest.mark.parametrize("labels", [[1, 2], ["1", "2"], [0, 1, 2]])
def test_integers_that_do_not_count_the_classes_from_0_are_refused(labels: list[Any], invalid: str) -> None:
    """1 and 2 would be the second class, and rows to leave out."""
    rows = [{"text": "a", "label": label} for label in labels]
    said = "label has 2 for one of 2 classes, whose integers count from 0 "
    with pytest.raises(DataError, match=said):
        labelled_samples(rows, "a.csv", Classification(labels=NAMES), DataSummary())
    name = save({"text": ["a"] * len(labels), "label": labels}, "a.csv")
    with pytest.raises(DataError, match=said):
        load_samples(files(name, on_invalid=invalid), Classification(labels=NAMES))
    lists = save({"text": ["a"] * len(labels), "labels": [[label] for label in labels]}, "a.parquet")
    with pytest.raises(DataError, match="labels has 2 for one of 2 classes"):
        load_samples(files(lists, on_invalid=invalid), Multilabel(labels=NAMES))


def test_integers_without_a_0_are_read_with_a_warning() -> None:
    name = save({"text": ["a", "b"], "label": [1, 1]}, "a.csv")
    with pytest.warns(UserWarning, match=r"a\.csv: label has no 0 for one of 2 classes"):
        assert in_memory(name, Classification(labels=NAMES))["labels"] == [1, 1]
    assert in_memory(save({"text": ["a", "b"], "label": [-1, 1]}, "b.csv"), Classification(labels=["-1", "1"]))
    assert in_memory(save({"text": ["a", "b"], "label": [True, True]}, "b.parquet"), Classification(labels=NAMES))


def test_evaluate_reads_declared_names_and_refuses_other_integers(capsys: pytest.CaptureFixture[str]) -> None:
    run("run_name=done", "plot=false")
    capsys.readouterr()
    rows = {"text": ["it was bad", "it was good"] * 3, "label": ["negative", "positive"] * 3}
    save(rows, "names.jsonl")
    features = Features({"text": Value("string"), "label": ClassLabel(names=["positive", "negative"])})
    save_rows(Path("declared.parquet"), {**rows, "label": [1, 0] * 3}, features)
    printed = []
    for name in ("names.jsonl", "declared.parquet"):
        main(["runs/done", "--input", name, "--evaluate"])
        printed.append(capsys.readouterr().out.partition("\n")[2])
    assert printed[0] == printed[1]
    main(["runs/done", "--input", "declared.parquet", "--output", "out.jsonl"])
    assert json.loads(Path("out.jsonl").read_text().splitlines()[0])["input_label"] == 1, "as it is in the file"
    save({"text": rows["text"], "label": [1, 2] * 3}, "from_1.csv")
    with pytest.raises(DataError, match="label has 2 for one of 2 classes, whose integers count from 0"):
        main(["runs/done", "--input", "from_1.csv", "--evaluate"])
