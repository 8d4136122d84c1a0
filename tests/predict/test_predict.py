"""Predictions of finished runs: transformers' own, in the input's order, resumable, and refused in one line."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from composer_speedups.core.errors import ConfigError, DataError
from composer_speedups.data.builtin import builtin_reviews, builtin_samples
from composer_speedups.kernels.common import counting
from composer_speedups.predict import rows
from composer_speedups.predict.__main__ import main, read_request
from composer_speedups.predict.model import FinishedModel
from tests.data.samples import save as save_columns
from tests.helpers.exhaustive import others_exhaustive
from tests.helpers.jobs import run
from tests.helpers.support import TASKS
from tests.helpers.texts import write_rows

TEXTS = builtin_reviews(60, 5, "eval", 0.15)["text"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a classifier, long enough for probabilities to differ."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run("trainer.max_duration=30ba", "run_name=done", "plot=false")
    return folder / "runs" / "done"


@pytest.mark.parametrize(
    ("content", "more", "problems"),
    [
        ('text\n"a"b\n', [], ["cannot be read (line 2: "]),
        ("txt,lable\na,b\n", [], ["has no column 'text'; did you mean 'txt'? (it has: txt, lable); set text_columns="]),
        ("txt,lable\na,b\n", ["--evaluate"], ["has no column 'text'; ", "has no column 'label'; "]),
        ("text\na\n", ["text_columns=b"], ["has no column 'b' (it has: text); set text_columns=[NAME]"]),
    ],
)
def test_a_broken_file_and_all_missing_columns_are_refused_before_torch_is_imported(
    content: str, more: list[str], problems: list[str], finished: Path, tmp_path: Path
) -> None:
    (tmp_path / "in.csv").write_text(content)
    code = "import sys; sys.modules['torch'] = None; import composer_speedups.predict.__main__ as p; p.command()"
    command = [sys.executable, "-c", code, str(finished), "--input", str(tmp_path / "in.csv"), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    for line, problem in zip(done.stderr.splitlines(), problems, strict=True):
        assert line.startswith(f"predict: input: {tmp_path}/in.csv")
        assert problem in line


def test_evaluate_alone_writes_no_file_whose_name_could_be_refused() -> None:
    Path("in.predictions.jsonl").mkdir()
    assert read_request(["run", "input=in.csv", "--evaluate"])[1].output is None


def save(texts: list[str], name: str = "in.jsonl", column: str = "text") -> str:
    return write_rows(name, [{column: text} for text in texts])


def predictions(name: str = "in.predictions.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def test_the_model_runs_unpadded(finished: Path) -> None:
    model = FinishedModel.load(finished)
    encoded = model.encode([{"text": text} for text in TEXTS])
    with counting() as ran:
        model.predict(encoded, 16)
    assert model.engaged == ["techniques: unpadding, fused_layers"]
    assert ran["packed_encoder"] > 0
    assert ran["padded_encoder"] == ran["counted_in_the_call"] == 0


def test_rows_without_text_have_null_predictions_and_the_others_their_own(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rows, "_ROWS_PER_BLOCK", 3)
    main([str(finished), "--input", save(TEXTS[:8])])
    expected = predictions()
    null = {"label": None, "probability": None, "probabilities": {"negative": None, "positive": None}}
    assert "null" not in capsys.readouterr().err
    texts = ["", *TEXTS[1:3], " ", "", "", *TEXTS[6:8]]
    save(texts)
    for index in (0, 3, 4, 5):
        expected[index] = {"text": texts[index], **null}
    for suffix in ("jsonl", "csv", "parquet"):
        main([str(finished), "--input", "in.jsonl", f"output=out.{suffix}"])
        said = capsys.readouterr().err
        assert "input: in.jsonl: 4 of 8 rows are invalid (row 1: text is empty, row 4: text is empty, " in said
        assert said.rstrip().endswith("predictions of such rows are null")
    for row, wanted in zip(predictions("out.jsonl"), expected, strict=True):
        assert (row["text"], row["label"]) == (wanted["text"], wanted["label"])
        assert row["probabilities"] == pytest.approx(wanted["probabilities"], abs=1e-6)
    assert pyarrow.parquet.read_table("out.parquet").to_pylist() == predictions("out.jsonl")
    table = pyarrow.csv.read_csv("out.csv").to_pylist()
    assert [row["label"] or None for row in table] == [row["label"] for row in expected]


def test_files_of_text_hold_characters_as_they_are(tmp_path: Path) -> None:
    for suffix, wanted in ((".jsonl", '{"a": ["5★"], "b": "\\ud800"}\n'), (".csv", 'a,b\r\n"[""5★""]",\\ud800\r\n')):
        with open(tmp_path / "x", "wb") as file:
            rows._write([{"a": ["5★"], "b": "\ud800"}], suffix, file)
        assert (tmp_path / "x").read_bytes().decode() == wanted, "half a character is escaped"


def test_an_interrupted_call_leaves_the_output_as_it_was(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_ROWS_PER_BLOCK", 20)
    plain, calls, submitted, ahead = FinishedModel.predict, [], list[Any](), list[int]()

    class Reader(ThreadPoolExecutor):
        def submit(self, *call: Any, **settings: Any) -> Any:
            submitted.append(call)
            return super().submit(*call, **settings)

    def killed(self: FinishedModel, encoded: Any, batch_size: int) -> Any:
        calls.append(len(encoded["input_ids"]))
        ahead.append(len(submitted))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(self, encoded, batch_size)

    monkeypatch.setattr(FinishedModel, "predict", killed)
    monkeypatch.setattr(rows, "ThreadPoolExecutor", Reader)
    call = [str(finished), "--input", save(TEXTS), "output=out.csv"]
    Path("out.csv").write_text("before")
    with pytest.raises(KeyboardInterrupt):
        main(call)
    assert Path("out.csv").read_text() == "before"
    assert ahead == [2, 3, 3], "one block is tokenized ahead, and not the whole file"
    assert sorted(os.listdir()) == ["in.jsonl", "out.csv"]
    main(call)
    assert calls[3:] == [20, 20, 20], "it starts over"
    assert Path("out.csv").read_bytes() != b"before"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input"], r"input is missing; add --input FILE"),
        (["input=in.jsonl", "output=out.xlsx"], r"output: out\.xlsx must end in \.jsonl, \.csv, \.parquet"),
        (["input=in.jsonl", "output=."], r"output: \. is a folder; name a file in it"),
        (["input=in.jsonl", "output=in.jsonl"], r"output: in\.jsonl is the input itself"),
        (["input=in.jsonl", "output=in.jsonl/a.csv"], r"output: in\.jsonl \(relative to /.*\) cannot be created"),
        (["input=s3://a/b.csv"], r"output must be a local file; add --output FILE"),
        (["input=none.jsonl", "output=new/a.csv"], r"input: none\.jsonl \(relative to /.*\) is not a file"),
        (
            ["input=other.jsonl", "output=new/a.csv"],
            r"input: other\.jsonl has no column 'text' \(it has: review\); set text_columns",
        ),
        (["input=empty.jsonl"], r"input: empty\.jsonl: 2 of 2 .* \(row 1: text is empty, row 2: .*; text_columns"),
        (["input=in.jsonl", "text_columns=a,b"], r"text_columns: the run reads 1 columns, not 2"),
        (["input=in.jsonl", "--evaluate"], r"input: in\.jsonl has no column 'label' \(it has: text\); set label_c"),
        (["input=in.jsonl", "--evaluate", "output=x.csv"], r"output has no effect with evaluate, which only prints"),
        (["input=in.jsonl", "errors=x.csv"], r"errors has no effect on predictions; add --evaluate, or remove it"),
        (["input=in.jsonl", "label_column=x"], r"label_column has no effect on predictions; add --evaluate"),
        (["input=in.jsonl", "--evaluate", "label_columns=[a]"], r"label_columns: the run does not read it; remove it"),
        (["input=header.csv"], r"input: header\.csv has no rows after its header line; use a file with samples"),
        (["input=in.jsonl", "--evaluate", "errors=x.parquet"], r"errors: x\.parquet must end in \.jsonl, \.csv$"),
        (["input=in.jsonl", "--evaluate", "--errors", "in.jsonl"], r"errors: in\.jsonl is the input itself"),
        (
            ["input=in.jsonl", "--evaluate", "--errors", "s3://a/b.csv"],
            r"errors must be a local file; add --errors FILE",
        ),
        (["input=in.jsonl", "--evaluate", "--errors", ""], r"errors: \. is a folder; name a file in it"),
        (["input=in.jsonl", "--evaluate", "--errors", "new/a.csv"], r"input: in\.jsonl has no column 'label'"),
        (["input=unknown.jsonl", "--evaluate", "--errors", "new/a.csv"], r"row 1: label is 'so'; every label must be"),
        (
            ["input=unknown.jsonl", "--evaluate"],
            r"input: unknown\.jsonl, row 1: label is 'so'; every label must be one of",
        ),
        (["input=in.jsonl", "device=gpu"], r"device: there is no GPU here"),
    ],
)
def test_a_bad_argument_or_row_is_one_line_and_nothing_is_written(
    arguments: list[str], message: str, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    save(TEXTS[:2])
    save(TEXTS[:2], "other.jsonl", "review")
    save(["", " "], "empty.jsonl")
    Path("header.csv").write_text("text\n")
    Path("unknown.jsonl").write_text('{"text": "fine", "label": "so"}\n')
    with pytest.raises((ConfigError, DataError), match=message) as error:
        main([str(finished), *arguments])
    assert "\n" not in str(error.value)
    assert sorted(os.listdir()) == ["empty.jsonl", "header.csv", "in.jsonl", "other.jsonl", "unknown.jsonl"]


def test_a_run_that_cannot_predict_is_one_line() -> None:
    save(TEXTS[:2])
    Path("bare").mkdir()
    Path("bare/report.json").write_text("{}")
    for folder, message in (
        ("nowhere", "is no finished run; name its folder, such as runs/NAME"),
        ("bare", r"has no model/task\.json; train with export=true"),
    ):
        with pytest.raises(ConfigError, match=f"^RUN: {folder}.* {message}"):
            main([folder, "--input", "in.jsonl"])


def changed(text: str, *keys: str, to: Any) -> str:
    """A JSON text with another value at ``keys``."""
    whole = part = json.loads(text)
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = to
    return json.dumps(whole)


DAMAGES: dict[str, Any] = {
    "truncated": lambda text: text[: len(text) // 2],
    "bytes": lambda text: b"\xff\xfe\x00",
    "another task": lambda text: changed(text, "model", "task", to="config"),
    "too many columns": lambda text: changed(text, "data", "text_columns", to=["a", "b", "c"]),
    "length is a text": lambda text: changed(text, "data", "max_length", to="long"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_task_file_is_refused_in_one_line(finished: Path, damage: str) -> None:
    save(TEXTS[:2])
    shutil.copytree(finished, "copy")
    file = Path("copy/model/task.json")
    content = DAMAGES[damage](file.read_text())
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=r"^RUN: copy/model\S* (is damaged|cannot be loaded) .*train"):
        main(["copy", "--input", "in.jsonl"])
    assert not Path("in.predictions.jsonl").exists()


def accept(folder: str, name: str) -> None:
    """Take a file out of those that task.json records."""
    file = Path(folder, "model/task.json")
    content = json.loads(file.read_text())
    del content["files"][name]
    file.write_text(json.dumps(content))


def test_a_file_that_was_exchanged_after_the_export_is_named_and_can_be_accepted(finished: Path) -> None:
    save(TEXTS[:2])
    shutil.copytree(finished, "copy")
    config = Path("copy/model/config.json")
    label = {"0": "no", "1": "yes"}
    for name, content in (("config.json", changed(config.read_text(), "id2label", to=label)), ("tokenizer.json", None)):
        file = Path("copy/model", name)
        before = file.read_text()
        file.write_text(before + " " if content is None else content)
        with pytest.raises(ConfigError, match=rf"^RUN: copy/model/{name} is not the file that train\.py exported; "):
            main(["copy", "--input", "in.jsonl"])
        accept("copy", name)
        main(["copy", "--input", "in.jsonl"])
    assert {row["label"] for row in predictions()} <= {"no", "yes"}


@pytest.mark.parametrize("edit", ["no head", "another layer"])
def test_weights_that_do_not_fit_the_configuration_are_refused(finished: Path, edit: str) -> None:
    """transformers would draw those that are missing, and leave out others."""
    save(TEXTS[:2])
    shutil.copytree(finished, "copy")
    path = "copy/model/model.safetensors"
    weights = load_file(path)
    kept = {name: weight for name, weight in weights.items() if edit != "no head" or "classifier" not in name}
    if edit == "another layer":
        kept |= {n.replace("layer.1.", "layer.9."): w.clone() for n, w in weights.items() if "layer.1." in n}
    save_file(kept, path, {"format": "pt"})
    accept("copy", "model.safetensors")
    with pytest.raises(ConfigError, match=r"^RUN: copy/model cannot be loaded \(its weights do not fit its"):
        main(["copy", "--input", "in.jsonl"])


@pytest.mark.refuses("predict", task="mlm")
def test_a_masked_language_model_is_refused(finished: Path) -> None:
    save(TEXTS[:2])
    shutil.copytree(finished, "masked")
    file = Path("masked/model/task.json")
    file.write_text(changed(file.read_text(), "model", "task", to="mlm"))
    with pytest.raises(ConfigError, match=r"^RUN: a masked language model predicts nothing for a text"):
        main(["masked", "--input", "in.jsonl"])


ROWS: list[dict[str, Any]] = [
    {"id": 7, "text": TEXTS[0], "label": "positive", "score": float("nan")},
    {"id": 9, "text": TEXTS[1], "label": "negative", "input_label": "x", "probabilities.negative": 0.5, "tags": ["a"]},
]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_the_columns_of_the_input_are_in_the_output(finished: Path, suffix: str) -> None:
    main([str(finished), f"input={write_rows('in.jsonl', ROWS)}", f"output=out.{suffix}"])
    answers = {"label", "probability", "probabilities"}
    given = ["id", "text", "input_input_label", "score", "input_label", "input_probabilities.negative", "tags"]
    if suffix == "jsonl":
        first, second = predictions("out.jsonl")
        assert "NaN" not in Path("out.jsonl").read_text(), "which is not JSON"
        assert [name for name in first if name not in answers] == given
        assert (first["id"], first["input_input_label"], first["score"]) == (7, "positive", None)
        assert second["input_probabilities.negative"] == 0.5
    elif suffix == "parquet":
        first, second = pyarrow.parquet.read_table("out.parquet").to_pylist()
        assert list(first) == [*given, "label", "probability", "probabilities"]
    else:
        with open("out.csv", newline="") as file:
            first, second = csv.DictReader(file)
        assert list(first) == [*given, "label", "probability", "probabilities.negative", "probabilities.positive"]
    assert (str(second["id"]), second["input_input_label"], second["input_label"]) == ("9", "negative", "x")
    assert second["tags"] in (["a"], '["a"]')
    assert {first["label"], second["label"]} <= {"negative", "positive"}


def test_columns_that_parquet_cannot_hold_are_refused(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FinishedModel, "predict", None)  # before anything is computed
    rows = [{"text": TEXTS[0], "mixed": 1}, {"text": TEXTS[1], "mixed": "one"}]
    write_rows("in.jsonl", rows)
    with pytest.raises(ConfigError, match=r"^output: a \.parquet file cannot hold these rows \(.+\); choose a \.jsonl"):
        main([str(finished), "input=in.jsonl", "output=out.parquet"])
    assert not list(Path().glob("out*"))


def stock_answers(task: str, folder: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the exported model says of each row, by transformers alone (or sentence-transformers)."""
    if task == "embedding":
        from sentence_transformers import SentenceTransformer

        encoder = SentenceTransformer(str(folder), device="cpu")
        return [{"embedding": encoder.encode(row["anchor"]).tolist()} for row in rows]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    kind = AutoModelForTokenClassification if task == "token_classification" else AutoModelForSequenceClassification
    model = kind.from_pretrained(folder).eval()
    return [stock_answer(task, model, tokenizer, row) for row in rows]


