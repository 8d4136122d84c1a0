"""The benchmark runner: configurations, overrides, rows with their spread, and runs that fail or are stopped."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from composer.utils import dist

from benchmarks import run as runner
from benchmarks.peers.job import PREFIX
from benchmarks.rows import RESULTS, error_report, read_rows
from benchmarks.table_file import Configuration, configurations_of, read_table
from composer_speedups.core.engaging import refuse_conflicts
from composer_speedups.core.errors import ConfigError
from composer_speedups.core.files import lock_file
from composer_speedups.core.registry import build_techniques
from composer_speedups.sweep.processes import Ended, Job
from composer_speedups.train.cli import read_command_line
from composer_speedups.train.config.schema import TrainerConfig
from composer_speedups.train.trainer import open_device
from tests.conftest import ROOT

ROWS = Path("results/cpu/table.jsonl")
REPORT: dict[str, Any] = {
    "throughput": {"samples_per_sec": 100.0, "warmup_seconds": 2.0, "step_seconds_p10_p50_p90": [1, 2, 3]},
    "memory": {"peak_gib": 3.0},
    "metrics": {"accuracy": 0.9},
    "startup": {"imports_seconds": 4.0},
    "algorithms": {"x": {"engaged": True}},
    "environment": {"gpu": None, "torch": "2"},
}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows go to results/cpu, wherever the tests run."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def replace_runs(monkeypatch: pytest.MonkeyPatch, report: Callable[[Job], dict[str, Any]] = lambda _: REPORT) -> Any:
    """Put made-up reports in the place of runs; the jobs of each group that would run, with their number at a time."""
    groups: list[tuple[int, list[Job]]] = []

    def run_all(jobs: list[Job], at_a_time: int, done: Callable[[Job, Ended], None]) -> None:
        groups.append((at_a_time, jobs))
        for job in jobs:
            done(job, Ended(0, "", 5.0))

    monkeypatch.setattr(runner, "run_all", run_all)
    monkeypatch.setattr(runner, "report_of", lambda job, *_: report(job))
    monkeypatch.setattr(runner, "compile_bytecode", lambda programs: None)
    return groups


def runs_of(monkeypatch: pytest.MonkeyPatch, stop_after: int | None = None, rate: float = 100.0) -> list[str]:
    """Put runs of increasing speed in place; the last override of each, as they come."""
    seen: list[str] = []

    def report(job: Job) -> dict[str, Any]:
        if len(seen) == stop_after:
            raise KeyboardInterrupt
        seen.append(next(job.arguments[i - 1] for i, a in enumerate(job.arguments) if a.startswith("runs_folder=")))
        if seen[-1] == "y=1":
            return error_report(Ended(1, "CUDA out of memory", 1.0))
        return {**REPORT, "throughput": {**REPORT["throughput"], "samples_per_sec": rate + len(seen)}}

    replace_runs(monkeypatch, report)
    return seen


def cache_of(job: Job) -> str:
    return str(Path(job.environment["TRITON_CACHE_DIR"]).parent)


def table(**changes: Any) -> Path:
    path = Path("table.yaml")
    content = {
        "base": "yamls/quickstart.yaml",
        "set": ["a=1"],
        "repeats": 2,
        "cumulative": True,
        "configurations": {"plain": [], "+ x": ["x=1"], "+ y": ["y=1"]},
    }
    path.write_text(yaml.safe_dump({**content, **changes}, sort_keys=False))
    return path


def run(*overrides: str, **changes: Any) -> list[dict[str, Any]]:
    return runner.run_table(read_table(table(**changes), overrides), "table", Path("results"))


# Tables


def test_configurations_accumulate_over_the_matrix_except_those_of_peers() -> None:
    declared = {
        "plain": [],
        "+ x": {"set": ["x=1"], "warm": True},
        "HF": {"peer": "hf_trainer", "set": ["peer.a=1"], "published": "9 samples/s"},
        "+ y": ["y=1"],
    }
    changes = {"configurations": declared, "losses": True, "matrix": {"data.batch_size": [40, 128]}}

    def read(*overrides: str, **more: Any) -> list[Configuration]:
        return configurations_of(read_table(table(**changes, **more), overrides))

    every = read("repeats=5", "seed=3")
    assert [(c.name, c.point["data.batch_size"]) for c in every[:5]] == [*((n, 40) for n in declared), ("plain", 128)]
    assert [c.overrides for c in every[:4]] == [
        ["a=1", "data.batch_size=40", *own, "loggers.file={}", "seed=3"]
        for own in ([], ["x=1"], ["peer.a=1"], ["x=1", "y=1"])
    ]
    assert [(c.peer, c.warm, c.published) for c in every[1:3]] == [
        (None, True, None),
        ("hf_trainer", False, "9 samples/s"),
    ]
    assert [c.overrides[2:-1] for c in read("configurations=[+ y]", "data.batch_size=64")] == [["x=1", "y=1"]]
    some = read("configurations=[plain]", "data.batch_size=[8,64]")
    assert [c.point["data.batch_size"] for c in some] == [8, 64]
    assert read(cumulative=False)[3].overrides[2:-1] == ["y=1"]


def test_a_table_that_is_like_another_has_its_keys_and_sets_its_own_afterwards() -> None:
    every = {"set": ["a=1", "b=1"], "matrix": {"seed": [1, 2]}, "cumulative": True}
    whole = read_table(table(**every, configurations={"x": [], "y": ["y=1"]}))
    Path("like.yaml").write_text("like: table\nset: [a=2]\nmatrix: {}\n")
    like = read_table(Path("like.yaml"), ["repeats=5"])
    assert like == whole.model_copy(update={"overrides": ["a=1", "b=1", "a=2"], "matrix": {}, "repeats": 5})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"more": 1}, "more: Extra inputs are not permitted"),
        (
            {"configurations": {"HF": {"peer": "hf"}}},
            "configurations.HF: no such peer; peers are bare_loop, flattened_",
        ),
        ({"configurations": {"HF": {"peer": "hf_trainer", "ranks": 2}}}, "leave out ranks, or take own_trainer"),
        ({"configurations": {"x": [{"a": 1}]}}, "configurations.x.set.0: Input should be a valid string, not {'a': 1}"),
        ("repeats=0", "repeats: Input should be greater than or equal to 1, not '0'"),
        ("configurations=[+ z]", "configurations must be among plain, + x, + y"),
        ("--repeat", "--repeat: must be key=value, like repeats=2"),
    ],
)
def test_wrong_keys_and_overrides_are_one_line(wrong: dict[str, Any] | str, message: str) -> None:
    changes, overrides = ({}, [wrong]) if isinstance(wrong, str) else (wrong, [])
    with pytest.raises(SystemExit, match=re.escape(message)) as raised:
        read_table(table(**changes), overrides)
    assert "\n" not in str(raised.value)


TABLES = [path.stem for path in sorted((ROOT / "benchmarks" / "tables").glob("*.yaml"))]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "fast" else pytest.mark.exhaustive) for name in TABLES]
)
def test_every_configuration_of_the_repositorys_tables_is_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys, and that its techniques go together; a GPU is assumed."""
    for folder in ("IMDB_DIR", "PROTEINS_DIR", "MPNET_DIR"):
        monkeypatch.setenv(folder, "folder")
    read = read_table(ROOT / "benchmarks" / "tables" / f"{name}.yaml")
    for configuration in {configuration.name: configuration for configuration in configurations_of(read)}.values():
        own = [override for override in configuration.overrides if not override.startswith(PREFIX)]
        config = read_command_line(["-f", str(ROOT / read.base), *own])
        refuse_conflicts(build_techniques(config.algorithms, config.on_unavailable))


