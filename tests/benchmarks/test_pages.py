"""What a finished call leaves beside its rows: the page, the chart that suits the table, and failures told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes

from benchmarks import charts
from benchmarks.rows import add_run, describe_error, describe_errors, empty_row, error_report
from benchmarks.run import Configuration, leave_page
from benchmarks.tables import markdown, page
from composer_speedups.train import environment as environments
from tests.benchmarks.test_charts import size_of

ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "gpu_power_limit_watts": 700.0,
    "gpu_sm_clock_mhz": 1755.0,
    "driver": "580",
    "torch": "2.11.0",
    "composer": "0.32.1",
    "transformers": "5.17.0",
    "commit": "0123456789",
}


def report(rate: float, accuracy: float | None = None, **more: Any) -> dict[str, Any]:
    throughput = {"samples_per_sec": rate, "tokens_per_sec": 200 * rate, "mfu": rate / 1e3, "warmup_seconds": 2.0}
    metrics = {} if accuracy is None else {"accuracy": accuracy}
    memory = {"peak_gib": 3.0}
    return {"throughput": throughput, "metrics": metrics, "memory": memory, "environment": ENVIRONMENT, **more}


def row(configuration: str, *reports: dict[str, Any], published: str | None = None, **point: Any) -> dict[str, Any]:
    found = empty_row("t", "2026-01-02T03:04:05.678Z", Configuration(configuration, point, []), published=published)
    for each in reports:
        add_run(found, each)
    return found


OOM = error_report(1, "Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n" + "x" * 5000)
REFUSED = error_report(2, "warning\ntrain.py: apex_optimizer: NVIDIA Apex is not installed; build it | or not\n")


def test_failures_are_classified_by_status_and_output() -> None:
    assert [f["error_kind"] for f in (OOM, REFUSED, error_report(1, "ZeroDivisionError"))] == [
        "out of memory",
        "refused",
        "failed",
    ]
    assert error_report(1, "RuntimeError: CUDA error: out of memory")["error_kind"] == "out of memory"
    assert error_report(-9, "")["error_kind"] == "out of memory", "the kernel killed it"
    assert len(OOM["error"]) < 2100
    assert describe_error(**REFUSED).startswith("refused: apex_optimizer: NVIDIA Apex is not installed")
    assert describe_error("one\ntwo\n", "failed") == "failed: two"
    assert describe_errors(row("x", OOM, OOM)) == "out of memory"
    assert describe_errors(row("x", report(1), OOM)) == "1 of 2 runs out of memory"
    refused = describe_errors(row("x", REFUSED))
    assert refused.startswith("refused: apex_optimizer: NVIDIA Apex is not installed; build it / or")
    assert len(describe_errors(row("x", error_report(1, "word " * 90)))) < 130
    assert describe_errors(row("x", report(1))) == ""
    before_kinds = {k: v for k, v in row("x", OOM).items() if k != "error_kinds"}
    assert describe_errors(before_kinds).startswith("failed: ")


def test_the_table_compares_with_the_first_configuration_and_names_failures() -> None:
    rows = [
        row("fp32", report(100), report(110), **{"data.batch_size": 8}, published="9 samples/s"),
        row("x", report(210, 0.5), **{"data.batch_size": 8}),
        row("fp32", OOM, **{"data.batch_size": 16}),
        row("x", report(300), **{"data.batch_size": 16}),
    ]
    lines = markdown(rows)
    assert lines[0].endswith("| peak GiB | warm-up s | accuracy | published |")
    assert lines[2:] == [
        "| fp32 | data.batch_size=8 | 105 (100–110) | 1.00 | 21,000 | 10.5% | 3.0 | 2.0 |  | 9 samples/s |",
        "| x | data.batch_size=8 | 210 | 2.00 | 42,000 | 21.0% | 3.0 | 2.0 | 0.5000 |  |",
        "| fp32 | data.batch_size=16 | out of memory |  |  |  |  |  |  |  |",
        "| x | data.batch_size=16 | 300 | – | 60,000 | 30.0% | 3.0 | 2.0 |  |  |",
    ]
    assert "process s" in markdown([row("x", report(1, process_seconds=9.0))])[0]


def test_mfu_with_float8_products_names_its_peak() -> None:
    more = {"numerics": {"matmul": "bf16"}}
    settings = {"bf16": {"unpadding": {}}, "float8": {"float8_linear": {"settings": "Float8Linear()"}}}
    settings["fp8"] = {"fused_layers": {"settings": "FusedLayers(precision='fp8')"}}
    settings["fused"] = {"fused_layers": {"settings": "FusedLayers(precision='bf16')"}}
    lines = markdown([row(name, report(100, algorithms=each, **more)) for name, each in settings.items()])
    place = lines[0].split(" | ").index("MFU")
    shown = {line.split(" | ")[0]: line.split(" | ")[place] for line in lines[2:]}
    of_bf16 = "10.0% of bf16's peak"
    assert shown == {"| bf16": "10.0%", "| float8": of_bf16, "| fp8": of_bf16, "| fused": "10.0%"}


def test_a_page_says_where_it_ran() -> None:
    text = page([row("x", report(1)), row("y", OOM)], "t", ["configurations=[x, y]"], "a V100", "t.png")
    assert (
        "NVIDIA H200, limit 700 W, SM clock 1755 MHz, driver 580, torch 2.11.0, Composer 0.32.1, "
        "transformers 5.17.0; 2026-01-02; commit 0123456." in text
    )
    assert "Published: a V100." in text
    assert "`python -m benchmarks.run t 'configurations=[x, y]'`, call of 2026-01-02T03:04:05.678Z." in text
    assert "![t](t.png)" in text
    assert "none says where it ran" in page([row("y", OOM)], "t", [])


def test_each_table_has_its_kind_of_chart() -> None:
    seeds = [row("x", report(1, 0.5), seed=1), row("x", report(1, 0.6), seed=2)]
    plain = [row("fp32", report(100), report(120)), row("x", OOM)]
    curves = [row(configuration, report(100, losses=[0.7, 0.6])) for configuration in ("a", "b")]
    for table, rows, kind in (
        ({"matrix": {"seed": [1, 2]}}, seeds, "seeds"),
        ({}, plain, "bars"),
        ({"cumulative": True}, plain, "waterfall"),
        ({"fresh": True}, [row("x", report(1, process_seconds=9.0))], "seconds"),
        ({"losses": True}, curves, "losses"),
        ({"losses": True}, [row(str(n), report(1, losses=[1.0])) for n in range(5)], "bars"),
    ):
        assert charts.kind_of(table, rows) == kind
        assert leave_page(table, rows, Path(f"{kind}.jsonl")) == [Path(f"{kind}.md"), Path(f"{kind}.png")]
        assert size_of(Path(f"{kind}.png"))[0] == 1200
    left = leave_page({}, [row("x", OOM)], Path("none.jsonl"))
    assert left == [Path("none.md")]
    assert "![" not in left[0].read_text()


def test_bars_show_value_and_ratio_or_why_a_run_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    widths: list[float] = []
    annotate, barh = Axes.annotate, Axes.barh

    def read(self: Axes, text: str, *args: Any, **kwargs: Any) -> Any:
        said.append(text)
        return annotate(self, text, *args, **kwargs)

    def seen(self: Axes, y: float, width: float, **kwargs: Any) -> Any:
        widths.append(width)
        return barh(self, y, width, **kwargs)

    monkeypatch.setattr(Axes, "annotate", read)
    monkeypatch.setattr(Axes, "barh", seen)
    rows = [row("fp32", report(100)), row("x", report(250)), row("y", OOM), row("z", REFUSED)]
    charts.draw_table({}, rows, Path("bars.png"))
    assert widths == [100, 250]
    assert said == ["100", "250  ×2.50", "out of memory", "refused"]
    said.clear()
    timed = [
        row(configuration, report(1, process_seconds=seconds))
        for configuration, seconds in (("peer", 60.0), ("ours", 20.0))
    ]
    charts.draw_table({"fresh": True}, timed, Path("seconds.png"))
    assert said == ["60.0", "20.0  ×3.00"]


def test_dots_are_drawn_for_each_seed_and_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    dots: list[tuple[float, str | None]] = []
    means: list[float] = []
    scatter, plot = Axes.scatter, Axes.plot

    def seen(self: Axes, x: list[float], y: list[float], **kwargs: Any) -> Any:
        dots.extend((value, kwargs["label"]) for value in x)
        return scatter(self, x, y, **kwargs)

    def line(self: Axes, x: list[float], y: list[float], **kwargs: Any) -> Any:
        means.append(x[0])
        return plot(self, x, y, **kwargs)

    monkeypatch.setattr(Axes, "scatter", seen)
    monkeypatch.setattr(Axes, "plot", line)
    rows = [
        row(configuration, report(1, value), seed=seed)
        for configuration, seed, value in (("a", 1, 0.5), ("b", 1, 0.6), ("b", 2, 0.8))
    ]
    charts.draw_table({"matrix": {"seed": [1, 2]}}, [*rows, row("c", OOM, seed=1)], Path("dots.png"))
    assert dots == [(0.5, "seed 1"), (0.6, None), (0.8, "seed 2")]
    assert means == pytest.approx([0.5, 0.7])


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("580.1, 700.00, 1755, 1980", ["580.1", 700.0, 1755.0, 1980.0]),
        ("580.1, [N/A], 1755, [N/A]", ["580.1", None, 1755.0, None]),
        ("No devices were found", [None] * 4),
        (None, [None] * 4),
    ],
)
def test_the_gpus_state_is_read_from_nvidia_smi(
    said: str | None, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def run(*command: str) -> str | None:
        asked.append(command)
        return said

    monkeypatch.setattr(environments, "_run", run)
    state = environments.gpu_state("GPU-1")
    assert list(state) == ["driver", "gpu_power_limit_watts", "gpu_sm_clock_mhz", "gpu_max_sm_clock_mhz"]
    assert list(state.values()) == expected
    assert (asked[0][0], asked[0][-1]) == ("nvidia-smi", "--id=GPU-1")
    assert len(asked) == (1 if said else 2)  # without an answer, once more without the identity
