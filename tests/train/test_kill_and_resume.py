"""Runs that are killed, stopped or out of disk space resume with the same command and lose nothing."""

from __future__ import annotations

import itertools
import json
import pkgutil
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from composer_speedups.train.checkpoints import checkpoints_in
from tests.conftest import ROOT
from tests.helpers.jobs import SHORT
from tests.helpers.settings import ENTRIES
from tests.train.kill_harness import CALLS, POINTS, Point, run_cases

_JOB = [
    *("-f", str(ROOT / "yamls" / "quickstart.yaml")),
    *SHORT,
    *("trainer.max_duration=3ep", "checkpoint.interval=5ba", "model.dropout=0.1", "optimizer.lr=0.01"),
    "loggers.file={}",
]


def job(name: str, *overrides: str) -> list[str]:
    return [*_JOB, *overrides, f"run_name={name}"]


def at(point: str, count: float = 1, by: int = signal.SIGKILL) -> Point:
    return {"at": point, "count": count, "signal": int(by)}


def losses(folder: Path) -> dict[int, set[str]]:
    """Return the losses of each batch in the logs of all processes of a run."""
    logged: dict[int, set[str]] = {}
    for log in folder.glob("log-rank0*.txt"):
        for batch, value in re.findall(r"\[batch=(\d+)\]: loss/train/total: (\S+)", log.read_text()):
            logged.setdefault(int(batch), set()).add(value)
    return logged


def check_same(folder: Path, whole: str, name: str) -> dict[str, Any]:
    """Check that the resumed run has the uninterrupted one's metrics, weights and losses, and timed each batch once."""
    one, other = folder / "runs" / whole, folder / "runs" / name
    expected, got = (json.loads((run / "report.json").read_text()) for run in (one, other))
    assert got["metrics"] == expected["metrics"], name
    assert got["training"] == expected["training"]
    weights, others = (load_file(next((run / "model").glob("*.safetensors"))) for run in (one, other))
    torch.testing.assert_close(others, weights, rtol=0, atol=0)
    assert losses(other) == losses(one)  # batches that were trained again had the same losses
    assert len(losses(one)) == got["training"]["batches"]
    throughput = got["throughput"]
    assert throughput["steady_batches"] + throughput["other_batches"] == got["training"]["batches"]
    assert throughput["padding_fraction"] == pytest.approx(expected["throughput"]["padding_fraction"], abs=0.05)
    assert throughput["eval_seconds"] > 0
    assert all(entry["engaged"] and entry["evidence"] for entry in got["algorithms"].values())
    assert [path for path in other.rglob(".*") if path.name.startswith((".unfinished", ".ep"))] == []
    assert len(checkpoints_in(other / "checkpoints")) == 1
    assert (other / "checkpoints" / "latest-rank0.pt").exists()
    return got


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    assert run_cases(folder, [{"name": "whole", "arguments": job("whole")}]) == {"whole": [0]}
    return folder


FULL_DISK: Point = {"at": "disk", "largest_file": 4_000_000}  # bytes, less than a checkpoint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "points", "statuses", "resumed"),
    [
        ("killed", [at("step", 8), at("write", 2)], [-9, -9, 0], [5, 10]),
        ("stopped", [at("step", 8, signal.SIGTERM), FULL_DISK], [143, 1, 0], [8]),
        pytest.param("late", [at("rotate", 2), at("report")], [-9, -9, 0], [5, 18], marks=pytest.mark.exhaustive),
        # its workers live for seconds after it
        pytest.param("workers", [at("step", 8)], [-9, 0], [5], marks=pytest.mark.exhaustive),
    ],
)
def test_a_stopped_run_ends_like_an_uninterrupted_one(
    name: str, points: list[Point], statuses: list[int], resumed: list[int], whole: Path
) -> None:
    arguments = job(name, *(["data.workers=2"] if name == "workers" else []))
    output = whole / f"{name}.out"
    seen = run_cases(whole, [{"name": name, "arguments": arguments, "points": points}])
    assert seen == {name: statuses}, output.read_text()[-3000:]
    report = check_same(whole, "whole", name)
    assert [entry["batch"] for entry in report["resumed"]] == resumed
    if name == "stopped":
        line = next(ln for ln in output.read_text().splitlines() if "could not be written" in ln)
        assert line.startswith(
            "train.py: checkpoint: runs/stopped/checkpoints/ep1-ba10-rank0.pt could not be written (File"
        )
        assert "ep1-ba8-rank0.pt" in line


def _techniques() -> list[tuple[str, str]]:
    """Return name and ``algorithms`` override of every variant of each technique that trains on the CPU."""
    settings: list[tuple[str, str]] = []
    for name, entry in sorted(ENTRIES.items()):
        for variant in [*entry.variants, *(v for other in entry.also for v in other.variants)]:
            chosen = {**entry.needs, name: variant}
            settings.append((f"{name}-{len(settings)}", f"algorithms={json.dumps(chosen)}"))
    return settings


def test_the_functions_at_whose_calls_runs_are_killed_exist() -> None:
    for owner, name, _ in CALLS.values():
        assert callable(getattr(pkgutil.resolve_name(owner), name)), (owner, name)


@pytest.mark.long
@pytest.mark.slow  # so that -m "not slow" excludes it too
def test_every_technique_is_killed_and_resumed(tmp_path: Path) -> None:
    """Each is killed twice: at one of POINTS, then at a random moment."""
    cases: list[dict[str, Any]] = []
    places = itertools.cycle(POINTS)
    counts = {"data": 9, "step": 8, "batch_end": 11, "eval": 2, "write": 2, "rename": 2, "symlink": 2, "rotate": 3}
    for i, (name, chosen) in enumerate(_techniques()):
        settings = ("algorithms=null", chosen)
        point = next(places)
        cases.append({"name": f"{name}-whole", "arguments": job(f"{name}-whole", *settings)})
        cases.append(
            {
                "name": name,
                "like": f"{name}-whole",
                "arguments": job(name, *settings),
                "points": [at(point, counts.get(point, 1)), at("random", i)],
            }
        )
    results = run_cases(tmp_path, cases)
    kills = 0
    for name, _ in _techniques():
        output = (tmp_path / f"{name}.out").read_text()[-3000:]
        assert results[f"{name}-whole"] == [0], (tmp_path / f"{name}-whole.out").read_text()[-3000:]
        assert results[name][-1] == 0, output
        assert results[name][0] == -signal.SIGKILL, output
        kills += results[name].count(-signal.SIGKILL)
        report = check_same(tmp_path, f"{name}-whole", name)
        print(name, results[name], "resumed after", [entry["batch"] for entry in report["resumed"]])
    print(f"{kills} kills over {len(results) // 2} settings of techniques")
    assert kills >= 20