def test_no_committed_call_is_unfinished() -> None:
    """``resume=true`` can always be given, but would be refused after a call that was stopped at another commit."""
    unfinished = {str(path) for path in RESULTS.glob("*/*.jsonl") for row in read_rows(path) if "unfinished" in row}
    assert not unfinished, "remove the key from the rows of a call that nobody will resume"


# Calls


def test_the_command_runs_configurations_in_turn_and_rows_have_the_spread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order = runs_of(monkeypatch)
    runner.main([str(table())], Path("results"))
    assert order == ["a=1", "x=1", "y=1"] * 2
    rows = read_rows(ROWS)
    assert len({row["call"] for row in rows}) == 1
    assert rows[0]["startup"] == REPORT["startup"]
    assert rows[0]["samples_per_sec"] == {"median": 102.5, "min": 101.0, "max": 104.0, "runs": [101.0, 104.0]}
    assert rows[1]["accuracy"]["median"] == 0.9
    assert rows[2]["samples_per_sec"] is None
    assert rows[2]["errors"] == ["exit status 1: CUDA out of memory"] * 2
    printed = capsys.readouterr().out
    assert "| + x | 104 (102–105) | 1.01 |" in printed
    assert "| + y | out of memory" in printed
    with pytest.raises(
        SystemExit, match=r"no such table; there are base_accuracy, batch_tokens, .*ladder, leave_one_out"
    ):
        runner.main(["nothing"])


