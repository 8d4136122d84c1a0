"""Repeated runs: what is planned, the table, processes on GPUs, failures, and real runs that are killed and resumed."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from composer_speedups.core.command_line import read_settings
from composer_speedups.core.errors import ConfigError, RunFailedError
from composer_speedups.sweep.repeat import RepeatConfig, Run, best_of, gpus_of_processes, main, planned_runs, table
from composer_speedups.train.config.load import save_config
from composer_speedups.train.config.schema import Config
from tests.conftest import ROOT
from tests.helpers.hangs import HANGS, wait_until

QUICKSTART = str(ROOT / "yamls" / "quickstart.yaml")
MRPC = str(ROOT / "yamls" / "glue" / "mrpc.yaml")

# A program in place of train.py, which needs no torch: it notes when it ran and on which GPU, and leaves a report.
# Seeds in FULL find the disk full, those in SLOW do not end, those in CHANGES change the data file, and learning rates
# in REFUSED are refused.
STUB = """
import json, os, sys, time
from pathlib import Path
from composer_speedups.core.command_line import parse_command_line
from composer_speedups.core.errors import ConfigError
from composer_speedups.train.cli import exit_codes
from composer_speedups.train.config.load import load_config, save_config
from composer_speedups.train.inputs import inputs_of

began, command = time.time(), parse_command_line(sys.argv[1:])
config = load_config(command.file, command.overrides)
if str(config.seed) in os.environ.get("CHANGES", ""):
    Path(config.data.train_file).write_text("text,label\\nother,0\\n")
folder = Path(config.runs_folder, config.run_name)
folder.mkdir(exist_ok=True)
save_config(config, folder / "config.yaml")
Path(f"{config.run_name}.pid").write_text(str(os.getpid()))
time.sleep(10_000 if str(config.seed) in os.environ.get("SLOW", "") else 0.3)
with open("calls.jsonl", "a") as calls:
    calls.write(json.dumps([config.run_name, os.environ.get("CUDA_VISIBLE_DEVICES"), began, time.time()]) + "\\n")
with exit_codes():
    if f"{config.optimizer.lr:g}" in os.environ.get("REFUSED", "").split():
        raise ConfigError("data.text_columns: no column 'a'" + config.run_name * ("NAMED" in os.environ))
    if str(config.seed) in os.environ.get("FULL", ""):
        raise OSError(28, "No space left on device")
metrics = {"accuracy": config.seed / 8, "train_loss": 1.0}
(folder / "report.json").write_text(json.dumps({"inputs": inputs_of(config), "metrics": metrics}))
"""


def calls() -> list[str]:
    return [json.loads(call)[0] for call in Path("calls.jsonl").read_text().splitlines()]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the module STUB."""
    (tmp_path / "trains_nothing.py").write_text(STUB)
    monkeypatch.syspath_prepend(tmp_path)
    return "trains_nothing"


def finish(run: Run, config: Config | None = None, **metrics: float | None) -> None:
    """Leave the files of a finished run."""
    run.folder.mkdir(parents=True)
    save_config(config or run.config, run.folder / "config.yaml")
    (run.folder / "report.json").write_text(json.dumps({"inputs": run.inputs, "metrics": metrics}))


def cells(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]


