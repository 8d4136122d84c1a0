"""Values in sentences: which rows they are of, that they follow the rows, and what is said where there are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import render, tables
from benchmarks.values import render_values, value, without_values


def row(
    configuration: str, call: str, *rates: float, batch: int = 8, peer: str | None = None, **more: Any
) -> dict[str, Any]:
    def measured(runs: list[float]) -> dict[str, Any] | None:
        return {"median": sorted(runs)[len(runs) // 2], "runs": runs} if runs else None

    return {
        "table": "t",
        "configuration": configuration,
        "call": f"2026-01-0{call}",
        "peer": peer,
        "data.batch_size": batch,
        "overrides": ["model.size=base", "model.size=large"],
        "samples_per_sec": measured(list(rates)),
        "tokens_per_sec": measured([250 * rate for rate in rates]),
        "peak_memory_gib": measured([rate / 100 for rate in rates]),
        "step_seconds_p10_p50_p90": [[0.01, 0.02, 0.05]],
        "startup": {"imports_seconds": 7.25},
        "environment": {"gpu": "x"},
        **more,
    }


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(tables, "rows_of", lambda name: found if name == "t" else [])
    return found


def test_a_value_is_the_median_of_the_last_call_that_has_the_configuration(rows: list[dict[str, Any]]) -> None:
    rows += [row("ours", "1", 9000), row("ours", "2", 1000, 4000, 1500), row("other", "3", 7)]
    assert value("t; ours; samples/s") == "1,500"
    assert value("t; ours; samples/s; .1f") == "1500.0"
    assert value("t; ours; samples/s spread") == "1,000–9,000"
    assert value("t; ours; samples/s runs") == "4"
    assert value("t; ours; calls") == "2"
    assert value("t; other; samples/s spread") == "7", "one run has no range"


def test_measures_of_a_row(rows: list[dict[str, Any]]) -> None:
    rows.append(row("ours", "1", 100.0, 300.0, 200.0))
    assert value("t; ours; peak GiB") == "2.0"
    assert value("t; ours; tokens/s") == "50,000"
    assert value("t; ours; step ms") == "20.0"
    assert value("t; ours; step ms p90") == "50"
    assert value("t; ours; startup.imports_seconds") == "7.2"
    assert value("t; ours; name") == "ours"


def test_keys_select_rows_by_point_and_by_the_last_override(rows: list[dict[str, Any]]) -> None:
    rows += [row("ours", "1", 100), row("ours", "1", 200, batch=16)]
    rows += [row("ours", "2", 300, overrides=["model.size=base"])]
    assert value("t batch=16; ours; samples/s") == "200"
    assert value("t model.size=large batch=8; ours; samples/s") == "100"
    assert value("t model.size!=large; ours; samples/s") == "300"
    with pytest.raises(ValueError, match=r"batch_size=16 and at data\.batch_size=8; add a key to t"):
        value("t; ours; samples/s")


def test_a_ratio_is_of_the_last_call_that_ran_both(rows: list[dict[str, Any]]) -> None:
    rows += [row("peer", "1", 100), row("ours", "1", 150), row("peer", "2", 200), row("ours", "2", 340)]
    rows += [row("ours", "3", 9000)]
    assert value("t; ours / peer; samples/s") == "1.70"
    assert value("t; ours / peer; samples/s; .0%") == "170%"
    assert value("t; peer / ours; samples/s") == "0.59"
    assert value("t; ours / peer; samples/s spread") == "1.50–1.70"
    assert value("t; ours / peer; calls") == "2"
    rows.append(row("other", "3", 10))
    with pytest.raises(ValueError, match="no call of t has samples/s of 'peer' and 'other'"):
        value("t; peer / other; samples/s")


def test_the_best_peer_is_the_fastest_configuration_of_hf_trainer_in_the_call(rows: list[dict[str, Any]]) -> None:
    rows += [row("HF Trainer", "1", 100, peer="hf_trainer"), row("HF Trainer, graphs", "1", 120, peer="hf_trainer")]
    rows += [row("HF Trainer, failed", "1", peer="hf_trainer"), row("bare loop", "1", 500, peer="bare_loop")]
    recommended = ["peer.apply_recommended=true"]
    rows += [row("ours", "1", 240), row("HF Trainer + ours", "1", 900, peer="hf_trainer", overrides=recommended)]
    assert value("t; best peer; name") == "HF Trainer, graphs"
    assert value("t; ours / best peer; samples/s") == "2.00"
    assert value("t; ours / best peer; peak GiB") == "2.00"
    rows += [row("HF Trainer", "2", 100, peer="hf_trainer"), row("ours", "2", 300)]
    assert value("t; ours / best peer; samples/s") == "2.00", "a call with fewer peers chooses no weaker one"
    assert value("t; ours / best peer; calls") == "1"
    rows += [row("HF Trainer, grouped by length", "2", 200, peer="hf_trainer")]
    assert value("t; ours / best peer; samples/s") == "1.50", "as soon as a later call has as many, it counts"
    assert value("t; best peer; name") == "HF Trainer, grouped by length"
    rows += [row("HF Trainer, grouped by length", "3", 250, peer="hf_trainer"), row("ours", "3", 300)]
    assert value("t; ours / best peer; samples/s") == "1.20", "a later call of the best one alone counts, too"
    assert value("t; ours / best peer; samples/s spread") == "1.20–1.50"


def test_seeds_of_one_call_are_runs_of_a_spread(rows: list[dict[str, Any]]) -> None:
    for seed, accuracy in ((1, 0.8915), (2, 0.8946)):
        rows.append(row("bf16", "1", seed=seed, accuracy={"median": accuracy, "runs": [accuracy]}))
    assert value("t; bf16; accuracy spread") == "0.8915–0.8946"
    assert value("t; bf16; accuracy deviation") == "0.0022", "of a sample: 0.0031 / √2"
    with pytest.raises(ValueError, match="one run has no standard deviation"):
        value("t seed=1; bf16; accuracy deviation")
    assert value("t seed=2; bf16; accuracy") == "0.8946"
    with pytest.raises(ValueError, match="add a key, such as seed=1"):
        value("t; bf16; accuracy")
    with pytest.raises(ValueError, match="add a key, such as seed=1"):
        value("t; bf16 / bf16; accuracy spread")


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("t; ours", "expected TABLE"),
        ("u; ours; samples/s", "table u has no committed rows"),
        ("t batch=9; ours; samples/s", "no row of t has batch=9"),
        ("t; theirs; samples/s", "no call of t has samples/s of 'theirs'; it has ours"),
        ("t; best peer; samples/s", "no call of t has samples/s of 'best peer'; it has ours"),
        ("t; ours; startup.exports_seconds", "no call of t has startup.exports_seconds of 'ours'; it has "),
        ("t; ours; accuracy", "no call of t has accuracy of 'ours'"),
    ],
)
def test_a_value_without_rows_is_one_line(rows: list[dict[str, Any]], expression: str, message: str) -> None:
    rows.append(row("ours", "1", 100))
    with pytest.raises(ValueError, match="value '") as caught:
        render_values(f"Trains <!-- value: {expression} -->100<!-- end --> samples/s.")
    assert str(caught.value).startswith(f"value '{expression}': {message}")
    assert "\n" not in str(caught.value)


def test_sentences_follow_the_rows(rows: list[dict[str, Any]]) -> None:
    rows.append(row("ours", "1", 100))
    calls = "<!-- value: t; ours; calls -->9<!-- end -->"
    text = f"Trains <!-- value: t; ours; samples/s -->99<!-- end --> samples/s, {calls}."
    written = render_values(text)
    assert without_values(text) == without_values(written) == "Trains … samples/s, …."
    assert "-->100<!-- end --> samples/s, <!-- value: t; ours; calls -->1<!-- end -->." in written
    assert render_values(written) == written
    rows.append(row("ours", "2", 200))
    assert "-->200<!-- end -->" in render_values(written)


def test_a_value_that_begins_a_line_or_has_no_end_is_refused(rows: list[dict[str, Any]]) -> None:
    rows.append(row("ours", "1", 100))
    for before in ("Trains\n  ", "- ", "2. "):
        with pytest.raises(ValueError, match="begins a line"):
            render_values(f"{before}<!-- value: t; ours; samples/s -->99<!-- end --> samples/s")
    with pytest.raises(ValueError, match="no <!-- end -->"):
        render_values("Trains <!-- value: t; ours; samples/s -->99 samples/s\nand <!-- end -->")


def test_rendering_stops_with_the_document_and_the_value(
    rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text("Trains <!-- value: t; ours; samples/s -->99<!-- end --> samples/s.")
    monkeypatch.setattr(render, "ROOT", tmp_path)
    monkeypatch.setattr(render, "documents", lambda: [page])
    with pytest.raises(SystemExit, match=r"^page\.md: value 't; ours; samples/s': table t has no committed rows$"):
        render.main([])
