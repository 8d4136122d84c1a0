"""The benchmark runner: configurations, overrides, rows with their spread, and runs that fail or are stopped."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import run as runner
from benchmarks import worker
from benchmarks.peers.job import read_arguments
from benchmarks.rows import error_report
from benchmarks.worker import Worker, Workers
from composer_speedups.core.registry import build_techniques
from composer_speedups.core.technique import refuse_conflicts, techniques_of
from composer_speedups.train.cli import read_command_line
from tests.conftest import ROOT
from tests.helpers.forks import Fork

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


def test_configurations_accumulate_over_the_matrix() -> None:
    configurations = runner.configurations_of(runner.read_table(table()))
    assert [(a.name, a.point["data.batch_size"]) for a in configurations][:4] == [
        ("plain", 40),
        ("+ x", 40),
        ("+ y", 40),
        ("plain", 128),
    ]
    assert configurations[2].overrides == ["a=1", "data.batch_size=40", "x=1", "y=1"]
    apart = runner.configurations_of(runner.read_table(table(cumulative=False)))
    assert apart[2].overrides == ["a=1", "data.batch_size=40", "y=1"]


def test_overrides_replace_repeats_and_axes_and_apply_to_every_configuration() -> None:
    read = runner.read_table(table(), ["repeats=5", "data.batch_size=64", "trainer.max_duration=3ba"])
    configurations = runner.configurations_of(read)
    assert read["repeats"] == 5
    assert {a.point["data.batch_size"] for a in configurations} == {64}
    assert all(a.overrides[-1] == "trainer.max_duration=3ba" for a in configurations)


def test_selected_configurations_keep_the_overrides_of_those_above() -> None:
    configurations = runner.configurations_of(runner.read_table(table(matrix={}), ["configurations=[plain, + y]"]))
    assert [(a.name, a.overrides) for a in configurations] == [("plain", ["a=1"]), ("+ y", ["a=1", "x=1", "y=1"])]
    with pytest.raises(SystemExit, match=re.escape("must be a list of plain, + x, + y")):
        runner.read_table(table(), ["configurations=[+ z]"])


def test_a_table_inherits_the_keys_of_another() -> None:
    other = table(set=["a=1"], published={"where": "there", "configurations": {"plain": "1"}})
    like = other.with_name("like.yaml")
    like.write_text(yaml.safe_dump({"like": other.stem, "set": ["a=2"], "repeats": 7, "matrix": {}}))
    read = runner.read_table(like)
    assert (read["repeats"], "published" in read) == (7, False)
    assert [a.overrides for a in runner.configurations_of(read)] == [
        ["a=1", "a=2"],
        ["a=1", "a=2", "x=1"],
        ["a=1", "a=2", "x=1", "y=1"],
    ]
    like.write_text(yaml.safe_dump({"like": "nothing"}))
    with pytest.raises(SystemExit, match=r"nothing\.yaml: no such table, although another table refers to it in like"):
        runner.read_table(like)


def test_a_peer_does_not_accumulate_overrides() -> None:
    configurations = {
        "plain": [],
        "+ x": ["x=1"],
        "HF": {"peer": "hf_trainer", "set": ["peer.a=1"]},
        "+ y": {"set": ["y=1"], "warm": True},
    }
    found = runner.configurations_of(runner.read_table(table(matrix={}, configurations=configurations, losses=True)))
    assert [(a.name, a.peer, a.warm, a.overrides[1:]) for a in found] == [
        ("plain", None, False, ["loggers.file={}"]),
        ("+ x", None, False, ["x=1", "loggers.file={}"]),
        ("HF", "hf_trainer", False, ["peer.a=1", "loggers.file={}"]),
        ("+ y", None, True, ["x=1", "y=1", "loggers.file={}"]),
    ]
    with pytest.raises(
        SystemExit,
        match="configuration 'HF' does not name a peer; peers are bare_loop, flattened_loop, hf_trainer, own_trainer, "
        "sentence_trainer, stock_composer",
    ):
        runner.read_table(table(configurations={"HF": {"peer": "hf"}}))
    with pytest.raises(
        SystemExit,
        match="configuration 'HF' is a peer that trains in one process; leave out ranks, or take own_trainer",
    ):
        runner.read_table(table(configurations={"HF": {"peer": "hf_trainer", "ranks": 2}}))
    with pytest.raises(SystemExit, match="configuration 'x' has ranks 0; it must be a whole number of at least 1"):
        runner.read_table(table(configurations={"x": {"ranks": 0}}))
    with pytest.raises(SystemExit, match="published must have where"):
        runner.read_table(table(published={"where": "there", "configurations": {"+ z": "1"}}))
    with pytest.raises(
        SystemExit, match=r"configuration 'HF' must be a list of overrides, .*or have peer, ranks, set, warm"
    ):
        runner.read_table(table(configurations={"HF": {"pear": "hf"}}))


def test_a_warm_configuration_fills_its_cache_in_an_unrecorded_run(monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[Path | None] = []

    def fake(base: str, configuration: runner.Configuration, workers: Workers, cache: Path | None) -> dict[str, Any]:
        caches.append(cache)
        if cache is not None:
            cache.mkdir(exist_ok=True)
        return {**REPORT, "process_seconds": 5.0, "losses": [0.7, 0.6]}

    monkeypatch.setattr(runner, "run_once", fake)
    configurations = {"cold": [], "warm": {"warm": True}}
    rows = runner.run_table(
        runner.read_table(table(matrix={}, configurations=configurations)), "table", Path("results")
    )
    assert [cache is not None for cache in caches] == [False, True, True, False, True]
    assert len({cache for cache in caches if cache}) == 1
    assert [len(row["process_seconds"]["runs"]) for row in rows] == [2, 2]
    assert [(row["peer"], row["warm"], row["losses"]) for row in rows] == [(None, w, [0.7, 0.6]) for w in (False, True)]


def test_configurations_take_turns_and_rows_have_the_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def fake(base: str, configuration: runner.Configuration, workers: Workers, cache: Path | None) -> dict[str, Any]:
        order.append(configuration.overrides[-1])
        if configuration.overrides[-1] == "y=1":
            return error_report(1, "CUDA out of memory")
        rate = 100.0 + len(order)
        return {**REPORT, "throughput": {**REPORT["throughput"], "samples_per_sec": rate}}

    monkeypatch.setattr(runner, "run_once", fake)
    rows = runner.run_table(runner.read_table(table(matrix={})), "table", Path("results"))
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


def test_a_stopped_table_keeps_its_finished_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(base: str, configuration: runner.Configuration, workers: Workers, cache: Path | None) -> dict[str, Any]:
        if configuration.overrides[-1] == "x=1":
            raise KeyboardInterrupt
        return REPORT

    monkeypatch.setattr(runner, "run_once", fake)
    with pytest.raises(KeyboardInterrupt):
        runner.run_table(runner.read_table(table(matrix={})), "table", Path("results"))
    rows = Path("results/cpu/table.jsonl").read_text().splitlines()
    assert [json.loads(row)["configuration"] for row in rows] == ["plain"]


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "tables").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_of_the_repositorys_tables_is_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys, and that its techniques go together; a GPU is assumed."""
    monkeypatch.setenv("IMDB_DIR", "imdb")
    read = runner.read_table(path)
    for configuration in runner.configurations_of(read):
        read_config = read_arguments if configuration.peer else read_command_line
        config, _ = read_config(["-f", str(ROOT / read["base"]), *configuration.overrides])
        refuse_conflicts(techniques_of(build_techniques(config.algorithms, config.on_unavailable)))