def test_seeds_are_numbers_and_ranges() -> None:
    for text, seeds in (("1..5", [1, 2, 3, 4, 5]), ("[3, 1..2]", [3, 1, 2]), ("1..3,2..4", [1, 2, 3, 4])):
        assert read_settings(RepeatConfig, [f"seeds={text}"])[0].seeds == seeds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["seeds=5..1"], "not '5..1'"),
        (["seeds=2147483648"], "seed must be less than 2147483648"),
        (["seed=3"], "set seeds, such as seeds=1..5"),
        (["-f", "nowhere"], "-f nowhere: no such file"),
        (["-f", "quickstart"], "run_name: 'quickstart' is the name of two files"),
        (["seed=[1,2]"], "set seeds, such as seeds=1..5"),
        (["optimizer.lr=[1e-4,0.0001]"], "optimizer.lr=0.0001 is the same run as other values before it; remove it"),
        (["optimizer.lr=[1e-4,1e-4]"], "command line: optimizer.lr=1e-4 is the same run as other values before it"),
        (["optimizer.lr=[1e-4,3e-5]", "optimizer={lr: 1e-3}"], "optimizer.lr=3e-5 is the same run as other values"),
        (["optimizer.lr=[1e-4,3e-5]", "optimizer.lr=1e-3"], "optimizer.lr is given twice"),
        (["optimizer.lr=1e-4", "optimizer.lr=[1e-4,3e-5]"], "optimizer.lr is given twice"),
        (["metric=accuracy", "optimizer.lr=1e-4"], "metric names the best of several values, and no key has a list"),
        (["optimizer.lr=[]"], "a key has an empty list of values"),
        (["optimizer.lr=[1e-4,-1]"], "optimizer.lr must be greater than 0"),
        (["optimizer.rl=[1e-4,3e-5]"], "unknown key 'optimizer.rl'; did you mean 'optimizer.lr'?"),
        (["data.tokenizer=[a/b,a:b]"], "is the name of data.tokenizer=a/b and data.tokenizer=a:b; train one"),
        (["-f", "quickstart", "optimizer.lr=[1e-4,3e-5]"], "run_name: 'quickstart-lr_1e-4' is the name of two files"),
        (["runs_folder=file/runs"], "runs_folder: file/runs (relative to"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_trained(arguments: list[str], message: str) -> None:
    Path("file").write_text("")
    with pytest.raises(ConfigError) as error:
        main(["-f", QUICKSTART, *arguments], "no_program")
    assert message in str(error.value)
    assert [path.name for path in Path().iterdir()] == ["file"]


def test_each_file_is_planned_with_each_seed_in_one_group_of_wandb() -> None:
    runs = planned_runs([QUICKSTART, MRPC], ["loggers.wandb={}", "optimizer.lr=3e-5"], [1, 4])
    assert [(run.base, run.seed) for run in runs] == [(n, s) for n in ("quickstart", "glue_mrpc") for s in (1, 4)]
    assert [run.config.run_name for run in runs][1:3] == ["quickstart-seed4", "glue_mrpc-seed1"]
    assert {run.config.optimizer.lr for run in runs} == {3e-5}
    assert [run.config.seed for run in runs] == [1, 4, 1, 4]
    assert {run.config.loggers.wandb.group for run in runs} == {"quickstart-glue_mrpc"}
    [own] = planned_runs([MRPC], ["loggers.wandb.group=mine"], [1])
    assert own.config.loggers.wandb.group == "mine"


def test_lists_of_values_are_a_grid_in_one_group_of_wandb() -> None:
    grid = [
        "optimizer.lr=[1e-5, 3e-5]",
        "loggers.wandb={tags: [a, b]}",
        "data.tokenizer=['a/b', c]",
        "data.labels=[no,yes]",
    ]
    runs = planned_runs([QUICKSTART], grid, [1, 2])
    assert [(run.config.optimizer.lr, run.config.data.tokenizer, run.seed) for run in runs] == [
        (lr, name, seed) for lr in (1e-5, 3e-5) for name in ("a/b", "c") for seed in (1, 2)
    ]
    assert [run.folder.name for run in runs[1:3]] == [
        "quickstart-lr_1e-5-tokenizer_a_b-seed2",
        "quickstart-lr_1e-5-tokenizer_c-seed1",
    ]
    assert {(run.config.loggers.wandb.group, *run.config.loggers.wandb.tags) for run in runs} == {
        ("quickstart", "a", "b")
    }
    assert {tuple(run.config.task.labels) for run in runs} == {("no", "yes")}
    ranks = planned_runs([QUICKSTART], ["algorithms.lora.targets=[query,value]", "algorithms.lora.rank=[4,8]"], [1])
    assert [run.config.algorithms["lora"] for run in ranks] == [
        {"targets": ["query", "value"], "rank": rank} for rank in (4, 8)
    ]


def test_the_table_has_a_row_for_each_value_and_the_best_is_named() -> None:
    runs = planned_runs([QUICKSTART, MRPC], ["optimizer.lr=[1e-5,3e-5,1e-4]"], [1, 2])
    for run, accuracy in zip(runs[:5], (0.5, 0.9, 0.75, 0.8, 0.8), strict=True):
        finish(run, accuracy=accuracy, loss=1 - accuracy / 2, train_loss=0.0)
    rows = cells(table(runs[:6]).splitlines())[2:]
    assert rows[2][:4] == ["quickstart-lr_3e-5", "accuracy", "2 of 2", "0.7750"]
    assert rows[-1][:2] == ["quickstart-lr_1e-4", "failed: seed 2"]
    best = "best accuracy 0.8000 with optimizer.lr=1e-4 (1 run)"
    best += "; its lead of 0.0250 over the next is within the standard deviation (0.0354)"
    assert best_of(runs, None) == [f"quickstart: {best}"], "no run of mrpc has finished"
    lead = "; its lead of 0.0375 over the next is within the standard deviation (0.1414)"
    assert best_of(runs[:4], "loss") == [f"quickstart: best loss 0.6125 with optimizer.lr=3e-5 (mean of 2 runs){lead}"]
    assert best_of(runs[:4], "CrossEntropy") == best_of(runs[:4], "loss"), "as in loggers"
    assert runs[0].finished("MulticlassAccuracy")
    assert best_of(runs[:4], "f1") == ["quickstart: no run has the metric 'f1'; they have: accuracy, loss"]
    for mode, lr, called in ((None, "3e-5", "loss"), ("max", "1e-5", "CrossEntropy"), ("min", "3e-5", "loss")):
        best = f"checkpoint.best={{metric: {called}, mode: {mode or 'null'}}}"
        asked = [best, "optimizer.lr=[1e-5,3e-5]", "run_name=b"]
        if not (again := planned_runs([QUICKSTART], asked, [1, 2]))[0].folder.exists():
            for run, loss in zip(again, (0.7, 0.8, 0.5, 0.6), strict=True):
                finish(run, accuracy=1 - loss, loss=loss, recall=None)
        for run in again:
            save_config(run.config, run.folder / "config.yaml")
        assert best_of(again, None)[0].endswith(f" with optimizer.lr={lr} (mean of 2 runs)")
        assert best_of(again, "accuracy")[0].endswith(" with optimizer.lr=3e-5 (mean of 2 runs)")  # mode is for loss
        assert best_of(again, "recall") == ["quickstart: recall is undefined in every run"]
    assert best_of(planned_runs([QUICKSTART], [], [1]), None) == []


def test_a_grid_is_trained_and_its_best_value_printed(stub: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["-f", QUICKSTART, "seeds=1..2", "trainer.device=cpu", "optimizer.lr=[1e-5,3e-5]"], stub)
    assert calls() == [f"quickstart-lr_{lr}-seed{seed}" for lr in ("1e-5", "3e-5") for seed in (1, 2)]
    said = capsys.readouterr().out.splitlines()
    both = " and ".join(f"optimizer.lr={lr} (mean of 2 runs)" for lr in ("1e-5", "3e-5"))
    assert said[-1] == f"quickstart: best accuracy 0.1875 with {both}"


def test_runs_that_would_be_refused_like_others_are_not_started(
    stub: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other seeds of a refused run; and all values of a file once two are refused alike."""
    arguments = ["-f", QUICKSTART, "-f", MRPC, "seeds=1..2", "trainer.device=cpu", "optimizer.lr=[1e-5,3e-5,1e-4]"]
    monkeypatch.setenv("REFUSED", "1e-05 3e-05 0.0001")
    with pytest.raises(RunFailedError, match=r"^12 of 12 .* quickstart-lr_1e-5-seed1: data\.text_columns: no column"):
        main(arguments, stub)
    assert calls() == [f"{name}-lr_{lr}-seed1" for name in ("quickstart", "glue_mrpc") for lr in ("1e-5", "3e-5")]
    said = capsys.readouterr().out
    assert "quickstart-lr_1e-4-seed2: not started; it would be refused like quickstart-lr_1e-5-seed1\n" in said
    assert "best" not in said
    Path("calls.jsonl").unlink()
    monkeypatch.setenv("REFUSED", "1e-05")
    with pytest.raises(RunFailedError, match=r"^2 of 6"):
        main([*arguments[:2], *arguments[4:]], stub)
    assert calls() == [
        f"quickstart-lr_{run}" for run in "1e-5-seed1 3e-5-seed1 3e-5-seed2 1e-4-seed1 1e-4-seed2".split()
    ]
    Path("calls.jsonl").unlink()
    monkeypatch.setenv("NAMED", "")
    with pytest.raises(RunFailedError, match=r"^2 of 6"):
        main([*arguments[:2], *arguments[4:]], stub)
    assert calls() == ["quickstart-lr_1e-5-seed1", "quickstart-lr_1e-5-seed2"], "the reason is of one run alone"


def test_an_unknown_metric_stops_the_command_after_the_first_run(stub: str) -> None:
    arguments = ["-f", QUICKSTART, "seeds=1", "trainer.device=cpu", "optimizer.lr=[1e-5,3e-5]"]
    for _ in range(2):  # the second time, before anything is trained
        with pytest.raises(ConfigError, match=r"^metric: 'acc' is not .* quickstart-lr_1e-5-seed1; known: accuracy$"):
            main([*arguments, "metric=acc"], stub)
        assert calls() == ["quickstart-lr_1e-5-seed1"]
    main([*arguments, "metric=accuracy"], stub)
    assert calls() == ["quickstart-lr_1e-5-seed1", "quickstart-lr_3e-5-seed1"]


def test_all_configs_of_a_folder_are_named_at_once(stub: str, capsys: pytest.CaptureFixture[str]) -> None:
    for path in sorted((ROOT / "yamls" / "glue").glob("*.yaml")):
        [run] = planned_runs([str(path)], [], [1])
        finish(run, accuracy=0.5)
    main(["-f", "glue/all", "seeds=1"], stub)
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if "accuracy" in line]
    assert rows == [f"glue_{task}" for task in "cola mnli mrpc qnli qqp rte sst2 stsb wnli".split()]


def test_the_table_has_mean_and_standard_deviation_of_each_metric() -> None:
    runs = planned_runs([QUICKSTART, MRPC], [], [1, 2, 3])
    accuracies, losses = [0.81, 0.84, 0.86], [0.5, 0.375]
    for run, accuracy, loss in zip(runs, accuracies, [*losses, None], strict=False):
        finish(run, train_loss=9.0, accuracy=accuracy, loss=loss)
    finish(runs[3], binary_f1=0.9)
    finish(runs[4], planned_runs([MRPC], ["optimizer.lr=1e-3"], [2])[0].config, binary_f1=0.1)
    mean, stdev = statistics.mean, statistics.stdev
    assert cells(table(runs).splitlines())[2:] == [
        ["quickstart", "accuracy", "3 of 3", f"{mean(accuracies):.4f}", f"{stdev(accuracies):.4f}"],
        ["quickstart", "loss", "2 of 3", f"{mean(losses):.4f}", f"{stdev(losses):.4f}"],
        ["glue_mrpc", "binary_f1", "1 of 3", "0.9000", ""],
        ["glue_mrpc", "failed: seed 2, 3", "", "", ""],
    ]


def test_processes_take_the_visible_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer_speedups.sweep.repeat.command_output", lambda *_, **__: "GPU-0\nGPU-1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    runs = planned_runs([QUICKSTART], [], [1])
    assert gpus_of_processes(runs, None) == ["GPU-0", "GPU-1"]
    for visible, processes, gpus in (
        ("0,2", None, ["0", "2"]),
        (" GPU-a, GPU-b ", 5, ["GPU-a", "GPU-b", "GPU-a", "GPU-b", "GPU-a"]),
        ("0,1,2", 2, ["0", "1"]),
        ("", None, [None]),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpus_of_processes(runs, processes) == gpus
    assert gpus_of_processes(planned_runs([QUICKSTART], ["trainer.device=cpu"], [1]), 2) == [None, None]


def test_runs_are_spread_over_gpus_and_only_failed_ones_are_repeated(
    stub: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-x")
    monkeypatch.setenv("FULL", "2")
    arguments = ["-f", QUICKSTART, "-f", MRPC, "seeds=1..3"]
    line = "2 of 6 runs failed; the first: quickstart-seed2: the disk is full: [Errno 28] No space left on device;"
    with pytest.raises(RunFailedError) as error:
        main(arguments, stub)
    assert str(error.value).startswith(line)
    called = [json.loads(call) for call in Path("calls.jsonl").read_text().splitlines()]
    assert len(called) == 6
    assert {gpu for _, gpu, _, _ in called} == {"3", "GPU-x"}
    for gpu in ("3", "GPU-x"):
        times = sorted((began, ended) for _, used, began, ended in called if used == gpu)
        assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(times))
    assert ["glue_mrpc", "failed: seed 2", "", "", ""] in cells(capsys.readouterr().out.splitlines())

    monkeypatch.delenv("FULL")
    Path("calls.jsonl").unlink()
    main(arguments, stub)
    assert set(calls()) == {"quickstart-seed2", "glue_mrpc-seed2"}
    assert "failed" not in capsys.readouterr().out


def start_command(program: str, *arguments: str) -> subprocess.Popen[bytes]:
    code = (
        "import functools, sys, composer_speedups.sweep.repeat as r; sys.path.append('.'); "
        f"r.main = functools.partial(r.main, program={program!r}); r.command()"
    )
    # the folder of the tests' own composer_speedups comes first, and the stub's is the working directory
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def test_a_second_command_is_refused_and_a_stopped_one_leaves_no_run_behind(
    stub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["-f", QUICKSTART, "seeds=1..2", "trainer.device=cpu"]
    monkeypatch.setenv("SLOW", "2")
    command = start_command(stub, *arguments)
    pid = Path("quickstart-seed2.pid")
    wait_until(lambda: pid.exists() and pid.read_text(), "the second run does not start")
    with pytest.raises(ConfigError, match=r"^runs_folder: runs/\.quickstart-seed1\.repeat\.lock is in use"):
        main(arguments, stub)
    command.terminate()
    assert command.wait(HANGS) == 143
    assert not psutil.pid_exists(int(pid.read_text()))
    monkeypatch.delenv("SLOW")
    main(arguments, stub)
    assert calls() == ["quickstart-seed1", "quickstart-seed2"]


FILES = ["-f", QUICKSTART, "trainer.device=cpu", "data.source=files", "data.train_file=train.csv", "seeds=1..2"]


def test_runs_are_trained_again_once_their_data_changed_and_other_data_are_not_averaged(
    stub: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.csv").write_text("text,label\na,0\nb,1\n")
    main(FILES, stub)
    main(FILES, stub)
    assert calls() == ["quickstart-seed1", "quickstart-seed2"]
    Path("train.csv").write_text("text,label\na,1\nb,0\n")
    capsys.readouterr()
    monkeypatch.setenv("CHANGES", "2")
    with pytest.raises(RunFailedError, match=r"^1 of 2 .*seed2: its data or config changed while the command ran"):
        main(FILES, stub)
    assert calls() == ["quickstart-seed1", "quickstart-seed2"] * 2
    assert ["quickstart", "failed: seed 2", "", "", ""] in cells(capsys.readouterr().out.splitlines())

    of_older = planned_runs([QUICKSTART], FILES[2:-1], [1])[0]
    (of_older.folder / "report.json").write_text('{"metrics": {"accuracy": 1.0}}')  # without the inputs
    assert of_older.metrics() is None
