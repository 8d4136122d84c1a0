"""The folder of a run: an earlier run is kept, a run in use is refused, and a refused run leaves no trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from composer_speedups.core.errors import ConfigError
from composer_speedups.core.files import lock_file
from composer_speedups.train import trainer
from composer_speedups.train.config.load import load_config
from composer_speedups.train.run_folder import RunFolder
from tests.helpers.jobs import run

BRIEF = ["trainer.max_duration=1ba", "trainer.eval_batches=1"]


def contents() -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*") if not path.name.endswith(".lock")}


def test_an_earlier_run_is_kept_under_its_date() -> None:
    run(*BRIEF)
    Path("runs/quickstart/notes.txt").write_text("mine")
    run(*BRIEF, "trainer.max_duration=2ba")
    (kept,) = (path for path in Path("runs").glob("quickstart.*") if path.is_dir())
    assert (kept / "notes.txt").read_text() == "mine"
    assert json.loads((kept / "report.json").read_text())["training"]["batches"] == 1
    assert not Path("runs/quickstart/notes.txt").exists()


def test_a_run_in_use_is_refused() -> None:
    with RunFolder(load_config(None)) as folder:
        (folder / "notes.txt").write_text("mine")
        with pytest.raises(ConfigError, match="run_name: 'run' is in use"):
            RunFolder(load_config(None))
        assert (folder / "notes.txt").read_text() == "mine"
    with lock_file(Path("runs/.run.lock"), ""):
        pass  # it was given back


def test_the_lock_does_not_follow_a_symbolic_link() -> None:
    Path("precious").write_text("mine")
    Path("runs").mkdir()
    Path("runs/.run.lock").symlink_to("../precious")
    with pytest.raises(ConfigError, match=r"^runs_folder: runs/\.run\.lock is a symbolic link"):
        RunFolder(load_config(None))
    assert Path("precious").read_text() == "mine"
    assert [path.name for path in Path("runs").iterdir()] == [".run.lock"]


def test_a_refused_run_leaves_the_folder_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError("algorithms: refused")

    def refused_twice() -> None:
        with pytest.raises(ConfigError, match=r"data\.drop_last: the 4 training samples do not fill one batch"):
            run("data.train_samples=4", "data.batch_size=8", "data.drop_last=true")
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "build_trainer", refuse)
            with pytest.raises(ConfigError, match="algorithms: refused"):
                run(*BRIEF)

    refused_twice()
    assert contents() == {}
    run(*BRIEF)
    before = contents()
    refused_twice()
    assert contents() == before
