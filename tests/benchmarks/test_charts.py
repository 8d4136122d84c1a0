"""Charts from rows: which rows are drawn, what is drawn of them, and PNGs of a readable size."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes

from benchmarks import charts

ENVIRONMENT = {"gpu": "NVIDIA H200", "torch": "2.11.0"}


def row(configuration: str, rate: float, call: str = "2026-01-02", batch: int = 128, **more: Any) -> dict[str, Any]:
    rates = {"median": rate} if rate else None
    return {
        "call": call,
        "configuration": configuration,
        "data.batch_size": batch,
        "samples_per_sec": rates,
        "environment": ENVIRONMENT,
        **more,
    }


def size_of(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", head[16:])
    return width, height


def test_the_last_call_with_all_configurations_is_drawn_at_one_point() -> None:
    rows = [
        row("fp32", 1, call="2026-01-01"),
        row("fp32", 2),
        row("+ x", 3),
        row("fp32", 20, batch=256),
        row("+ y", 4),
        row("fp32", 9, call="2026-01-03"),
        row("+ x", 0, call="2026-01-03"),  # failed
    ]
    found = charts.last_call(rows, "samples_per_sec", ["fp32", "+ y"])
    assert [(r["configuration"], r["samples_per_sec"]["median"]) for r in found] == [("fp32", 2), ("+ y", 4)]
    assert [r["samples_per_sec"]["median"] for r in charts.last_call(rows, "samples_per_sec")] == [9]
    with pytest.raises(SystemExit, match="no call has rows of z with samples_per_sec"):
        charts.last_call(rows, "samples_per_sec", ["z"])


def test_each_bar_of_the_waterfall_spans_its_techniques_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[tuple[float, float]] = []
    said: list[str] = []
    barh, annotate = Axes.barh, Axes.annotate

    def read(self: Axes, text: str, *args: Any, **kwargs: Any) -> Any:
        said.append(text)
        return annotate(self, text, *args, **kwargs)

    def seen(self: Axes, y: float, width: float, *, left: float, **kwargs: Any) -> Any:
        bars.append((left, left + width))
        return barh(self, y, width, left=left, **kwargs)

    monkeypatch.setattr(Axes, "barh", seen)
    monkeypatch.setattr(Axes, "annotate", read)
    charts.waterfall([row("fp32", 300), row("+ x", 1200), row("+ y", 1140)], Path("waterfall.png"))
    assert bars == [(0, 300), (300, 1200), (1200, 1140)]
    assert said == ["300", "1,200  ×4.00", "1,140  ×0.95"]
    width, height = size_of(Path("waterfall.png"))
    assert width == 1200
    assert height > 300


def test_curves_are_smoothed_over_the_recorded_batches() -> None:
    assert charts.smooth([4.0, 2.0, 0.0, 1.0], 2).tolist() == [4.0, 3.0, 1.0, 0.5]
    assert charts.smooth([4.0, 2.0], 10).tolist() == [4.0, 3.0]


def test_loss_curves_from_the_command_line() -> None:
    rows = [row("padded", 0, losses=[0.7, 0.6, 0.5]), row("unpadded", 0, losses=[0.7, 0.61, 0.5]), row("other", 0)]
    Path("curves.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    charts.main(["losses", "curves", "losses.png", "padded", "|", "unpadded"], Path())
    assert size_of(Path("losses.png"))[0] == 1200
    with pytest.raises(SystemExit, match=r"no such rows; measure them with python -m benchmarks.run none"):
        charts.main(["losses", "none", "losses.png"], Path())
    with pytest.raises(SystemExit, match="no call has rows of padded, other with losses"):
        charts.main(["losses", "curves", "losses.png", "padded | other"], Path())
    with pytest.raises(ValueError, match="5 curves in one chart; name 4 configurations at most"):
        charts.loss_curves([rows[0]] * 5, Path("five.png"))


def test_a_chart_knows_which_rows_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row("fp32", 300), row("+ x", 600), row("+ y", 500)]
    chart = charts.Chart.of(["waterfall", "table", "table.png"])
    monkeypatch.setattr(charts.Chart, "rows", lambda *_: rows)
    assert chart.is_stale(), "it is not there"
    chart.draw()
    assert not chart.is_stale()
    rows[1] = row("+ x", 601)
    assert chart.is_stale()
    chart.draw()
    rows.pop()
    assert chart.is_stale(), "a configuration is gone"
