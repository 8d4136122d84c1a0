"""The folder of a run: an earlier run is kept, an interrupted one resumed, and a run in use refused."""

from __future__ import annotations

import contextlib
import gc
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from composer.utils import dist

from composer_speedups.core.errors import ConfigError, DataError, Refusal, RunFailedError
from composer_speedups.core.files import lock_file
from composer_speedups.train import trainer
from composer_speedups.train.checkpoints import checkpoints_in
from composer_speedups.train.config.load import load_config
from composer_speedups.train.fit import StopSignals
from composer_speedups.train.report import StartupTimes
from composer_speedups.train.run_folder import RunFolder
from tests.helpers.jobs import run

JOB = [
    *("run_name=job", "checkpoint.interval=2ba", "checkpoint.keep=-1", "trainer.max_duration=8ba"),
    *("trainer.eval_batches=1", "trainer.eval_interval=100ba", "export=false"),
]
FOLDER = Path("runs/job")
CHECKPOINTS = FOLDER / "checkpoints"


class Crash(Exception):
    pass


@contextlib.contextmanager
def crash_after(batch: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make runs within this context crash after ``batch`` batches."""

    def batch_end(_: Any, state: Any, logger: Any) -> None:
        if state.timestamp.batch.value == batch:
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(StartupTimes, "batch_end", batch_end)
        with contextlib.suppress(Crash):
            yield
            pytest.fail("the run continued")
    gc.collect()  # closes the Trainer, as the end of the process would


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a crashed run."""
    folder = tmp_path_factory.mktemp("template")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with crash_after(5, patch):
            run(*JOB)
    return folder


@pytest.fixture
def interrupted(template: Path) -> None:
    """Copy the crashed run, which left checkpoints 2 and 4, into the current folder."""
    shutil.copytree(template, ".", dirs_exist_ok=True, symlinks=True)
    assert [path.name for path in checkpoints_in(CHECKPOINTS)] == ["ep0-ba4-rank0.pt", "ep0-ba2-rank0.pt"]


@pytest.mark.usefixtures("interrupted")
@pytest.mark.pins
def test_the_same_command_resumes_and_prints_the_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    report = run(*JOB, "trainer.max_duration=10ba", "checkpoint.keep=1")  # longer than 8ba, but not as text
    printed = capsys.readouterr().out
    assert "job: resumes from runs/job/checkpoints/ep0-ba4-rank0.pt" in printed
    assert "resumed after batch 4" in printed
    assert report["resumed"] == [{"batch": 4, "checkpoint": "ep0-ba4-rank0.pt"}]
    assert report["training"]["batches"] == 10
    assert report["data"].keys() == {"dropped", "truncation", "check"}
    assert [path.name for path in Path("runs").iterdir() if path.is_dir()] == ["job"]
    assert [path.name for path in checkpoints_in(CHECKPOINTS)] == ["ep1-ba10-rank0.pt"], "keep=1 now"


@pytest.mark.usefixtures("interrupted")
@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("seed=3", "seed was 17 and is 3"),
        ("algorithms.fused_optimizer=null", "algorithms.fused_optimizer was {} and is unset"),
        ("trainer.max_duration=7ba", "trainer.max_duration was 8ba and is 7ba"),
        ("trainer.max_duration=9ep", "trainer.max_duration was 8ba and is 9ep"),
    ],
)
def test_a_changed_config_is_refused_with_the_changed_key(override: str, named: str) -> None:
    before = sorted(Path("runs").rglob("*"))
    with pytest.raises(ConfigError) as error:
        run(*JOB, override)
    assert f"run_name: 'job' was interrupted under another config: {named}; to resume, set the same" in str(error.value)
    assert sorted(Path("runs").rglob("*")) == before
    (FOLDER / "config.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"its runs/job/config\.yaml cannot be read"):
        run(*JOB)


@pytest.mark.usefixtures("interrupted")
def test_damaged_checkpoints_are_skipped_and_kept() -> None:
    newest = CHECKPOINTS / "ep0-ba4-rank0.pt"
    newest.write_bytes(newest.read_bytes()[:-1000])
    with pytest.warns(UserWarning, match=r"skipped a checkpoint: checkpoint\.autoresume: .*ba4-rank0\.pt cannot"):
        assert run(*JOB)["resumed"] == [{"batch": 2, "checkpoint": "ep0-ba2-rank0.pt"}]
    assert len(list(CHECKPOINTS.glob("ep0-ba4-rank0.pt.*"))) == 1
    for path in checkpoints_in(CHECKPOINTS):
        path.write_bytes(b"")
    (FOLDER / "report.json").unlink()
    with pytest.warns(UserWarning, match="skipped a checkpoint"):
        assert run(*JOB)["resumed"] == []


@pytest.mark.usefixtures("interrupted")
def test_resuming_from_an_earlier_checkpoint_renames_later_ones() -> None:
    report = run(*JOB, f"checkpoint.load={CHECKPOINTS}/ep0-ba2-rank0.pt")
    assert len(list(CHECKPOINTS.glob("ep0-ba4-rank0.pt.*"))) == 1
    assert [entry["batch"] for entry in report["resumed"]] == [2]
    again = run(*JOB, f"checkpoint.load={CHECKPOINTS}/ep1-ba6-rank0.pt", "trainer.max_duration=10ba")
    assert [entry["batch"] for entry in again["resumed"]] == [2, 6]
    assert len(list(FOLDER.glob("report.json.*"))) == 1
    with pytest.raises(ConfigError, match=r"trainer\.max_duration: 10ba counts from the start, and is over in"):
        run(*JOB, f"checkpoint.load={CHECKPOINTS}/latest-rank0.pt", "trainer.max_duration=10ba")


def test_the_logs_of_interrupted_processes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for batch in (3, 5):
        with monkeypatch.context() as patch, crash_after(batch, patch):
            run(*JOB, "loggers.file={}")
    run(*JOB, "loggers.file={}")
    logs = ["log-rank0.2.txt", "log-rank0.3.txt", "log-rank0.txt"]
    assert sorted(path.name for path in FOLDER.glob("log-rank0*")) == logs


def test_signals_are_deferred_only_during_training(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as stop:
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
        assert ended.value.code == 143
        assert capfd.readouterr().err == "\nSIGTERM: stopped at once; no checkpoint was written\n"
        stop.phase = "after the batch"
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)  # Composer's launcher forwards it as SIGTERM
        assert stop.received == signal.SIGINT
        later = "finishing the batch and writing a checkpoint; Ctrl-C (again) stops at once"
        assert capfd.readouterr().err == f"\nSIGINT: {later}\n\nSIGTERM: {later}\n"
        monkeypatch.setattr("os._exit", lambda status: (_ for _ in ()).throw(Crash(status)))
        with pytest.raises(Crash, match="130"):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before
    with StopSignals() as stop:
        stop.phase = "never"
        signal.raise_signal(signal.SIGTERM)
    assert capfd.readouterr().err == ""


BRIEF = ["trainer.max_duration=1ba", "trainer.eval_batches=1"]


def contents() -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*") if not path.name.endswith(".lock")}


@pytest.mark.parametrize("finished", [True, False])
def test_an_earlier_run_is_kept_under_its_date(
    finished: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interrupted run without checkpoints, too, is no reason to refuse another config."""
    with contextlib.nullcontext() if finished else crash_after(2, monkeypatch):
        run(*BRIEF, "trainer.max_duration=2ba")
    Path("runs/quickstart/notes.txt").write_text("mine")
    assert run(*BRIEF, "data.max_length=64", "checkpoint.interval=1ba")["resumed"] == []
    (kept,) = (path for path in Path("runs").glob("quickstart.*") if path.is_dir())
    assert f"runs/quickstart is a new run; the earlier one is now {kept}\n" in capsys.readouterr().out
    assert (kept / "notes.txt").read_text() == "mine"
    assert (kept / "report.json").exists() is finished
    assert not Path("runs/quickstart/notes.txt").exists()


def test_a_run_in_use_is_refused_and_only_rank_0_removes_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with RunFolder(load_config(None)) as folder:
        with monkeypatch.context() as patch, contextlib.suppress(Crash):
            patch.setattr(dist, "get_global_rank", lambda: 1)
            with RunFolder(load_config(None)):
                raise Crash
        assert (folder / "config.yaml").exists()
        (folder / "notes.txt").write_text("mine")
        with pytest.raises(ConfigError, match="run_name: 'run' is in use"):
            RunFolder(load_config(None))
        assert (folder / "notes.txt").read_text() == "mine"
    with lock_file(Path("runs/.run.lock"), ""):
        pass  # it was given back


def test_a_refused_run_leaves_the_folder_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError("algorithms: refused")

    def refused_thrice() -> None:
        with pytest.raises(ConfigError, match=r"data\.drop_last: the 4 training samples do not fill one batch"):
            run("data.train_samples=4", "data.batch_size=8", "data.drop_last=true")
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "build_trainer", refuse)
            with pytest.raises(ConfigError, match="algorithms: refused"):
                run(*BRIEF)
        with pytest.raises(Refusal, match="lora"):  # when the Trainer has made the folder for checkpoints
            run(*BRIEF, "checkpoint.interval=1ba", "algorithms.lora.targets=[nope]")

    refused_thrice()
    assert contents() == {}
    run(*BRIEF)
    before = contents()
    refused_thrice()
    assert contents() == before
    assert capsys.readouterr().out.count(" is runs/quickstart again\n") == 3


@pytest.mark.usefixtures("interrupted")
@pytest.mark.parametrize("state", ["interrupted", "finished", "without a config"])
def test_a_refused_checkpoint_leaves_its_run_as_it_was(state: str) -> None:
    if state == "finished":
        run(*JOB)
    if state == "without a config":
        (FOLDER / "config.yaml").unlink()
    before = {path: path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"optimizer\.lr: the checkpoint continues with"):
        run(*JOB, f"checkpoint.load={CHECKPOINTS}/ep0-ba2-rank0.pt", "optimizer.lr=0.05")
    assert {path: path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()} == before
    assert bool(run(*JOB)["resumed"]) is (state == "interrupted")  # other runs are set aside


@pytest.mark.usefixtures("interrupted")
@pytest.mark.parametrize(("batch", "error"), [(7, DataError), (6, RunFailedError)])
def test_a_resumed_run_that_wrote_a_checkpoint_or_failed_is_not_undone(
    batch: int, error: type[Refusal], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any, state: Any, logger: Any) -> None:
        if state.timestamp.batch.value == batch:
            raise error("failed")

    monkeypatch.setattr(StartupTimes, "batch_end", fail)
    with pytest.raises(error):
        run(*JOB, "trainer.max_duration=10ba")
    assert load_config(str(FOLDER / "config.yaml")).trainer.max_duration == "10ba"
