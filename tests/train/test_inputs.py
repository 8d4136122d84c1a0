"""A run is not resumed, and a finished one not reused, once a file that it read has other content."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import BertForSequenceClassification

from composer_speedups.core import files
from composer_speedups.core.errors import ConfigError, DataError
from composer_speedups.data.builtin import builtin_reviews
from composer_speedups.data.tokens import load_tokenizer
from composer_speedups.tasks.settings import DataConfig
from composer_speedups.train import inputs
from composer_speedups.train.config.load import load_config
from composer_speedups.train.inputs import changed_input, inputs_of
from tests.helpers.common import tiny_config
from tests.helpers.jobs import run
from tests.train.test_autoresume import crash_after

FILES = ["data.source=files", "data.train_file=train.csv", "data.eval_file=eval.csv"]
FILES += ["data.train_samples=null", "data.eval_samples=null"]
OWN = ["model.name=./stored", "model.init=pretrained", "model.size=null", "data.tokenizer=./words"]
JOB = [*FILES, *OWN, "run_name=job", "checkpoint.interval=2ba", "checkpoint.keep=-1", "trainer.max_duration=6ba"]
JOB += ["trainer.eval_interval=100ba", "export=false"]


def write(name: str, seed: int, rows: int = 48) -> None:
    Dataset.from_dict(builtin_reviews(rows, seed, "train", 0.1)).to_csv(name)


def prepare() -> None:
    """A model, its tokenizer and data in the current folder."""
    write("train.csv", 1)
    write("eval.csv", 2, 8)
    texts = builtin_reviews(60, 5, "train", 0.15)["text"]
    tokenizer = load_tokenizer(DataConfig(tokenizer="wordpiece", vocab_size=400), "", texts)
    BertForSequenceClassification(tiny_config(vocab_size=len(tokenizer))).save_pretrained("stored")
    for folder in ("stored", "words"):
        tokenizer.save_pretrained(folder)


def swap_labels() -> None:
    """The file keeps its size and its time."""
    path, status = Path("train.csv"), os.stat("train.csv")
    lines = path.read_text().splitlines()
    places = [next(i for i, line in enumerate(lines) if line.endswith(f",{label}")) for label in (0, 1)]
    for place in places:
        lines[place] = lines[place][:-1] + str(1 - int(lines[place][-1]))
    path.write_text("\n".join(lines) + "\n")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size


def remove_row() -> None:
    lines = Path("eval.csv").read_text().splitlines()
    Path("eval.csv").write_text("\n".join(lines[:-1]) + "\n")


def change_weights() -> None:
    weights = load_file("stored/model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, "stored/model.safetensors", {"format": "pt"})


def change_text(name: str, old: str, new: str) -> Callable[[], object]:
    return lambda: Path(name).write_text(Path(name).read_text().replace(old, new))


CHANGES: list[tuple[Callable[[], object], str]] = [
    (swap_labels, "data.train_file: train.csv"),
    (remove_row, "data.eval_file: eval.csv"),
    (change_weights, "model.name: model.safetensors"),
    (change_text("stored/config.json", '"hidden_act": "gelu"', '"hidden_act": "relu"'), "model.name: config.json"),
    (change_text("words/tokenizer.json", '"lowercase": true', '"lowercase": false'), "data.tokenizer: tokenizer.json"),
]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that crashed after five batches."""
    folder = tmp_path_factory.mktemp("template")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        prepare()
        with crash_after(5, patch):
            run(*JOB)
    return folder


