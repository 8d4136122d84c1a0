"""Figures from rows: a line is of one call, a ratio of two lines of the same call, and captions have the conditions."""

from __future__ import annotations

import json
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
    runs = {"samples_per_sec": rate, "peak_memory_gib": 2.0, "warmup_seconds": 3.0, **more.pop("runs", {})}
    return {
        "configuration": configuration,
        "call": call,
        "peer": "hf_trainer" if configuration.startswith("HF") else None,
        "data.batch_size": 8,
        "environment": ENVIRONMENT,
        "step_seconds_p10_p50_p90": [[0.0, 1 / rate, 9.0], None],
        "algorithms": {"unpadding": {"evidence": {"padding_of_the_run": 0.25}}},
        **{name: {"median": value, "runs": [value]} for name, value in runs.items()},
        **more,
    }


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    monkeypatch.setattr(tables, "rows_of", lambda name: kept)
    return kept


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
    with pytest.raises(ValueError, match="no call of any has rows of both"):
        tables.effect("any", "+ b", "fp32")
    del rows[2:]
    assert tables.steps("any")[3] == "| 8 | + a | 100 | 2.00 | 10.0 (2.00) | 2.0 | 3 |", "one call has no letter"


def test_rows_are_selected_by_point_override_and_call(rows: list[dict[str, Any]]) -> None:
    rows += [row("a", "2026-01-01T05", 100), row("b", "2026-01-01T06", 200) | {"data.batch_size": 16}]
    rows += [row("c", "2026-01-02T05", 400, overrides=["model.size=base", "model.size=large"])]
    for selection, names in {
        "t": "abc",
        "t data.batch_size=16": "b",
        "t data.batch_size=8,16 configuration=a,b": "ab",
        "t model.size=large": "c",  # the last override holds
        "t call=2026-01-01": "ab",  # the beginning of a call's time
        "t call=2026-01-01T06,2026-01-02": "bc",
        "t call=2026-01-01 data.batch_size=8": "a",
    }.items():
        assert "".join(row["configuration"] for row in tables.select(selection)) == names
    assert tables.steps("t", "call=2026-01-02")[2] == "| 8 | c | 400 | 1.00 | 2.5 (1.00) | 2.0 | 3 |"
    with pytest.raises(ValueError, match=r"no row of 't data\.batch_size=1'"):
        tables.select("t data.batch_size=1")


def test_the_fast_set_is_compared_with_the_fastest_peer_of_its_call(rows: list[dict[str, Any]]) -> None:
    def add(call: str, **rates: float) -> None:
        names = {"plain": "HF Trainer", "graphs": "HF Trainer, graphs", "fast": "fast set", "fp8": "fast set, fp8"}
        names |= {"expert": "flattened loop"}
        peers = {"plain": "hf_trainer", "graphs": "hf_trainer", "expert": "flattened_loop"}
        for key, rate in rates.items():
            more = {"peak_memory_gib": 1.0} if key == "fast" else {}
            one = row(names[key], call, rate, overrides=["model.size=base"], runs=more)
            rows.append(one | {"peer": peers.get(key)})

    def cells() -> list[str]:
        return tables.best("t")[2].removesuffix(" |").split(" | ")[3:]

    add("2026-01-01", plain=100, graphs=120, fast=180, fp8=240)
    add("2026-01-02", plain=150, fast=160)
    assert tables.best("t")[2] == "| base | 8 × 256 | 25% | 120 | – | 180 | 1.50 | 240 | 2.00 | 50% |"
    assert tables.best("t")[-1].endswith("2026-01-01; commit 0123456.")
    add("2026-01-03", plain=100, fast=300, fp8=400)
    assert cells()[:2] == ["120", "–"], "a call with fewer peers chooses no weaker one"
    add("2026-01-04", plain=100, expert=200, fast=300, fp8=500)
    assert cells() == ["100", "200", "300", "1.50", "500", "2.50", "50%"], "ratios are to the faster peer"
    rows[:] = [one for one in rows if one["configuration"] != "fast set, fp8"]
    with pytest.raises(ValueError, match="no call of t has a peer and the fast set"):
        tables.best("t")


