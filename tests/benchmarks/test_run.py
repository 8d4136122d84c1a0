"""The benchmark runner: configurations, overrides, rows with their spread, and runs that fail or are stopped."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import run as runner
from benchmarks.peers.job import read_arguments
from benchmarks.rows import error_report
from benchmarks.table_file import Configuration, configurations_of, read_table
from composer_speedups.core.engaging import refuse_conflicts
from composer_speedups.core.registry import build_techniques
from composer_speedups.sweep.processes import Ended, Job
from composer_speedups.train.cli import read_command_line
from tests.conftest import ROOT

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
    monkeypatch.setattr(runner, "command_output", lambda *command, **_: None if command[0] == "nvidia-smi" else "")


def replace_runs(monkeypatch: pytest.MonkeyPatch, report: Callable[[Job], dict[str, Any]] = lambda _: REPORT) -> Any:
    """Put made-up reports in the place of runs; the jobs of each group that would run, with their number at a time."""
    groups: list[tuple[int, list[Job]]] = []

    def run_all(jobs: list[Job], at_a_time: int, done: Callable[[Job, Ended], None], _: Any) -> None:
        groups.append((at_a_time, jobs))
        for job in jobs:
            done(job, Ended(0, "", 5.0))

    monkeypatch.setattr(runner, "run_all", run_all)
    monkeypatch.setattr(runner, "report_of", lambda job, *_: report(job))
    monkeypatch.setattr(runner, "compile_bytecode", lambda programs: None)
    return groups


def cache_of(job: Job) -> str:
    return str(Path(job.environment["TRITON_CACHE_DIR"]).parent)


def override_of(job: Job) -> str:
    """The last override of the job's configuration."""
    return next(job.arguments[i - 1] for i, a in enumerate(job.arguments) if a.startswith("runs_folder="))


def table(**changes: Any) -> Path:
    path = Path("table.yaml")
    content = {
        "base": "yamls/quickstart.yaml",
        "set": ["a=1"],
        "repeats": 2,
        "matrix": {"data.batch_size": [40, 128]},
        "cumulative": True,
        "configurations": {"plain": [], "+ x": ["x=1"], "+ y": ["y=1"]},
    }
    path.write_text(yaml.safe_dump({**content, **changes}, sort_keys=False))
    return path


def configurations(*overrides: str, **changes: Any) -> list[Configuration]:
    return configurations_of(read_table(table(**changes), overrides))


def test_configurations_accumulate_over_the_matrix() -> None:
    read = configurations()
    assert [(a.name, a.point["data.batch_size"]) for a in read][:4] == [
        ("plain", 40),
        ("+ x", 40),
        ("+ y", 40),
        ("plain", 128),
    ]
    assert read[2].overrides == ["a=1", "data.batch_size=40", "x=1", "y=1"]
    assert configurations(cumulative=False)[2].overrides == ["a=1", "data.batch_size=40", "y=1"]


def test_overrides_replace_repeats_and_axes_and_apply_to_every_configuration() -> None:
    read = read_table(table(), ["repeats=5", "data.batch_size=64", "trainer.max_duration=3ba"])
    assert read.repeats == 5
    assert {a.point["data.batch_size"] for a in configurations_of(read)} == {64}
    assert all(a.overrides[-1] == "trainer.max_duration=3ba" for a in configurations_of(read))


def test_selected_configurations_keep_the_overrides_of_those_above() -> None:
    read = configurations("configurations=[plain, + y]", matrix={})
    assert [(a.name, a.overrides) for a in read] == [("plain", ["a=1"]), ("+ y", ["a=1", "x=1", "y=1"])]


def test_a_table_inherits_the_keys_of_another() -> None:
    other = table(set=["a=1"], published={"where": "there", "configurations": {"plain": "1"}})
    like = other.with_name("like.yaml")
    like.write_text(yaml.safe_dump({"like": other.stem, "set": ["a=2"], "repeats": 7, "matrix": {}}))
    read = read_table(like)
    assert (read.repeats, read.published.where) == (7, "")
    assert [a.overrides for a in configurations_of(read)][:2] == [["a=1", "a=2"], ["a=1", "a=2", "x=1"]]
    like.write_text(yaml.safe_dump({"like": "nothing"}))
    with pytest.raises(SystemExit, match=r"nothing\.yaml: no such table, although another table refers to it in like"):
        read_table(like)


