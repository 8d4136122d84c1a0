"""What a finished call leaves beside its rows: a page with its table, which tells failures apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.rows import add_run, describe_error, describe_errors, empty_row, error_report
from benchmarks.run import leave_page
from benchmarks.table_file import Configuration
from benchmarks.tables import markdown
from composer_speedups.sweep.processes import Ended
from composer_speedups.train import environment as environments
from tests.benchmarks.test_charts import table

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
    filled = empty_row("t", "2026-01-02T03:04:05.678Z", Configuration(configuration, point, []), published=published)
    for run in reports:
        add_run(filled, run)
    return filled


def failed(status: int, output: str) -> dict[str, Any]:
    return error_report(Ended(status, output, 1.0))


OOM = failed(1, "Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n" + "x" * 5000)
REFUSED = failed(2, "warning\ntrain.py: apex_optimizer: NVIDIA Apex is not installed; build it | or not\n")


def test_failures_are_classified_by_status_and_output() -> None:
    assert [f["error_kind"] for f in (OOM, REFUSED, failed(1, "ZeroDivisionError"))] == [
        "out of memory",
        "refused",
        "failed",
    ]
    assert failed(1, "RuntimeError: CUDA error: out of memory")["error_kind"] == "out of memory"
    assert failed(-9, "")["error_kind"] == "out of memory", "the kernel killed it"
    assert len(OOM["error"]) < 2100
    assert describe_error(**REFUSED).startswith("refused: apex_optimizer: NVIDIA Apex is not installed")
    assert describe_error("one\ntwo\n", "failed") == "failed: two"
    assert describe_errors(row("x", OOM, OOM)) == "out of memory"
    assert describe_errors(row("x", report(1), OOM)) == "1 of 2 runs out of memory"
    refused = describe_errors(row("x", REFUSED))
    assert refused.startswith("refused: apex_optimizer: NVIDIA Apex is not installed; build it / or")
    assert len(describe_errors(row("x", failed(1, "word " * 90)))) < 130
    assert describe_errors(row("x", report(1))) == ""


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
    lines = markdown([row(name, report(100, algorithms=techniques, **more)) for name, techniques in settings.items()])
    place = lines[0].split(" | ").index("MFU")
    shown = {line.split(" | ")[0]: line.split(" | ")[place] for line in lines[2:]}
    of_bf16 = "10.0% of bf16's peak"
    assert shown == {"| bf16": "10.0%", "| float8": of_bf16, "| fp8": of_bf16, "| fused": "10.0%"}


def test_a_finished_call_leaves_its_page_and_a_chart_if_there_is_something_to_draw() -> None:
    rows = [row("fp32", report(100), report(120)), row("x", OOM)]
    published = {"where": "a V100"}
    assert leave_page(table(published=published, given=["a=[x, y]"]), rows, Path("t.jsonl")) == [
        Path("t.md"),
        Path("t.png"),
    ]
    text = Path("t.md").read_text()
    assert "`python -m benchmarks.run t 'a=[x, y]'`, call of 2026-01-02T03:04:05.678Z." in text
    assert (
        "NVIDIA H200, limit 700 W, SM clock 1755 MHz, driver 580, torch 2.11.0, Composer 0.32.1, "
        "transformers 5.17.0; 2026-01-02; commit 0123456." in text
    )
    assert "Published: a V100." in text
    assert "![t](t.png)" in text
    assert leave_page(table(), [row("x", OOM)], Path("none.jsonl")) == [Path("none.md")]
    assert "![" not in Path("none.md").read_text()
    assert "none says where it ran" in Path("none.md").read_text()


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