def stock_answer(task: str, model: Any, tokenizer: Any, row: dict[str, Any]) -> dict[str, Any]:
    texts = [row["query"], row["document"]] if task == "reranking" else [row.get("text", row.get("tokens"))]
    encoded = tokenizer(
        *texts, truncation=True, max_length=48, is_split_into_words="tokens" in row, return_tensors="pt"
    )
    with torch.no_grad():
        logits = model(**encoded).logits[0]
    names = model.config.id2label
    if task == "classification":
        named = {names[i]: p for i, p in enumerate(logits.softmax(-1).tolist())}
        return {"label": max(named, key=named.__getitem__), "probability": max(named.values()), "probabilities": named}
    if task == "multilabel":
        named = {names[i]: p for i, p in enumerate(logits.sigmoid().tolist())}
        return {"labels": [name for name, p in named.items() if p > 0.5], "probabilities": named}
    if task == "token_classification":
        words, probabilities = encoded.word_ids(0), logits.softmax(-1)
        first = [i for i, word in enumerate(words) if word is not None and word != words[i - 1]]
        unread = [None] * (len(row["tokens"]) - len(first))  # words beyond the maximum length
        return {
            "words": row["tokens"],
            "tags": [names[int(probabilities[i].argmax())] for i in first] + unread,
            "probabilities": [float(probabilities[i].max()) for i in first] + unread,
        }
    score = {"score": float(logits[0])}
    return score if task == "regression" else {**score, "probability": float(logits[0].sigmoid())}