def test_a_peer_does_not_accumulate_overrides() -> None:
    declared = {
        "plain": [],
        "+ x": ["x=1"],
        "HF": {"peer": "hf_trainer", "set": ["peer.a=1"]},
        "+ y": {"set": ["y=1"], "warm": True},
    }
    read = configurations(matrix={}, configurations=declared, losses=True)
    assert [(a.name, a.peer, a.warm, a.overrides[1:]) for a in read] == [
        ("plain", None, False, ["loggers.file={}"]),
        ("+ x", None, False, ["x=1", "loggers.file={}"]),
        ("HF", "hf_trainer", False, ["peer.a=1", "loggers.file={}"]),
        ("+ y", None, True, ["x=1", "y=1", "loggers.file={}"]),
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"more": 1}, "more: Extra inputs are not permitted"),
        (
            {"configurations": {"HF": {"peer": "hf"}}},
            "configurations.HF: no such peer; peers are bare_loop, flattened_",
        ),
        ({"configurations": {"HF": {"peer": "hf_trainer", "ranks": 2}}}, "leave out ranks, or take own_trainer"),
        ({"configurations": {"x": {"ranks": 0}}}, "configurations.x.ranks: Input should be greater than or equal to 1"),
        ({"configurations": {"x": [{"a": 1}]}}, "configurations.x.set.0: Input should be a valid string, not {'a': 1}"),
        ({"configurations": {"HF": {"pear": "hf"}}}, "configurations.HF.pear: Extra inputs are not permitted"),
        ({"published": {"configurations": {"+ z": "1"}}}, "published must be among plain, + x, + y"),
        ("repeats=0", "repeats: Input should be greater than or equal to 1, not '0'"),
        ("jobs=two", "jobs: Input should be a valid integer"),
        ("resume=maybe", "resume: Input should be a valid boolean"),
        ("configurations=[+ z]", "configurations must be among plain, + x, + y"),
        ("--repeat", "--repeat: must be key=value, like repeats=2"),
    ],
)
def test_wrong_keys_and_overrides_are_one_line(wrong: dict[str, Any] | str, message: str) -> None:
    changes, overrides = ({}, [wrong]) if isinstance(wrong, str) else (wrong, [])
    with pytest.raises(SystemExit, match=re.escape(message)) as raised:
        read_table(table(**changes), overrides)
    assert "\n" not in str(raised.value)


