"""Charts from rows: which rows are drawn, what is drawn of them, and PNGs of a readable size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from PIL import Image

from benchmarks import charts

ENVIRONMENT = {"gpu": "NVIDIA H200", "torch": "2.11.0"}


def row(configuration: str, rate: float, call: str = "2026-01-02", batch: int = 128, **more: Any) -> dict[str, Any]:
    measured = {"median": rate, "min": rate, "max": rate} if rate else None
    point = {"data.batch_size": batch}
    failure = {"errors": [], "error_kinds": [], "repeats": 1}
    timed = {"samples_per_sec": measured, "environment": ENVIRONMENT}
    return {"call": call, "configuration": configuration, **point, **failure, **timed, **more}


class Drawn:
    """The spans and colours of the bars and the labels of a figure."""

    def __init__(self) -> None:
        self.bars, self.colours, self.labels = list[tuple[float, float]](), list[str](), list[str]()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    record = Drawn()
    barh, annotate = Axes.barh, Axes.annotate

    def record_bar(self: Axes, y: float, width: float, *, left: float = 0, **kwargs: Any) -> Any:
        record.bars.append((left, left + width))
        record.colours.append(kwargs["color"])
        return barh(self, y, width, left=left, **kwargs)

    def record_label(self: Axes, text: str, *args: Any, **kwargs: Any) -> Any:
        record.labels.append(text)
        return annotate(self, text, *args, **kwargs)

    monkeypatch.setattr(Axes, "barh", record_bar)
    monkeypatch.setattr(Axes, "annotate", record_label)
    return record


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

    def drawn(kind: str, *configurations: str) -> list[tuple[str, float]]:
        picked = charts.call_shown(kind, rows, configurations)
        return [(row["configuration"], (row["samples_per_sec"] or {"median": 0})["median"]) for row in picked]

    assert drawn("waterfall", "fp32", "+ y") == [("fp32", 2), ("+ y", 4)]
    assert drawn("waterfall") == [("fp32", 9)]
    assert drawn("bars", "+ x", "fp32") == [("+ x", 3), ("fp32", 2), ("fp32", 20)], "every point"
    assert drawn("bars", "fp32") == [("fp32", 2), ("fp32", 20)], "the call in which it was fastest"
    with pytest.raises(SystemExit, match="no call has rows of z with samples_per_sec"):
        drawn("waterfall", "z")


def test_each_bar_of_the_waterfall_spans_its_techniques_gain(drawn: Drawn) -> None:
    charts.draw("waterfall", [row("fp32", 300), row("+ x", 1200), row("+ y", 1140)], Path("waterfall.png"))
    assert drawn.bars == [(0, 300), (300, 1200), (1200, 1140)]
    assert drawn.labels == ["300", "1,200  ×4.00", "1,140  ×0.95"]
    with Image.open("waterfall.png") as image:
        assert image.convert("RGBA").getpixel((0, 0))[3] == 0, "no background: pages are light or dark"  # type: ignore[index]
        assert image.width == 1200
        assert image.height > 300


def test_bars_show_value_and_ratio_or_why_a_run_failed(drawn: Drawn) -> None:
    failed = row("y", 0, errors=["CUDA out of memory"], error_kinds=["out of memory"])
    peers = [row("loop", 100, peer="flattened_loop"), row("own Trainer", 90, peer="own_trainer")]
    charts.draw("bars", [row("fp32", 100), row("x", 250), failed, *peers], Path("bars.png"))
    assert drawn.bars == [(0, 100), (0, 250), (0, 100), (0, 90)]
    assert drawn.labels == ["100", "250  ×2.50", "out of memory", "100  ×1.00", "90  ×0.90"]
    assert drawn.colours == [charts._GREY, charts._BLUE, charts._GREY, charts._BLUE], "of other programs are grey"


def test_bars_show_the_time_to_the_accuracy_of_the_first_configuration(drawn: Drawn) -> None:
    def ran(name: str, seed: int, *evaluations: tuple[float, float]) -> dict[str, Any]:
        return row(name, 1, seed=seed, evaluations=[[{"seconds": s, "accuracy": a} for s, a in evaluations]])

    rows = [
        ran("full", 1, (10, 0.7), (20, 0.91), (30, 0.90)),
        ran("full", 2, (10, 0.6), (32, 0.92)),
        ran("ours", 1, (5, 0.899), (12, 0.90)),
        ran("ours", 2, (14, 0.93)),
        ran("weak", 1, (1, 0.8)),
        ran("weak", 2, (1, 0.95)),
    ]
    shown = charts.call_shown("time_to_accuracy", rows, ["full", "weak", "ours"])
    charts.draw("time_to_accuracy", shown, Path("accuracy.png"))
    assert drawn.labels == ["26.0", "1 of 2 runs reached it", "9.5  ×2.74"]
    assert drawn.bars == [(0, 26), (0, 9.5)]
    figure = charts.accuracy_bars(charts.call_shown("time_to_accuracy", rows, ["full", "ours", "weak"]))
    assert figure.axes[0].get_ylim() == (2.5, -0.5), "a last configuration without a bar has room, too"


def test_curves_are_smoothed_over_the_recorded_batches() -> None:
    assert charts.smooth([4.0, 2.0, 0.0, 1.0], 2).tolist() == [4.0, 3.0, 1.0, 0.5]
    assert charts.smooth([4.0, 2.0], 10).tolist() == [4.0, 3.0]
    charts.draw("losses", [row(name, 0, losses=[0.7, 0.6]) for name in "abcde"], Path("losses.png"))
    assert Path("losses.png").is_file()


def test_a_chart_knows_which_rows_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row("fp32", 300), row("+ x", 600), row("+ y", 500)]
    chart = charts.Chart.of(["waterfall", "table", "table.png", "fp32", "|", "+", "x"])
    assert chart.configurations == ["fp32", "+ x"]
    monkeypatch.setattr(charts.Chart, "rows", lambda _: rows)
    assert chart.is_stale(), "it is not there"
    chart.draw()
    assert not chart.is_stale()
    rows[1] = row("+ x", 601)
    assert chart.is_stale()
    chart.draw()
    rows.pop()
    assert chart.is_stale(), "a configuration is gone"