def test_text_is_split_at_whitespace_into_words_with_a_tag_each() -> None:
    own = ["model.task=token_classification", "data.label_all_pieces=true", "data.max_length=16"]
    run(*own, "trainer.max_duration=3ba", "run_name=done", "plot=false", "data.length_scale=0.2")
    words = builtin_samples("token_classification", 1, 5, "eval", 0.2)["tokens"][0][:4]
    words += ["\u200b", *("unbelievable" for _ in range(20))]  # one without pieces, then too many
    Path("lists.jsonl").write_text(json.dumps({"tokens": words}) + "\n")
    Path("texts.jsonl").write_text(json.dumps({"id": 3, "text": "  ".join(words) + "\n"}) + "\n")
    for name in ("lists", "texts"):
        main(["runs/done/model", "--input", f"{name}.jsonl"])
    (answer,), (expected,) = (predictions(f"{name}.predictions.jsonl") for name in ("texts", "lists"))
    assert (answer.pop("id"), answer.pop("text").split()) == (3, expected.pop("tokens"))
    assert answer == expected
    assert answer["words"] == words
    assert [tag is None for tag in answer["tags"][:5]] == [False] * 4 + [True], "the tokenizer drops the fifth word"
    assert answer["tags"][-1] is answer["probabilities"][-1] is None, "beyond data.max_length"
    Path("written.jsonl").write_text(json.dumps({"tokens": str(["a", "b"])}) + "\n")
    with pytest.raises(DataError, match=r"^input: written\.jsonl, row 1: tokens is .*; every sample needs words"):
        main(["runs/done", "--input", "written.jsonl"])


