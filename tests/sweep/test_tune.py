"""Tuning as a whole: keys, refusals, the YAML, and one real search on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from composer_speedups.core.command_line import read_settings
from composer_speedups.core.errors import ConfigError
from composer_speedups.sweep.trials import Result, Trial
from composer_speedups.sweep.tune import FIRST_LINE_START, PREFIX, TuneConfig, help_text, output_for, write_tuned
from composer_speedups.train import application
from composer_speedups.train.config.load import load_config
from tests.conftest import ROOT
from tests.helpers.hangs import HANGS
from tests.helpers.searches import search

QUICKSTART = str(ROOT / "yamls" / "quickstart.yaml")
ENVIRONMENT = {"gpu": None, "cpu": "a CPU", "cpu_count": 2, "torch": "2", "commit": "abc"}


def test_tune_keys_are_parsed_and_other_keys_go_to_the_config() -> None:
    original = ["data.batch_size=8", "tune.budget_seconds=40", "tune.allow=[recipe]", "seed=3", "tune.output=a b.yaml"]
    settings, rest = read_settings(TuneConfig, original, PREFIX)
    assert settings == TuneConfig(budget_seconds=40.0, allow=["recipe"], output="a b.yaml")
    assert rest == ["data.batch_size=8", "seed=3"]
    assert all(f"tune.{name}: " in help_text() for name in vars(TuneConfig()))


def test_a_mistake_is_one_line_and_exit_status_2_without_importing_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import composer_speedups.sweep.tune as t; t.command()"
    command = [sys.executable, "-c", code, "-f", QUICKSTART, "data.bach_size=3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANGS)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("tune: command line: unknown key 'data.bach_size'; did you mean 'data.batch_size'")
    assert list(Path().iterdir()) == []


def test_the_output_is_checked_before_anything_is_measured() -> None:
    assert output_for("yamls/x.yaml", None) == Path("x.tuned.yaml")
    Path("mine.yaml").write_text("seed: 1\n")
    for name, message in (("x.txt", "does not end in .yaml"), ("mine.yaml", "was not written by this command")):
        with pytest.raises(ConfigError, match=message):
            output_for(QUICKSTART, name)
    Path("ours.yaml").write_text(f"{FIRST_LINE_START} on some day\n")
    assert output_for(QUICKSTART, "ours.yaml") == Path("ours.yaml")


def test_the_yaml_is_the_original_with_the_fastest_set_and_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAME_OF_RUN", "named")
    Path("original.yaml").write_text(
        "run_name: ${oc.env:NAME_OF_RUN}\nalgorithms: [sdpa_attention]\noptimizer: {lr: 1e-5}\n"
    )
    config = load_config("original.yaml", ["data.batch_size=64", "trainer.max_duration=100ba"])
    original = Trial("original", config.algorithms, step_seconds=0.1, start_seconds=1.0, start_steps=3)
    blocks: Any = {"torch_compile": {"scope": "blocks"}}
    faster = Trial("compiled", blocks, step_seconds=0.05, start_seconds=11.0, start_steps=3, peak_gib=1.5)
    trials = [faster, Trial("lora", {}, "untried", "not allowed")]
    kept = Result(original, 1000, trials, kept_original="no set was faster")
    write_tuned(Path("kept.yaml"), "original.yaml", config, kept, ENVIRONMENT)
    assert load_config("kept.yaml") == config
    assert "# original techniques kept: no set was faster" in Path("kept.yaml").read_text()

    times = {"original": [100.7, 100.7], "fastest": [60.9, 60.9]}
    result = Result(original, 1000, trials, times, 2.0, faster)
    write_tuned(Path("x.yaml"), "original.yaml", config, result, ENVIRONMENT)
    text, tuned = Path("x.yaml").read_text(), load_config("x.yaml")
    assert tuned == config
    assert tuned.algorithms == blocks
    assert "${oc.env:NAME_OF_RUN}" in text
    assert text.startswith(FIRST_LINE_START)
    words = " ".join(text.replace("#", " ").replace("|", " ").split())
    assert "1.65 times as fast with compiled (run in turns: original 100.7, 100.7 s; fastest 60.9, 60.9 s)" in words
    assert "compiled 60.9 s 1.65× 50.0 ms 11.0 s 1.5 GiB original 100.7 s 1.00× 100.0 ms 1.0 s" in words
    assert "Not measured: lora: not allowed" in words
    log = json.loads(Path("x.json").read_text())
    assert log["algorithms"] == log["chosen"]["algorithms"] == blocks
    assert log["trials"][1]["step_seconds"] is None


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_real_search_ends_with_a_yaml_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first trial is a process from the start, the others are forked with their imports done."""
    sets: Any = {"foreach": {"foreach_optimizer": {}}, "early": {"early_loss": {}}, "same": {"fused_optimizer": {}}}
    log = search(monkeypatch, sets, first_in_process=True)
    assert log["planned_steps"] == 400
    assert [trial["status"] for trial in log["trials"]] == ["ok", "refused", "ok"]
    assert log["original"]["step_seconds"] > 0
    tuned = load_config("quickstart.tuned.yaml")
    assert tuned.algorithms == log["algorithms"]
    application.main(["-f", "quickstart.tuned.yaml", "trainer.max_duration=2ba", "trainer.eval_batches=1"])
    report = json.loads(Path("runs/quickstart/report.json").read_text())
    assert all(entry["engaged"] for entry in report["algorithms"].values())
    assert not list(Path("runs").glob("trial*"))
