"""The soak harness: what grew is told from what wavers; a short run of it, and the long one behind its marker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak import MIB, Reading, grown, soak
from tests.helpers.jobs import SHORT


def readings(**changes: Any) -> list[Reading]:
    """100 readings, 10 steps apart; ``changes`` give a field at reading i."""
    steady = {"host_bytes": 900 * MIB, "gpu_bytes": 0, "open_files": 20, "threads": 7, "children": 2}
    series = []
    for i in range(100):
        values: dict[str, Any] = {**steady, **{name: change(i) for name, change in changes.items()}}
        series.append(Reading(batch=10 * i, **values))
    return series


def test_growth_is_distinguished_from_noise() -> None:
    assert grown(readings()) == {}
    wavering = readings(
        host_bytes=lambda i: (900 + 100 * (i % 7 == 0)) * MIB,
        open_files=lambda i: 20 + 10 * (i % 9 == 0),
        children=lambda i: 4 if i < 15 else 2,
    )
    assert grown(wavering) == {}
    leaking = readings(host_bytes=lambda i: (900 + i) * MIB, open_files=lambda i: 20 + i // 40, children=lambda i: i)
    assert set(grown(leaking)) == {"host_bytes", "open_files", "children"}
    assert set(grown(readings(gpu_bytes=lambda i: i * MIB))) == {"gpu_bytes"}


@pytest.mark.exhaustive
def test_a_short_run_is_measured() -> None:
    results = soak(["steps=6", *SHORT, "data.workers=0", "export=false"])
    assert len(results["readings"]) == 5
    assert json.loads(Path("runs/soak/soak.json").read_text())["steps"] == 6
    assert all(reading["host_bytes"] > 100 * MIB for reading in results["readings"])
    assert list(Path("runs/soak/checkpoints").glob("*.pt"))


@pytest.mark.long
def test_nothing_grows_over_5000_steps() -> None:
    assert soak(["steps=5000"])["grown"] == {}