def evaluated(text: str) -> dict[str, float]:
    lines = [line.split() for line in text.splitlines()[1:] if not line.startswith("  F1 of ")]
    return {name: float(value) for name, value, *_ in lines}


@pytest.mark.parametrize(
    "task",
    others_exhaustive(
        ["token_classification", "classification", "multilabel", "regression", "reranking", "embedding", "mlm"],
        "token_classification".__eq__,
    ),
)
def test_evaluate_prints_the_metrics_of_training(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Computed anew from the file of its validation samples, and with other samples not."""
    for split in ("train", "eval"):
        save_columns(builtin_samples(task, 24, 5, split, 0.2), f"{split}.jsonl")
    files = ["data.source=files", "data.train_file=train.jsonl", "data.eval_file=eval.jsonl"]
    files += ["data.train_samples=null", "data.eval_samples=null", f"model.task={task}"]
    report = run(*files, "trainer.max_duration=6ba", "run_name=done", "plot=false")
    expected = {name: value for name, value in report["metrics"].items() if not name.startswith("train_")}
    capsys.readouterr()
    main(["runs/done", "--input", "eval.jsonl", "--evaluate", "batch_size=5"])
    printed = capsys.readouterr().out
    assert printed.startswith("eval.jsonl: 24 rows\n")
    assert evaluated(printed) == pytest.approx(expected, rel=1e-3, abs=1e-3), "padded then, unpadded now"
    for name, values in report["classes"].get("classes", {}).items():
        assert re.search(rf"  F1 of {re.escape(name)} +{values['f1'] or 0:.6g}  ", printed)
        assert f"recall {values['recall']:.4g}, {values['samples']} samples" in printed
    call = ["runs/done", "--input", "eval.jsonl", "--evaluate", "--errors", "worst.jsonl"]
    if task in ("embedding", "mlm"):
        with pytest.raises(ConfigError, match=f"^errors: a run of model.task: {task}.* has no loss of a single row"):
            main(call)
    else:
        main(call)
        worst = predictions("worst.jsonl")
        assert [row["loss"] for row in worst] == sorted((row["loss"] for row in worst), reverse=True)
        if task != "token_classification":  # whose metric is a mean over words
            assert sum(row["loss"] for row in worst) / 24 == pytest.approx(expected["loss"], rel=1e-3, abs=1e-3)
        main(call[:3])
        own = [{name: value for name, value in row.items() if name != "loss"} for row in worst]
        for row in predictions("eval.predictions.jsonl"):
            assert row in own
    capsys.readouterr()
    main(["runs/done/model", "input=train.jsonl", "evaluate=true"])
    assert evaluated(capsys.readouterr().out) != pytest.approx(expected, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_errors_are_the_labelled_rows_by_their_losses(finished: Path, suffix: str) -> None:
    samples = [(str(i), text, ("negative", "positive")[i % 3 > 0]) for i, text in enumerate(TEXTS[:9])]
    samples[4] = ("4", "", "positive")
    with open("in.csv", "w", newline="") as file:
        csv.writer(file).writerows([("loss", "text", "label"), *samples])  # a column of its own is called loss
    main([str(finished), "--input", "in.csv", "--evaluate", "--errors", f"new/worst.{suffix}", "batch_size=2"])
    with open(f"new/worst.{suffix}", newline="") as file:
        worst = list(csv.DictReader(file)) if suffix == "csv" else [json.loads(line) for line in file]
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    model = AutoModelForSequenceClassification.from_pretrained(finished / "model").eval()
    losses = dict[str, float]()
    for number, text, label in samples[:4] + samples[5:]:
        encoded = tokenizer(text, truncation=True, max_length=48, return_tensors="pt")
        with torch.no_grad():
            logits = model(**encoded).logits
        losses[number] = float(F.cross_entropy(logits, torch.tensor([model.config.label2id[label]])))
    assert [row["input_loss"] for row in worst] == sorted(losses, key=losses.__getitem__, reverse=True)
    assert [float(row["loss"]) for row in worst] == pytest.approx(sorted(losses.values(), reverse=True), rel=1e-4)
    for row in worst:
        assert (row["input_loss"], row["text"], row["input_label"]) in samples
        probability = float(row["probability"] if row["label"] == row["input_label"] else 1 - float(row["probability"]))
        assert float(row["loss"]) == pytest.approx(-math.log(probability), rel=1e-3)


@pytest.mark.exhaustive
def test_evaluate_leaves_invalid_rows_out_and_counts_them(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    valid = [(text, "positive" if i % 3 else "negative") for i, text in enumerate(TEXTS[:6])]
    invalid = [("", "positive"), ("fine", ""), ("fine", "so")]
    for name, samples in {"valid.csv": valid, "all.csv": [valid[0], *invalid, *valid[1:]]}.items():
        with open(name, "w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *samples])
    main([str(finished), "--input", "valid.csv", "--evaluate"])
    whole = capfd.readouterr()
    assert "valid.csv: 6 rows\n" in whole.out
    assert "invalid" not in whole.err
    main([str(finished), "--input", "all.csv", "--evaluate"])
    printed = capfd.readouterr()
    assert "all.csv: 9 rows, 3 of them left out\n" in printed.out
    assert [line.split()[2:] for line in printed.out.splitlines() if "binary_f1" in line] == [["of", "positive"]]
    assert evaluated(printed.out) == evaluated(whole.out)
    first = "row 2: text is empty, row 3: label is empty, row 4: label is 'so'"
    assert f"input: all.csv: 3 of 9 rows are invalid ({first})" in printed.err
    advice = "every sample needs text; every label must be one of negative, positive (data.labels)"
    assert f"; {advice}; the metrics leave out such rows\n" in printed.err
    assert not list(Path().glob("*predictions*"))


@pytest.mark.supports("predict")
@pytest.mark.parametrize("task", [task for task in TASKS if task != "mlm"])
def test_predictions_are_what_the_exports_compute_in_the_inputs_order(task: str, finished: Path) -> None:
    """transformers computes the rows one by one: nothing is padded."""
    folder, samples = finished, {"text": TEXTS}
    if task != "classification":
        run(f"model.task={task}", "trainer.max_duration=3ba", "run_name=done", "plot=false", "data.length_scale=0.2")
        folder, samples = Path("runs/done"), builtin_samples(task, 9, 5, "eval", 0.2)
    if task == "embedding":
        samples = {"anchor": samples["anchor"]}  # which is all that a prediction reads
    given = predictions(save_columns(samples, "in.jsonl"))
    main([str(folder), "--input", "in.jsonl", "batch_size=7"])
    answers = predictions()
    for answer, expected in zip(answers, stock_answers(task, folder / "model", given), strict=True):
        for name, value in expected.items():
            numbers = name not in ("label", "labels", "words", "tags")
            assert flat(answer[name]) == (pytest.approx(flat(value), abs=2e-5) if numbers else flat(value)), name
    if task == "classification":
        assert len({round(row["probability"], 5) for row in answers}) > 40, "texts of different lengths and opinions"
        assert [*answers[0]["probabilities"]] == ["negative", "positive"]


def flat(value: Any) -> Any:
    """Numbers for pytest.approx, -1 for None; names as they are."""
    values = list(value.values()) if isinstance(value, dict) else value
    return [-1 if item is None else item for item in values] if isinstance(values, list) else values