def test_warm_configurations_fill_their_caches_before_the_first_recorded_run(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = replace_runs(monkeypatch, lambda _: {**REPORT, "process_seconds": 5.0, "losses": [0.7, 0.6]})
    matrix = {"seed": [1, 2], "data.batch_size": [8, 16]}
    rows = run("warm_jobs=3", matrix=matrix, repeats=1, configurations={"cold": [], "warm": {"warm": True}})
    (warm_jobs, fills), (jobs, runs) = groups
    assert (warm_jobs, len(fills), jobs, len(runs)) == (3, 2, 1, 8), "seeds share a cache, and batch sizes do not"
    warm = [job for job, row in zip(runs, rows, strict=True) if row["warm"]]
    assert {cache_of(job) for job in warm} == {cache_of(job) for job in fills}
    assert len({cache_of(job) for job in runs}) == 4 + 2
    assert [len(row["process_seconds"]["runs"]) for row in rows] == [1] * 8
    assert rows[0]["losses"] == [0.7, 0.6]

    groups.clear()
    run(share_compiled=True)
    assert [len(jobs) for _, jobs in groups] == [0, 6], "all are recorded"
    assert len({cache_of(job) for job in groups[1][1]}) == 1


def test_concurrent_runs_record_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_runs(monkeypatch)
    rows = run("jobs=3")
    assert [row["jobs"] for row in rows] == [3, 3, 3]
    assert [row["samples_per_sec"] for row in rows] == [None] * 3
    assert [row["accuracy"]["runs"] for row in rows] == [[0.9, 0.9]] * 3
    assert "| plain | not timed |" in "\n".join(runner.markdown(rows))


def test_rows_are_stored_by_the_gpu_of_the_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "command_output", lambda *_, **__: "NVIDIA H200\nNVIDIA H200")
    on_cpu, either = Configuration("a", {}, ["trainer.device=cpu"]), Configuration("b", {}, [])
    assert runner.rows_file([either], "t", Path("results")) == Path("results/cpu/t.jsonl")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert runner.rows_file([on_cpu, either], "t", Path("results")) == Path("results/nvidia-h200/t.jsonl")
    assert runner.rows_file([on_cpu, on_cpu], "t", Path("results")) == Path("results/cpu/t.jsonl")


# Calls that are stopped


def test_a_table_runs_in_one_process_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = runs_of(monkeypatch)
    run()
    with lock_file(ROWS.with_name(".table.lock"), "table"), pytest.raises(SystemExit, match="is running this table"):
        run()
    assert len(seen) == 6