def test_warm_configurations_fill_their_caches_before_the_first_recorded_run(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = replace_runs(monkeypatch, lambda _: {**REPORT, "process_seconds": 5.0, "losses": [0.7, 0.6]})
    matrix = {"seed": [1, 2], "data.batch_size": [8, 16]}
    declared = {"cold": [], "warm": {"warm": True}}
    read = read_table(table(matrix=matrix, repeats=1, configurations=declared), ["warm_jobs=3"])
    rows = runner.run_table(read, "table", Path("results"))
    (warm_jobs, fills), (jobs, runs) = groups
    assert (warm_jobs, len(fills), jobs, len(runs)) == (3, 2, 1, 8), "seeds share a cache, and batch sizes do not"
    warm = [job for job, row in zip(runs, rows, strict=True) if row["warm"]]
    assert {cache_of(job) for job in warm} == {cache_of(job) for job in fills}
    assert len({cache_of(job) for job in runs}) == 4 + 2
    assert [len(row["process_seconds"]["runs"]) for row in rows] == [1] * 8
    assert rows[0]["losses"] == [0.7, 0.6]

    groups.clear()
    runner.run_table(read_table(table(matrix={}, share_compiled=True)), "table", Path("results"))
    assert [len(jobs) for _, jobs in groups] == [0, 6], "all are recorded"
    assert len({cache_of(job) for job in groups[1][1]}) == 1


def test_configurations_take_turns_and_rows_have_the_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def report(job: Job) -> dict[str, Any]:
        order.append(override_of(job))
        if order[-1] == "y=1":
            return error_report(Ended(1, "CUDA out of memory", 1.0))
        return {**REPORT, "throughput": {**REPORT["throughput"], "samples_per_sec": 100.0 + len(order)}}

    replace_runs(monkeypatch, report)
    rows = runner.run_table(read_table(table(matrix={})), "table", Path("results"))
    assert order == ["a=1", "x=1", "y=1"] * 2
    assert rows[0]["startup"] == REPORT["startup"]
    written = [json.loads(line) for line in Path("results/cpu/table.jsonl").read_text().splitlines()]
    assert written == rows
    assert len({row["call"] for row in written}) == 1
    assert written[0]["samples_per_sec"] == {"median": 102.5, "min": 101.0, "max": 104.0, "runs": [101.0, 104.0]}
    assert written[1]["accuracy"]["median"] == 0.9
    assert written[2]["samples_per_sec"] is None
    assert written[2]["errors"] == ["exit status 1: CUDA out of memory"] * 2
    assert "| + y | out of memory" in "\n".join(runner.markdown(rows))


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
        arguments = ["-f", str(ROOT / read.base), *configuration.overrides]
        config = read_arguments(arguments)[0] if configuration.peer else read_command_line(arguments)
        refuse_conflicts(build_techniques(config.algorithms, config.on_unavailable))


def test_the_command_leaves_rows_a_page_and_a_chart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_runs(monkeypatch)
    runner.main([str(table(matrix={})), "repeats=1"], Path("results"))
    said = capsys.readouterr()
    assert "| + x | 100 | 1.00 |" in said.out
    assert "written: results/cpu/table.md results/cpu/table.png" in said.out
    assert said.err == ""  # the bar is for terminals
    left = {path.name for path in Path("results/cpu").iterdir()}
    assert left == {"table.jsonl", "table.md", "table.png", ".table.lock"}


def test_rows_are_stored_by_the_gpu_of_the_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "command_output", lambda *_, **__: "NVIDIA H200\nNVIDIA H200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    on_cpu, either = Configuration("a", {}, ["trainer.device=cpu"]), Configuration("b", {}, [])
    kept = Path("results/nvidia-h200/t.jsonl")
    assert runner.rows_file([on_cpu, either], "t", Path("results")) == kept
    assert runner.rows_file([on_cpu, on_cpu], "t", Path("results")) == Path("results/cpu/t.jsonl")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert runner.rows_file([either], "t", Path("results")) == Path("results/cpu/t.jsonl")


def test_unknown_tables_are_refused() -> None:
    with pytest.raises(SystemExit) as ended:
        runner.main(["finetune", "--help"])
    assert ended.value.code == 0
    with pytest.raises(SystemExit, match=r"no such table; there are base_accuracy, compiled, .*ladder, leave_one_out"):
        runner.main(["nothing"])


def test_concurrent_runs_record_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_runs(monkeypatch)
    rows = runner.run_table(read_table(table(matrix={}), ["jobs=3"]), "table", Path("results"))
    assert [row["jobs"] for row in rows] == [3, 3, 3]
    assert [row["samples_per_sec"] for row in rows] == [None] * 3
    assert [row["accuracy"]["runs"] for row in rows] == [[0.9, 0.9]] * 3
    assert "| plain | not timed |  |  |  |  |  | 0.9000 |" in "\n".join(runner.markdown(rows))
    for row in rows:  # without an evaluation
        row |= {"accuracy": None, "train_loss": row["accuracy"]}
    assert "| plain | not timed |" in "\n".join(runner.markdown(rows))


BRIEF = ["data.train_samples=16", "data.eval_samples=8", "trainer.max_duration=1ba", "data.vocab_size=300"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_each_run_has_its_own_process_that_imported_before() -> None:
    asked = time.perf_counter()
    runs = {"ours": ["loggers.file={}"], "refused": ["data.bach_size=1"]}
    read = read_table(table(matrix={}, set=BRIEF, repeats=1, cumulative=False, configurations=runs), ["ahead=2"])
    rows = runner.run_table(read, "table", Path("results"))
    assert len(rows[0]["losses"]) == 1
    assert rows[0]["process_seconds"] is None
    assert 0 < rows[0]["run_seconds"]["median"] < time.perf_counter() - asked - 1  # the imports came before its turn
    assert rows[1]["error_kinds"] == ["refused"]
    assert "train.py: command line: unknown key 'data.bach_size'" in rows[1]["errors"][0]


@pytest.mark.long
def test_a_cold_run_is_timed_from_its_start_and_ranks_train_together() -> None:
    runs = {"peer": {"peer": "bare_loop"}, "ours": ["loggers.file={}"], "two": {"ranks": 2}}
    declared = table(matrix={}, set=BRIEF, repeats=1, cumulative=False, configurations=runs, fresh=True)
    peer, ours, two = runner.run_table(read_table(declared), "table", Path("results"))
    assert peer["algorithms"]["bare_loop"]["engaged"]
    assert peer["losses"] == pytest.approx(ours["losses"], abs=6e-5)
    # The kernel gives the start of a process in ticks since a boot that is itself known to about a second only.
    assert ours["process_seconds"]["median"] + 1 > ours["startup"]["to_first_step_seconds"] > 1
    assert two["errors"] == []
    assert two["environment"] == ours["environment"]