def test_time_to_accuracy_is_that_of_the_first_evaluation_at_the_target(rows: list[dict[str, Any]]) -> None:
    def ran(configuration: str, seed: int, *evaluations: tuple[float, float], call: str = "2026-01-02") -> None:
        run = [{"batch": i, "seconds": s, "accuracy": a} for i, (s, a) in enumerate(evaluations)]
        rows.append(row(configuration, call, 1, seed=seed, evaluations=[run], repeats=1))

    ran("full", 1, (10, 0.7), (20, 0.91), (30, 0.90))
    ran("full", 2, (10, 0.6), (20, 0.7), (32, 0.92))
    ran("ours", 1, (5, 0.899), (12, 0.90))
    ran("ours", 2, (6, 0.5), (14, 0.93))
    ran("weak", 1, (1, 0.8))
    ran("weak", 2, (1, 0.95))
    ran("full", 3, (99, 0.99), call="2026-01-01")
    text = tables.time_to_accuracy("t", "full")
    assert text[0].startswith("| configuration | seconds to 0.8959 (least–most) |"), "0.91 less a deviation of 0.0141"
    assert text[2:5] == [
        "| full | 26.0 (20.0–32.0) | 1.00 | 2 of 2 | 0.9100 |",
        "| ours | 9.5 (5.0–14.0) | 2.74 | 2 of 2 | 0.9150 |",
        "| weak | 1.0 (1.0–1.0) | – | 1 of 2 | 0.8750 |",
    ]
    assert text[-1].startswith("One run of each configuration and seed. ")


def test_lines_of_several_gpus_name_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(gpu: str) -> list[dict[str, Any]]:
        more = {"overrides": ["model.size=base"], "environment": ENVIRONMENT | {"gpu": gpu}}
        peers = {"HF Trainer": "hf_trainer", "fast set": None, "fast set, fp8": None}
        return [row(name, "1", 100, **more) | {"peer": peer} for name, peer in peers.items()]

    kept = {"t": ran("NVIDIA H200"), "other/t": ran("NVIDIA H100 80GB HBM3")}
    monkeypatch.setattr(tables, "rows_of", kept.__getitem__)
    head, _, first, second, _, where = tables.best("t", "other/t")
    assert [line.split(" | ")[0] for line in (head, first, second)] == ["| GPU", "| H200", "| H100 80GB HBM3"]
    assert where.startswith("NVIDIA H100 80GB HBM3, NVIDIA H200, driver")
    assert tables.best("other/t")[0].startswith("| BERT |")


def test_rows_of_another_gpu_are_named_by_their_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder, rate in (("mine", 1.0), ("other", 2.0), ("cpu", 3.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "t.jsonl").write_text(json.dumps(row("a", "2026-01-01", rate)))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "COMMITTED", tmp_path / "mine")
    assert [tables.rows_of(name)[0]["samples_per_sec"]["median"] for name in ("t", "other/t")] == [1.0, 2.0]
    assert tables.rows_of("absent/t") == [], "not those of the CPU"