def test_a_resumed_call_runs_the_missing_runs_and_has_one_set_of_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs_of(monkeypatch, stop_after=4)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert "resume=true continues from results/cpu/table.jsonl" in capsys.readouterr().err
    first = read_rows(ROWS)
    assert [(row["configuration"], row["repeats"]) for row in first] == [("plain", 2), ("+ x", 1), ("+ y", 1)]
    seen = runs_of(monkeypatch, rate=200.0)
    rows = run("resume=true")
    assert seen == ["x=1", "y=1"]
    assert read_rows(ROWS) == rows
    assert {row["call"] for row in rows} == {row["call"] for row in first}
    assert rows[0]["samples_per_sec"]["runs"] == [101.0, 104.0]
    assert rows[1]["samples_per_sec"]["runs"] == [102.0, 201.0]
    assert not any("unfinished" in row for row in rows)
    seen = runs_of(monkeypatch)
    again = run("resume=true")  # nothing is unfinished: a new call
    assert len(seen) == 6
    assert read_rows(ROWS) == [*rows, *again]


@pytest.mark.parametrize(
    ("overrides", "changes", "commit"),
    [
        (["trainer.max_duration=9ba"], {}, "abc"),
        (["configurations=[plain]"], {}, "abc"),
        (["jobs=2"], {}, "abc"),
        ([], {"base": "yamls/bert_imdb.yaml"}, "abc"),
        ([], {}, "def"),
    ],
)
def test_a_call_with_other_arguments_or_code_cannot_be_resumed(
    overrides: list[str], changes: dict[str, Any], commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPOSER_SPEEDUPS_COMMIT", "abc")
    runs_of(monkeypatch, stop_after=1)
    with pytest.raises(KeyboardInterrupt):
        run()
    before = ROWS.read_bytes()
    seen = runs_of(monkeypatch)
    monkeypatch.setenv("COMPOSER_SPEEDUPS_COMMIT", commit)
    with pytest.raises(SystemExit, match=r"had other configurations, overrides or code; .*remove resume=true"):
        run("resume=true", *overrides, **changes)
    assert seen == []
    assert ROWS.read_bytes() == before


def test_the_version_of_the_code_depends_on_uncommitted_changes_but_not_on_rows() -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *arguments], check=True, capture_output=True)

    def version(code: str, rows: str) -> str | None:
        Path("code.py").write_text(code)
        Path("benchmarks/results/rows").write_text(rows)
        return runner.code_version(Path())

    Path("benchmarks/results").mkdir(parents=True)
    git("init", "-q")
    version("1\n", "1\n")
    git("add", ".")
    git("commit", "-qm", "all")
    assert version("1\n", "1\n") == version("1\n", "2\n")
    assert len({version(code, "1\n") for code in ("1\n", "2\n", "3\n")}) == 3


# Processes


def test_more_ranks_than_gpus_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(dist, "get_local_world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"trainer\.device: 2 ranks need one GPU each, and there are 1"):
        open_device(TrainerConfig())


BRIEF = ["data.train_samples=16", "data.eval_samples=8", "trainer.max_duration=1ba", "data.vocab_size=300"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_each_run_has_its_own_process_that_imported_before() -> None:
    runs = {"ours": ["loggers.file={}"], "refused": ["data.bach_size=1"]}
    rows = run(set=BRIEF, repeats=1, cumulative=False, configurations=runs)
    assert len(rows[0]["losses"]) == 1
    assert rows[0]["process_seconds"] is None
    assert rows[0]["run_seconds"]["median"] > 0
    assert rows[1]["error_kinds"] == ["refused"]
    assert "train.py: command line: unknown key 'data.bach_size'" in rows[1]["errors"][0]


@pytest.mark.long
def test_a_cold_run_is_timed_from_its_start_and_ranks_train_together() -> None:
    runs = {"peer": {"peer": "bare_loop"}, "ours": ["loggers.file={}"], "two": {"ranks": 2}}
    peer, ours, two = run(set=BRIEF, repeats=1, cumulative=False, configurations=runs, fresh=True)
    assert peer["algorithms"]["bare_loop"]["engaged"]
    # The kernel gives the start of a process in ticks since a boot that is itself known to about a second only.
    assert ours["process_seconds"]["median"] + 1 > ours["startup"]["to_first_step_seconds"] > 1
    assert two["errors"] == []
    assert two["environment"] == ours["environment"]