def test_the_command_leaves_rows_a_page_and_a_chart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "run_once", lambda *_: REPORT)
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
    on_cpu, either = runner.Configuration("a", {}, ["trainer.device=cpu"]), runner.Configuration("b", {}, [])
    kept = Path("results/nvidia-h200/t.jsonl")
    assert runner.rows_file([on_cpu, either], "t", Path("results")) == kept
    assert runner.rows_file([on_cpu, on_cpu], "t", Path("results")) == Path("results/cpu/t.jsonl")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert runner.rows_file([either], "t", Path("results")) == Path("results/cpu/t.jsonl")


def test_unknown_tables_and_keys_are_refused() -> None:
    with pytest.raises(SystemExit, match="needs base and configurations"):
        runner.read_table(table(more=1))
    with pytest.raises(SystemExit, match="--repeat: must be key=value, like repeats=2"):
        runner.main(["finetune", "--repeat"])
    with pytest.raises(SystemExit) as ended:
        runner.main(["finetune", "--help"])
    assert ended.value.code == 0
    with pytest.raises(SystemExit, match=r"no such table; there are batch_sizes, .*ladder, leave_one_out"):
        runner.main(["nothing"])


def test_concurrent_runs_record_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run_once", lambda *_: REPORT)
    rows = runner.run_table(runner.read_table(table(matrix={}), ["jobs=3"]), "table", Path("results"))
    assert [row["jobs"] for row in rows] == [3, 3, 3]
    assert [row["samples_per_sec"] for row in rows] == [None] * 3
    assert [row["accuracy"]["runs"] for row in rows] == [[0.9, 0.9]] * 3
    assert "| plain | not timed |  |  |  |  |  | 0.9000 |" in "\n".join(runner.markdown(rows))
    for row in rows:  # without an evaluation
        row |= {"accuracy": None, "train_loss": row["accuracy"]}
    assert "| plain | not timed |" in "\n".join(runner.markdown(rows))


