"""Figures from rows: a line is of one call, and a ratio of two lines of the same call.

What the repository's pages show is compared with the committed rows by tests/core/test_cards.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.rows import add_run, describe_error, describe_errors, empty_row, error_report
from benchmarks.table_file import Configuration
from composer_speedups.sweep.processes import Ended
from composer_speedups.train import environment as environments

ENVIRONMENT = dict.fromkeys(("gpu", "driver", "torch", "composer", "transformers"), "x") | {"commit": "0123456789"}


def row(configuration: str, call: str, rate: float, **more: Any) -> dict[str, Any]:
    """A row of one run; with ``HF`` in its name, of a peer."""
    runs = {"samples_per_sec": rate, "peak_memory_gib": 2.0, "warmup_seconds": 3.0, **more.pop("runs", {})}
    return {
        "configuration": configuration,
        "call": call,
        "peer": "hf_trainer" if configuration.startswith("HF") else None,
        "data.batch_size": 8,
        "environment": ENVIRONMENT,
        "step_seconds_p10_p50_p90": [[0.0, 1 / rate, 9.0], None],
        "algorithms": {"unpadding": {"evidence": {"padding_of_the_run": 0.25}}},
        **{name: {"median": value, "min": value, "max": value, "runs": [value]} for name, value in runs.items()},
        **more,
    }


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    monkeypatch.setattr(tables, "rows_of", lambda name: kept)
    return kept


def test_the_last_run_of_each_selection_of_tests_is_shown_on_a_cpu_and_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(gpu: str | None, passed: int, *arguments: str) -> dict[str, Any]:
        counts = {"passed": passed, "failed": 0, "skipped": 0, "seconds": 60, "call": f"2026-01-01T0{passed}:00"}
        environment = {"gpu": gpu, "gpu_count": 1 if gpu else 0, "cpu_count": 2, "commit": "1" * 40}
        return {"arguments": [*arguments], "environment": environment, **counts}

    gpu = ("-m", "gpu and not long", "--ignore=tests/gpu")
    every = [run("G", 1, "-n", "4", *gpu), run(None, 2, "-q", "-m", "not long"), run(None, 3, "tests", "-k", "-n")]
    every += [run(None, 4, *gpu), run("G", 5, "-p", "-m", "--dist", "load", "-q", "--no-header", *gpu)]
    monkeypatch.setattr(tables, "committed", lambda name: every)
    lines = [line.split(" | ")[:2] for line in tables.suite()[2:]]
    assert lines == [
        ["| `-m 'gpu and not long' --ignore=tests/gpu`", "5"],
        ["| `-m 'not long'`", "2"],
        ["| `tests -k -n`", "3"],
        ["| `-m 'gpu and not long' --ignore=tests/gpu`", "4"],
    ]


def test_each_line_is_of_one_call_and_its_ratio_of_two_lines(rows: list[dict[str, Any]]) -> None:
    rows += [row("fp32", "2026-01-01T05:06:07", 50), row("+ a", "2026-01-01T05:06:07", 100)]
    rows += [row("fp32", "2026-01-02T05:06:07", 200), row("+ b", "2026-01-03T05:06:07", 400)]
    failed = {"samples_per_sec": None, "errors": ["CUDA out of memory"], "error_kinds": ["out of memory"], "repeats": 1}
    rows.append(row("graphs", "2026-01-03T05:06:07", 1, **failed))
    lines = tables.steps("any")
    assert lines[0].startswith("| call | batch | configuration | samples/s | ratio to fp32 | median step, ms (ratio) |")
    assert lines[2:7] == [
        "| a | 8 | fp32 | 50.0 | 1.00 | 20.0 (1.00) | 2.0 | 3 |",
        "| a | 8 | + a | 100 | 2.00 | 10.0 (2.00) | 2.0 | 3 |",
        "| b | 8 | fp32 | 200 | 1.00 | 5.0 (1.00) | 2.0 | 3 |",
        "| c | 8 | + b | 400 | – | 2.5 | 2.0 | 3 |",
        "| c | 8 | graphs | out of memory |  |  |  |  |",
    ]
    assert lines[-1].endswith(
        "Ratios are within a call. a: 2026-01-01 05:06, commit 0123456; b: 2026-01-02 05:06, commit 0123456; "
        "c: 2026-01-03 05:06, commit 0123456."
    )
    assert tables.effect("any", "+ a", "fp32")[2] == "| 8 | 50.0 | 100 | 2.00 | 2.0 → 2.0 | 3 → 3 |"
    with pytest.raises(ValueError, match=r"no row of .any. in a call with"):
        tables.effect("any", "+ b", "fp32")
    del rows[2:]
    assert tables.steps("any")[3] == "| 8 | + a | 100 | 2.00 | 10.0 (2.00) | 2.0 | 3 |", "one call has no letter"


@pytest.mark.parametrize("flag", ["peer.apply_recommended=true", "peer.max_graphs=8"])
def test_a_peer_that_runs_with_this_packages_techniques_is_nothing_to_be_compared_with(
    flag: str, rows: list[dict[str, Any]]
) -> None:
    rows += [row("HF", "2026-01-01", 100), row("HF, applied", "2026-01-01", 200, overrides=[flag])]
    assert tables.steps("any")[3] == "| 8 | HF, applied | 200 | 2.00 | 5.0 (2.00) | 2.0 | 3 |"


def test_the_fast_set_is_compared_with_the_fastest_peer_of_its_call(rows: list[dict[str, Any]]) -> None:
    def add(call: str, commit: str = "0123456", **rates: float) -> None:
        names = {"plain": "HF Trainer", "graphs": "HF Trainer, graphs", "fast": "fast set", "fp8": "fast set, fp8"}
        names |= {"expert": "flattened loop", "engine": "Transformer Engine", "engine8": "Transformer Engine, fp8"}
        peers = {"plain": "hf_trainer", "graphs": "hf_trainer", "expert": "flattened_loop"}
        peers |= dict.fromkeys(("engine", "engine8"), "transformer_engine")
        for key, rate in rates.items():
            more = {"peak_memory_gib": 1.0} if key == "fast" else {}
            one = row(names[key], call, rate, overrides=["model.size=base"], repeats=1, runs=more)
            rows.append(one | {"peer": peers.get(key), "environment": {**ENVIRONMENT, "commit": commit}})

    add("2026-01-01", plain=100, graphs=120, fast=180, fp8=240)
    add("2026-01-02", fast=160, fp8=1)
    assert tables.beside("t")[0] == (
        "| model | batch × tokens | padding | HF Trainer | fast set | fast set, fp8 | 1.00 is | memory |"
    )
    line = "| BERT-base | 8 × 256 | 25% | 120 (1.00) | 180 (1.50) | 240 (2.00) | HF Trainer, graphs | 50% |"
    assert tables.beside("t")[2] == line
    assert tables.beside("t")[-1].endswith("2026-01-01; commit 0123456.")
    add("2026-01-03", plain=100, fast=300)
    assert tables.beside("t")[2] == line, "a call with a slower peer at the same commit makes no better ratio"
    add("2026-01-04", "fedcba9", plain=100, expert=200, fast=300)
    assert tables.beside("t")[2] == (
        "| BERT-base | 8 × 256 | 25% | 100 (0.50) | 200 (1.00) | 300 (1.50) | flattened loop | 50% |"
    ), "the rows of the newest commit that has what is compared"
    said = "x, BERT-base trains 1.50 times as fast as in the fastest other program in bf16.**"
    assert said in tables.headline("t")[0]
    add("2026-01-05", "abcdef0", expert=200, engine=250, engine8=500, fast=300, fp8=600)
    rates = "| 200 (0.80) | 250 (1.00) | 500 (1.00) | 300 (1.20) | 600 (1.20) |"
    base = "Transformer Engine; for fp8, Transformer Engine, fp8"
    assert tables.beside("t")[2] == f"| BERT-base | 8 × 256 | 25% {rates} {base} | 50% |"
    assert (
        "trains 1.20 times as fast as in the fastest other program in bf16 (1.20 times with FP8"
        in tables.headline("t")[0]
    )
    rows[:] = [one for one in rows if one["peer"] is None]
    with pytest.raises(ValueError, match="no call of t has a peer and the fast set"):
        tables.beside("t")


def test_time_to_accuracy_is_that_of_the_first_evaluation_at_the_target(rows: list[dict[str, Any]]) -> None:
    def ran(configuration: str, seed: int, *evaluations: tuple[float, float], call: str = "2026-01-02") -> None:
        run = [{"batch": i, "seconds": s, "accuracy": a} for i, (s, a) in enumerate(evaluations)]
        environment = {**ENVIRONMENT, "commit": call}
        rows.append(row(configuration, call, 7, seed=seed, evaluations=[run], repeats=1, environment=environment))

    ran("HF Trainer", 1, (10, 0.7), (20, 0.91), (30, 0.90))
    ran("HF Trainer", 2, (10, 0.6), (21, 0.7), (32, 0.92))
    ran("ours", 1, (5, 0.899), (6, 0.90))
    ran("ours", 2, (6, 0.5), (14, 0.93))
    ran("weak", 1, (1, 0.8), (2, 0.8))
    ran("weak", 2, (1, 0.95), (2, 0.95))
    ran("HF Trainer", 3, (98, 0.99), (99, 0.99), call="2026-01-01")
    text = tables.time_to_accuracy("t")
    assert text[0] == (
        "| configuration | seconds in all (least–most) | speedup over HF Trainer | start-up, s | samples/s "
        "| final accuracy | seconds to 0.8959 | speedup over HF Trainer | runs that reached it |"
    )
    assert text[2:5] == [
        "| HF Trainer | 31.0 (30.0–32.0) | 1.00 | -0.5 | 7.0 | 0.9100 | 26.0 (20.0–32.0) | 1.00 | 2 of 2 |",
        "| ours | 10.0 (6.0–14.0) | 3.10 | 1.0 | 7.0 | 0.9150 | 9.5 (5.0–14.0) | 2.74 | 2 of 2 |",
        "| weak | 2.0 (2.0–2.0) | 15.50 | 0.0 | 7.0 | 0.8750 | 1.0 (1.0–1.0) | – | 1 of 2 |",
    ], "0.91 less a deviation of 0.0141"
    assert text[-1].startswith("One run of each configuration and seed. ")


def test_a_configuration_without_a_seed_has_a_dash_and_no_mean(rows: list[dict[str, Any]]) -> None:
    for configuration, seed, accuracy in (("a", 1, 0.8), ("a", 2, 0.9), ("b", 2, 0.7)):
        rows.append(row(configuration, "2026-01-01", 1, seed=seed, runs={"accuracy": accuracy}, samples_per_sec=None))
    assert tables.accuracy("any")[2:4] == [
        "| a | 0.8000 | 0.9000 | 0.8500 | 0.0707 | 0.8000–0.9000 | 2 |",
        "| b | – | 0.7000 | – | – | 0.7000–0.7000 | 1 |",
    ]


def test_a_table_without_rows_says_how_to_measure_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", Path("no-results"))
    assert tables.call("some-gpu/esm2") == ["Not measured yet: `python -m benchmarks.run esm2` does it."]


# Rows


def ran(rate: float, **more: Any) -> dict[str, Any]:
    """The report of a run."""
    throughput, memory = {"samples_per_sec": rate, "warmup_seconds": 2.0}, {"peak_gib": 3.0}
    return {"throughput": throughput, "metrics": {}, "memory": memory, "environment": ENVIRONMENT, **more}


def filled(configuration: str, *reports: dict[str, Any], batch: int = 8, published: str | None = None) -> Any:
    """A row with the reports of its runs."""
    declared = Configuration(configuration, {"data.batch_size": batch}, [], published=published)
    made = empty_row("t", "2026-01-02T03:04:05.678Z", declared)
    for report in reports:
        add_run(made, report)
    return made


def failed(status: int, output: str) -> dict[str, Any]:
    return error_report(Ended(status, output, 1.0))


OOM = failed(1, "Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n" + "x" * 5000)
REFUSED = failed(2, "warning\ntrain.py: apex_optimizer: NVIDIA Apex is not installed; build it | or not\n")


def test_failures_are_classified_and_described_in_a_cell() -> None:
    kinds = [run["error_kind"] for run in (OOM, REFUSED, failed(1, "ZeroDivisionError"), failed(-9, ""))]
    assert kinds == ["out of memory", "refused", "failed", "out of memory"], "the kernel killed the last one"
    assert len(OOM["error"]) < 2100
    assert describe_error("one\ntwo\n", "failed") == "failed: two"
    assert describe_errors(filled("x", OOM, OOM)) == "out of memory"
    assert describe_errors(filled("x", ran(1), OOM)) == "1 of 2 runs out of memory"
    refused = describe_errors(filled("x", REFUSED))
    assert refused.startswith("refused: apex_optimizer: NVIDIA Apex is not installed; build it / or")
    assert len(describe_errors(filled("x", failed(1, "word " * 90)))) < 130
    assert describe_errors(filled("x", ran(1))) == ""


def test_a_call_is_compared_with_its_first_configuration_at_each_point() -> None:
    rows = [
        filled("fp32", ran(100), ran(110), published="9 samples/s"),
        filled("x", ran(210, process_seconds=9.0)),
        filled("fp32", OOM, batch=16),
        filled("x", ran(300), batch=16),
    ]
    assert tables.markdown(rows) == [
        "| configuration | point | samples/s (least–most) | ratio to fp32 | peak GiB | warm-up s | process s | "
        "published |",
        "|---" * 8 + "|",
        "| fp32 | data.batch_size=8 | 105 (100–110) | 1.00 | 3.0 | 2.0 |  | 9 samples/s |",
        "| x | data.batch_size=8 | 210 | 2.00 | 3.0 | 2.0 | 9.0 |  |",
        "| fp32 | data.batch_size=16 | out of memory |  |  |  |  |  |",
        "| x | data.batch_size=16 | 300 | – | 3.0 | 2.0 |  |  |",
    ]


@pytest.mark.parametrize(
    ("said", "expected"),
    [("580.1, 700.00, [N/A], 1980", ["580.1", 700.0, None, 1980.0]), ("No devices were found", [None] * 4)],
)
def test_the_gpus_state_is_read_from_nvidia_smi(
    said: str, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "_run", lambda *_: said)
    state = environments.gpu_state("GPU-1")
    assert list(state) == ["driver", "gpu_power_limit_watts", "gpu_sm_clock_mhz", "gpu_max_sm_clock_mhz"]
    assert list(state.values()) == expected