def test_a_figure_says_how_often_each_configuration_ran_and_for_how_long(rows: list[dict[str, Any]]) -> None:
    def ran(*rates: float, batches: int) -> dict[str, Any]:
        spread = {"median": sorted(rates)[len(rates) // 2], "runs": list(rates)}
        given = ["trainer.max_duration=1ep", f"trainer.max_duration={batches}ba"]
        return row("a", "2026-01-01", 1, samples_per_sec=spread, repeats=len(rates), overrides=given)

    rows.append(ran(100, batches=40))
    assert tables.steps("any")[-1].startswith("One run of each configuration, 40 batches each. x, driver")
    rows[:] = [ran(100, 300, 200, batches=40)]
    assert "| a | 200 (100–300) | 1.00 |" in tables.steps("any")[2]
    assert tables.steps("any")[-1].startswith("3 runs of each configuration, 40 batches each: median (least–most).")
    rows[:] = [ran(100, 300, batches=40)]
    assert ": median or, of two runs, mean (least–most). x," in tables.steps("any")[-1]
    rows[:] = [ran(100, 300, 200, batches=40), ran(100, batches=120) | {"data.batch_size": 16}]
    said = "1–3 runs of each configuration, 40–120 batches each: median (least–most); one run where no range is given."
    assert tables.steps("any")[-1].startswith(said)
    rows[0]["overrides"] = ["trainer.max_duration=2ep"]
    assert tables.steps("any")[-1].startswith("1–3 runs of each configuration: median")


def test_uncommitted_changes_are_named(rows: list[dict[str, Any]]) -> None:
    changed = {**ENVIRONMENT, "uncommitted_changes": True}
    rows += [row("a", "2026-01-01", 100, environment=changed), row("b", "2026-01-01", 100)]
    assert tables.steps("any")[-1].endswith("; 2026-01-01; commit 0123456, 0123456 with uncommitted changes.")


def test_whole_jobs_are_compared_with_the_first_configuration_of_the_same_call(rows: list[dict[str, Any]]) -> None:
    for call, configuration, seconds in (("1", "peer", 60.0), ("1", "ours", 20.0), ("2", "ours", 10.0)):
        rows.append(row(configuration, f"2026-01-0{call}", 100, runs={"process_seconds": seconds, "eval_seconds": 4.0}))
    rows[0]["process_seconds"]["runs"] = [50.0, 60.0, 70.0]
    assert tables.jobs("any")[2:5] == [
        "| a | 8 | peer | 60.0 (50.0–70.0) | 1.00 | 3 | 4.0 |",
        "| a | 8 | ours | 20.0 | 3.00 | 3 | 4.0 |",
        "| b | 8 | ours | 10.0 | – | 3 | 4.0 |",
    ]


def test_kernels_are_those_of_the_last_row(rows: list[dict[str, Any]]) -> None:
    kernel = {"name": "norm_backward", "us": 50.0, "torch_us": 125.0, "copy_us": 40.0}
    for call, factor in (("2026-01-01", 3), ("2026-01-02", 1)):
        rows.append({"call": call, "environment": ENVIRONMENT, "kernels": [{**kernel, "us": factor * 50.0}]})
    assert tables.kernels("any")[2:4] == ["| norm backward | 50 | 125 | 2.50 | 40 |", ""]


def test_the_last_row_of_each_kind_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"mutants": 6, "killed": 4, "timed_out": 1, "survived": 1, "environment": ENVIRONMENT}
    kept = [{"package": "b", "seed": seed, "call": f"2026-01-0{seed}T", **counts} for seed in (1, 2)]
    kept += [{**kept[0], "exhaustive": False}, {**kept[0], "package": "a", "exhaustive": True, "not_run": 3}]
    where = {"gpu": "H200", "gpu_count": 1, "torch": "2.11", "commit": "0123456789"}
    ran = {"passed": 1, "failed": 0, "skipped": 4, "seconds": 90.0, "arguments": ["-m", "not long"]}
    suites = [{**ran, "call": "2026-01-01", "environment": where}, {**ran, "call": "2026-01-03", "environment": where}]
    suites.append({**ran, "passed": 5, "call": "2026-01-02", "environment": where | {"gpu_count": 2}})
    monkeypatch.setattr(tables, "every_gpus_rows", {"mutants": kept, "suite": suites}.__getitem__)
    assert tables.mutants()[2:] == [
        "| `a` | seed 1 | all | 6 | 4 | 1 | 1 | – | 3 | 2026-01-01, 0123456 |",
        "| `b` | seed 1 | default | 6 | 4 | 1 | 1 | – | – | 2026-01-01, 0123456 |",
        "| `b` | seed 2 | all | 6 | 4 | 1 | 1 | – | – | 2026-01-02, 0123456 |",
    ]
    assert tables.suite()[2:] == [
        "| `-m 'not long'` | 1 | 0 | 4 | 1.5 | H200, torch 2.11 | 2026-01-03, 0123456 |",
        "| `-m 'not long'` | 5 | 0 | 4 | 1.5 | 2 H200, torch 2.11 | 2026-01-02, 0123456 |",
    ]


def test_a_configuration_without_a_seed_has_a_dash_and_no_mean(rows: list[dict[str, Any]]) -> None:
    for configuration, seed, accuracy in (("a", 1, 0.8), ("a", 2, 0.9), ("b", 2, 0.7)):
        rows.append(row(configuration, "2026-01-01", 1, seed=seed, runs={"accuracy": accuracy}, samples_per_sec=None))
    assert tables.accuracy("any")[2:4] == [
        "| a | 0.8000 | 0.9000 | 0.8500 | 0.0707 | 0.8000–0.9000 | 2 |",
        "| b | – | 0.7000 | – | – | 0.7000–0.7000 | 1 |",
    ]


def test_profiles_of_one_override_are_set_side_by_side_by_kind(rows: list[dict[str, Any]]) -> None:
    def profiled(override: str, techniques: dict[str, Any], *kernels: tuple[str, float]) -> dict[str, Any]:
        named = [{"name": name, "kind": "stale", "ms": ms, "launches": 1} for name, ms in kernels]
        times = {"busy_ms": 10.0, "step_ms": 12.0, "gemm_floor_ms": 4.0}
        more = {"call": "2026-01-01", "environment": ENVIRONMENT}
        return {"arguments": [override], "algorithms": techniques, "kernels": named, **times, **more}

    rows.append(profiled("size=large", {}, ("nvjet_a", 5.0), ("nvjet_b", 1.0), ("triton_poi_fused_gelu_1", 4.0)))
    float8 = {"float8_linear": {"settings": "Float8Linear(recipe='rowwise')"}}
    rows.append(profiled("size=large", float8, ("nvjet_q", 3.0), ("triton_poi_fused__scaled_mm_gelu_1", 5.0)))
    rows.append(profiled("size=base", {}, ("nvjet_a", 9.0)))
    for number in ("", ", precision='fp8'"):
        fused = {"fused_layers": {"settings": f"FusedLayers(last_layer='needed'{number})"}}
        rows.append(profiled("size=large, batch=8", fused, ("nvjet_a", 1.0)))
    assert tables.kinds("size=large, batch=8")[0] == "| ms per step | fast set | fast set, fp8 |"
    lines = tables.kinds("size=large")
    assert lines[0] == "| ms per step | compiled | compiled, float8 rowwise |"
    assert lines[2:6] == [
        "| GEMM | 6.0 | 3.0 |",
        "| scaling to float8 | – | 5.0 |",
        "| activation | 4.0 | – |",
        "| kernels outside the slowest | – | 2.0 |",
    ]
    assert "| **step** | 12.0 | 12.0 |" in lines


def test_a_call_is_shown_with_its_failures_and_its_scaling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def kept(configuration: str, call: str, rate: float | None, ranks: int, error: str = "") -> str:
        failure = {"errors": [error], "error_kinds": ["failed"]} if rate is None else {"errors": []}
        whole = row(configuration, call, rate or 1.0, ranks=ranks, accuracy=None, repeats=1, **failure)
        del whole["data.batch_size"]
        failed: dict[str, Any] = {"samples_per_sec": None, "environment": {}, "step_seconds_p10_p50_p90": None}
        return json.dumps(whole if rate else {**whole, **failed})

    lines = [
        kept("1 GPU, a", "2026-01-01", 1.0, 1),
        kept("1 GPU, a", "2026-01-02", 50, 1),
        kept("1 GPU, b", "2026-01-02", 60, 1),
    ]
    lines += [kept("2 GPUs, a", "2026-01-02", 90, 2), kept("2 GPUs, b", "2026-01-02", 60, 2)]
    lines += [kept("2 GPUs, alone", "2026-01-02", 60, 2), kept("2 GPUs, a, plain", "2026-01-02", 80, 2)]
    lines += [kept("2 GPUs, ab", "2026-01-02", 80, 2)]
    lines += [kept("4 GPUs, a", "2026-01-02", None, 4, "train.py: needs 4 | fewer")]
    (tmp_path / "scaling.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(tables, "COMMITTED", tmp_path)
    assert tables.call("scaling")[:-1] == [
        "| configuration | samples/s (least–most) | ratio | peak GiB | warm-up s | median step, ms | efficiency |",
        "|---|---|---|---|---|---|---|",
        "| 1 GPU, a | 50.0 | 1.00 | 2.0 | 3.0 | 20.0 |  |",
        "| 1 GPU, b | 60.0 | 1.20 | 2.0 | 3.0 | 16.7 |  |",
        "| 2 GPUs, a | 90.0 | 1.80 | 2.0 | 3.0 | 11.1 | 90.0% |",
        "| 2 GPUs, b | 60.0 | 1.20 | 2.0 | 3.0 | 16.7 | 50.0% |",
        "| 2 GPUs, alone | 60.0 | 1.20 | 2.0 | 3.0 | 16.7 |  |",
        "| 2 GPUs, a, plain | 80.0 | 1.60 | 2.0 | 3.0 | 12.5 | 80.0% |",
        "| 2 GPUs, ab | 80.0 | 1.60 | 2.0 | 3.0 | 12.5 |  |",
        "| 4 GPUs, a | failed: needs 4 / fewer |  |  |  |  |  |",
        "",
    ]
    assert tables.call("scaling", 2)[2:4] == ["| 1 GPU, a | 1.0 | 1.00 | 2.0 | 3.0 |", ""]
    assert tables.call("scaling", 2)[6:] == tables.call("scaling")


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
        "| configuration | point | samples/s (least–most) | ratio | peak GiB | warm-up s | process s | published |",
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