@pytest.mark.slow
def test_each_run_has_its_own_process_that_imported_before() -> None:
    brief = ["data.train_samples=16", "data.eval_samples=8", "trainer.max_duration=1ba", "data.vocab_size=300"]
    workers = Workers()
    configuration = runner.Configuration("ours", {}, [*brief, f"data.cache_dir={Path.cwd()}/cache", "loggers.file={}"])
    asked = time.perf_counter()
    report = runner.run_once("yamls/quickstart.yaml", configuration, workers)
    assert len(report["losses"]) == 1
    assert "process_seconds" not in report
    assert 0 < report["run_seconds"] < time.perf_counter() - asked - 1  # the imports came before its turn
    assert "wall_seconds" not in report
    assert report["training"]["batches"] == 1
    workers.close()
    ended = Worker()
    ended._process.kill()
    with pytest.raises(RuntimeError, match="a worker exited with status -9 while it imported"):
        ended.wait_until_ready()
    ended.close()


def test_a_waiting_worker_ends_as_train_py_does() -> None:
    log = Path("run.log")
    log.touch()
    arguments = ["-f", str(ROOT / "yamls" / "quickstart.yaml"), "data.bach_size=1"]

    def job() -> None:
        sys.stdin = io.StringIO(json.dumps([worker.TRAIN, arguments, {}, str(log)]))
        worker._main()

    done = Fork(job).wait()
    assert (done.status, done.stderr) == (2, "ready\n")
    assert "unknown key 'data.bach_size'" in log.read_text()
    assert log.read_text().startswith("train.py: ")


def test_a_limited_number_of_workers_waits_and_each_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    class Fake:
        def __init__(self) -> None:
            self.did: list[str] = []
            started.append(self)

        def wait_until_ready(self) -> None:
            self.did.append("ready")

        def run(self, *_: Any) -> tuple[int, str]:
            assert self.did == ["ready"]
            assert all(other.did for other in started), "none runs while another imports"
            self.did.append("run")
            return 0, ""

        def close(self) -> None:
            self.did.append("close")

    monkeypatch.setattr(worker, "Worker", Fake)
    workers = Workers(ahead=2)
    for _ in range(3):
        status, _, seconds = workers.run(worker.TRAIN, [], {})
        assert (status, [*seconds]) == (0, ["run_seconds"])
    assert len(started) == 4
    workers.close()
    assert sorted("run" in each.did for each in started) == [False, True, True, True]
    assert all(each.did[-1] == "close" for each in started)


@pytest.mark.long
def test_a_cold_run_finds_bytecode_and_is_timed_from_its_start() -> None:
    brief = ["data.train_samples=16", "data.eval_samples=8", "trainer.max_duration=1ba", "data.vocab_size=300"]
    configuration = runner.Configuration("ours", {}, [*brief, f"data.cache_dir={Path.cwd()}/cache", "loggers.file={}"])
    cold = Workers(fresh=True, bytecode=Path("bytecode").absolute())
    peer = runner.run_once("yamls/quickstart.yaml", configuration._replace(peer="bare_loop"), cold)
    assert peer["algorithms"]["bare_loop"]["engaged"]
    report = runner.run_once("yamls/quickstart.yaml", configuration, cold)
    assert peer["losses"] == pytest.approx(report["losses"], abs=6e-5)
    assert [*Path("bytecode").rglob("trainer.cpython-*.pyc")]
    # The kernel gives the start of a process in ticks since a boot that is itself known to about a second only.
    assert report["process_seconds"] + 1 > report["startup"]["to_first_step_seconds"] > 1
    cold.close()
