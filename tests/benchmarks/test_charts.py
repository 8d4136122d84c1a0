"""Charts from rows: which rows are drawn, what is drawn of them, and PNGs of a readable size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from PIL import Image

from benchmarks import charts, tables

ENVIRONMENT = {"gpu": "NVIDIA H200", "torch": "2.11.0", "commit": "0123456"}


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


def test_the_last_call_with_all_configurations_is_drawn() -> None:
    rows = [
        row("fp32", 1, call="2026-01-01"),
        row("fp32", 2),
        row("+ x", 3),
        row("+ y", 4),
        row("fp32", 9, call="2026-01-03"),
        row("+ x", 0, call="2026-01-03"),  # failed
    ]

    def drawn(*configurations: str) -> list[tuple[str, float]]:
        picked = charts.call_shown("samples_per_sec", rows, configurations)
        return [(row["configuration"], row["samples_per_sec"]["median"]) for row in picked]

    assert drawn("fp32", "+ y") == [("fp32", 2), ("+ y", 4)]
    assert drawn() == [("fp32", 9)]
    with pytest.raises(SystemExit, match="no call has rows of z with samples_per_sec"):
        drawn("z")


def draw(kind: str, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (charts, tables):
        monkeypatch.setattr(module, "committed", lambda name: rows)
    charts.Chart.of(f"{kind} {kind}.png | table").draw()


def test_each_bar_of_the_waterfall_spans_its_techniques_gain(drawn: Drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    draw("waterfall", [row("fp32", 300), row("fp32", 9, batch=256), row("+ x", 1200), row("+ y", 1140)], monkeypatch)
    assert drawn.bars == [(0, 300), (300, 1200), (1200, 1140)]
    assert drawn.labels == ["300", "1,200  ×4.00", "1,140  ×0.95"]
    with Image.open("waterfall.png") as image:
        assert image.convert("RGBA").getpixel((0, 0))[3] == 0, "no background: pages are light or dark"  # type: ignore[index]
        assert image.width == 1200
        assert image.height > 300


def test_the_fastest_configuration_of_each_peer_is_drawn_beside_the_fast_set(
    drawn: Drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = [row("HF Trainer", 80, peer="hf_trainer"), row("HF Trainer, graphs", 90, peer="hf_trainer")]
    loop = row("flattened loop", 100, peer="flattened_loop")
    ours = [row("fast set", 250), row("own Trainer", 240, peer="own_trainer"), row("fast set, LoRA", 300)]
    draw("beside", [*ours, *hf, loop], monkeypatch)
    assert drawn.bars == [(0, 90), (0, 100), (0, 250)]
    assert drawn.labels == ["90  ×0.90", "100  ×1.00", "250  ×2.50"]
    assert drawn.colours == [charts._GREY, charts._GREY, charts._BLUE], "of other programs are grey"


def test_bars_show_the_time_of_a_training_how_much_of_it_is_start_up_and_its_accuracy(
    drawn: Drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ran(name: str, seed: int, *evaluations: tuple[float, float], peer: str | None = None) -> dict[str, Any]:
        runs = [[{"seconds": s, "accuracy": a} for s, a in evaluations]]
        return row(name, 1, seed=seed, evaluations=runs, peer=peer)

    rows = [
        ran("full", 1, (10, 0.7), (20, 0.91), (28, 0.90), peer="hf_trainer"),
        ran("full", 2, (10, 0.6), (32, 0.92), (38, 0.92), peer="hf_trainer"),
        ran("ours", 1, (5, 0.899), (7, 0.90)),
        ran("ours", 2, (5, 0.7), (7, 0.93)),
    ]
    draw("time_to_accuracy", rows, monkeypatch)
    assert drawn.labels == ["33.0 s  ×1.00  accuracy 0.9100", "7.0 s  ×4.71  accuracy 0.9150"]
    assert drawn.bars[2:] == [(0, 3), (3, 7)]


def test_curves_are_smoothed_over_the_recorded_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert charts.smooth([4.0, 2.0, 0.0, 1.0], 2).tolist() == [4.0, 3.0, 1.0, 0.5]
    assert charts.smooth([4.0, 2.0], 10).tolist() == [4.0, 3.0]
    draw("losses", [row(name, 0, losses=[0.7, 0.6]) for name in "abcde"], monkeypatch)
    assert Path("losses.png").is_file()


def test_a_chart_knows_which_rows_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row("fp32", 300), row("+ x", 600), row("+ y", 500)]
    chart = charts.Chart.of("waterfall table.png | table | fp32 | + x")
    assert chart.arguments == ["table", "fp32", "+ x"]
    monkeypatch.setattr(charts, "committed", lambda name: rows)
    assert chart.is_stale(), "it is not there"
    chart.draw()
    assert not chart.is_stale()
    rows[1] = row("+ x", 601)
    assert chart.is_stale()
    chart.draw()
    rows.append(row("+ z", 700))
    assert not chart.is_stale(), "it is not shown"