@pytest.mark.parametrize(("change", "named"), CHANGES, ids=[named for _, named in CHANGES])
def test_a_changed_file_is_named_and_the_run_not_resumed(
    change: Callable[[], object], named: str, template: Path
) -> None:
    shutil.copytree(template, ".", dirs_exist_ok=True, symlinks=True)
    before = sorted(Path("runs").rglob("*"))
    change()
    newest = "checkpoint.load=runs/job/checkpoints/ep0-ba4-rank0.pt"
    for door, line in (([], "run_name: 'job' was interrupted, and"), ([newest], "checkpoint.load: runs/job/")):
        with pytest.raises(ConfigError) as error:
            run(*JOB, *door)
        assert str(error.value).startswith(line)
        assert f"and {named} has changed since; to resume, restore that file; or " in str(error.value)
    assert sorted(Path("runs").rglob("*")) == before
    for fix in ([newest, "checkpoint.weights_only=true"], ["checkpoint.autoresume=false"]):
        assert run(*JOB, *fix, "trainer.max_duration=2ba")["resumed"] == []


def test_times_do_not_count_and_the_report_and_the_checkpoint_have_the_inputs(template: Path) -> None:
    shutil.copytree(template, ".", dirs_exist_ok=True, symlinks=True)
    for path in ("train.csv", "stored/model.safetensors", "words/tokenizer.json"):
        os.utime(path)
    Path("stored/README.md").write_text("is not read")
    report = run(*JOB)
    assert [entry["batch"] for entry in report["resumed"]] == [4]
    held = torch.load("runs/job/checkpoints/ep1-ba6-rank0.pt", weights_only=False)
    assert report["inputs"] == held["state"]["callbacks"]["RunHistory"]["inputs"]
    assert [*report["inputs"]] == ["data.train_file", "data.eval_file", "model.name", "data.tokenizer"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= report["inputs"]["model.name"].keys()


def test_patterns_folders_and_initial_weights_are_covered_and_names_of_shards_are_not() -> None:
    words = ["data.tokenizer=wordpiece", "model.init=random", "model.size=tiny"]

    def read(*keys: str) -> inputs.Inputs:
        return inputs_of(load_config(None, [*words, "data.source=files", *keys]))

    for number in (1, 2):
        write(f"part-{number}.csv", number)
    before = read("data.train_file=part-*.csv")
    Path("part-2.csv").rename("part-3.csv")
    assert changed_input(before, read("data.train_file=part-*.csv")) is None
    Path("part-1.csv").rename("part-4.csv")
    assert changed_input(before, read("data.train_file=part-*.csv")) == "data.train_file: part-1.csv"
    Path("part-4.csv").unlink()

    for labels, same in (([0, 1], True), ([1, 0], False)):
        Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}).save_to_disk("saved")
        before = read("data.train_file=saved")
        shutil.rmtree("saved")
        Dataset.from_dict({"text": ["a", "b"], "label": labels}).save_to_disk("saved")
        assert (changed_input(before, read("data.train_file=saved")) is None) is same

    Path("first.pt").write_bytes(b"weights")
    load = ["data.train_file=part-3.csv", "checkpoint.load=first.pt", "checkpoint.weights_only=true"]
    before = read(*load, "checkpoint.interval=1ba")
    Path("first.pt").write_bytes(b"others.")
    assert changed_input(before, read(*load, "checkpoint.interval=1ba")) == "checkpoint.load: first.pt"
    with pytest.raises(DataError, match=r"data\.train_file: there is no file"):
        read("data.train_file=missing-*.csv")


def test_of_large_files_the_size_and_blocks_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WHOLE", 1000)
    monkeypatch.setattr(files, "_BLOCK", 10)
    content = bytearray(os.urandom(2000))
    random = ["model.init=random", "model.size=tiny", "data.tokenizer=wordpiece"]
    config = load_config(None, [*random, "data.source=files", "data.train_file=large.txt"])
    Path("large.txt").write_bytes(content)
    before = inputs_of(config)
    for place, seen in ((0, True), (5, True), (1999, True), (20, False)):  # the last one is between the blocks
        changed = content.copy()
        changed[place] ^= 1
        Path("large.txt").write_bytes(changed)
        assert (inputs_of(config) != before) is seen, place
    Path("large.txt").write_bytes(content + b"0")
    assert inputs_of(config) != before
