"""Tuning as a whole: keys, refusals, the YAML, and one real search on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from composer_speedups.core.command_line import read_settings
from composer_speedups.core.errors import ConfigError
from composer_speedups.train import application
from composer_speedups.train.config.load import load_config
from composer_speedups.train.config.schema import Config
from composer_speedups.tune.candidates import Candidate
from composer_speedups.tune.results import Outcome, Result, Trial, Verdict
from composer_speedups.tune.settings import FIRST_LINE_START, PREFIX, TuneConfig, help_text, output_for
from composer_speedups.tune.write import write_tuned
from tests.conftest import ROOT
from tests.helpers.hangs import HANGS
from tests.helpers.searches import search

QUICKSTART = str(ROOT / "yamls" / "quickstart.yaml")
ENVIRONMENT = {
    "gpu": None, "cpu": "a CPU", "cpu_count": 2, "torch": "2", "composer": "0", "transformers": "5", "commit": "abc"
}  # fmt: skip


def test_tune_keys_are_parsed_and_other_keys_go_to_the_config() -> None:
    original = ["data.batch_size=8", "tune.budget_seconds=40", "tune.allow=[recipe]", "seed=3", "tune.output=a b.yaml"]
    settings, rest = read_settings(TuneConfig, original, PREFIX)
    assert settings == TuneConfig(budget_seconds=40.0, allow=["recipe"], output="a b.yaml")
    assert rest == ["data.batch_size=8", "seed=3"]
    both = read_settings(TuneConfig, ["tune.allow=lower_precision,recipe"], PREFIX)[0].allow
    assert both == ["lower_precision", "recipe"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tune.budget=3", "unknown key 'tune.budget'; did you mean 'tune.budget_seconds'"),
        ("tune.steps=2", "tune.steps must be 5 to 100000, not 2"),
        (
            "tune.allow=[recipes]",
            r"tune.allow must be a list of 'lower_precision' or 'recipe' or null, not \['recipes'\]",
        ),
    ],
)
def test_a_bad_tune_key_is_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_settings(TuneConfig, [override], PREFIX)
    assert "\n" not in str(caught.value)


def test_a_mistake_is_one_line_and_exit_status_2() -> None:
    command = [sys.executable, "-m", "composer_speedups.tune", "-f", QUICKSTART, "data.bach_size=3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANGS, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("tune: command line: unknown key 'data.bach_size'; did you mean 'data.batch_size'")
    assert list(Path().iterdir()) == []


def test_help_lists_every_key() -> None:
    text = help_text()
    for name, default in vars(TuneConfig()).items():
        assert f"tune.{name}: " in text
        assert str("null" if default is None else default) in text


def test_the_output_is_checked_before_anything_is_measured() -> None:
    assert output_for("yamls/x.yaml", None) == Path("x.tuned.yaml")
    Path("mine.yaml").write_text("seed: 1\n")
    for name, message in [
        ("x.txt", "does not end in .yaml"),
        ("no/x.yaml", r"no folder no \(relative to /"),
        ("mine.yaml", "was not written by this command"),
        (f"{'long' * 99}.yaml", r"cannot be written \(File name too long\); choose another"),
        (QUICKSTART, "is the original YAML"),
    ]:
        with pytest.raises(ConfigError, match=message):
            output_for(QUICKSTART, name)
    Path("ours.yaml").write_text(f"{FIRST_LINE_START} on some day\n")
    assert output_for(QUICKSTART, "ours.yaml") == Path("ours.yaml")


def result(**changes: Any) -> Result:
    original, faster = Outcome("ok", "", 0.1, 1.0, 3), Outcome("ok", "", 0.05, 11.0, 3)
    compiled = Candidate("torch_compile (scope: blocks)", {"torch_compile": {"scope": "blocks"}}, kind="rounding")
    verdicts = [
        Verdict(compiled, "measured", "", faster, 60.86, (100.7, 60.86)),
        Verdict(Candidate("tf32_matmul", {"tf32_matmul": {}}), "refused", "tf32_matmul: it needs a GPU"),
        Verdict(Candidate("lora", {"lora": {}}), "untried", "not allowed"),
        Verdict(Candidate("adafactor", {"adafactor": {}}), "untried", "not allowed"),
    ]
    return Result(
        **{
            "original": {"sdpa_attention": {}}, "planned_steps": 1000, "trial_steps": 20, "baseline": [original],
            "base_seconds": 100.7, "noise": 2.0, "verdicts": verdicts, "pairs": [(100.7, 60.0), (100.9, 61.0)],
            "chosen": {"sdpa_attention": {}, "torch_compile": {"scope": "blocks"}},
            "never": {"empty_cache": "no speed"}, "sizes": {64: faster, 128: Outcome("memory", "ran out of memory")},
            "trials": [Trial("original", {}, 20, None, original, 99.7), Trial("x", {}, 20, None, Outcome("failed"), 0)],
            **changes,
        }
    )  # fmt: skip


def test_the_yaml_is_the_original_with_the_chosen_techniques_and_the_reasons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NAME_OF_RUN", "named")
    Path("original.yaml").write_text(
        "run_name: ${oc.env:NAME_OF_RUN}\nalgorithms: [sdpa_attention]\noptimizer: {lr: 1e-5}\n"
    )
    overrides = ["data.batch_size=64", "algorithms.lora=null", "trainer.max_duration=100ba"]
    write_tuned(Path("x.yaml"), "original.yaml", overrides, result(), ENVIRONMENT, 300.0)
    text = Path("x.yaml").read_text()
    tuned, original = load_config("x.yaml"), load_config("original.yaml", overrides)
    assert tuned.algorithms == {"sdpa_attention": {}, "torch_compile": {"scope": "blocks"}}
    original.algorithms = tuned.algorithms
    assert tuned == original
    assert "${oc.env:NAME_OF_RUN}" in text
    assert text.startswith(FIRST_LINE_START)
    said = " ".join(text.replace("#", " ").split())
    for words in (
        "1.67 times as fast",
        "alone 1.65 times as fast, 60.9 s (start +10.0 s, step 100.0 → 50.0 ms: pays off from step 203)",
        "in the original YAML",
        "- tf32_matmul: it needs a GPU",
        "- lora, adafactor: not allowed",
        "- empty_cache: not tried: no speed",
        "- 128: ran out of memory",
    ):
        assert words in said
    assert max(map(len, text.splitlines())) <= 120
    log = json.loads(Path("x.json").read_text())
    assert log["chosen"] == tuned.algorithms
    assert [t["outcome"]["status"] for t in log["trials"]] == ["ok", "failed"]
    assert log["trials"][1]["outcome"]["step_seconds"] is None
    assert sorted(p.name for p in Path().iterdir()) == ["original.yaml", "x.json", "x.yaml"]


def test_the_yaml_names_original_techniques_as_kept_or_removed() -> None:
    Path("original.yaml").write_text("algorithms: {sdpa_attention: {}}\n")
    chosen: dict[str, Any] = {"sdpa_attention": {}}
    kept = result(chosen=chosen, kept_original="nothing was faster", unengaged={"tf32_matmul": "no GPU"})
    write_tuned(Path("x.yaml"), "original.yaml", [], kept, ENVIRONMENT, 300.0)
    text = Path("x.yaml").read_text()
    assert load_config("x.yaml") == load_config("original.yaml")
    assert "The original techniques were kept: nothing was faster." in text
    assert "- tf32_matmul: in the original YAML, but cannot engage here: no GPU" in text
    assert kept.speedup is None
    without = Candidate("without sdpa_attention", removes=("sdpa_attention",))
    verdict = Verdict(without, "measured", "", Outcome("ok", "", 0.09, 1.0, 3), 90.7)
    write_tuned(Path("x.yaml"), "original.yaml", [], result(chosen={}, verdicts=[verdict]), ENVIRONMENT, 300.0)
    assert load_config("x.yaml") == Config()
    assert "- sdpa_attention: in the original YAML, which takes 90.7 s without it" in Path("x.yaml").read_text()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_real_search_ends_with_a_yaml_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first trial is a process from the start, the others are forked with their imports done."""
    log, trained = search(
        monkeypatch, ["early_loss", "foreach_optimizer"], "algorithms.fused_optimizer=null", first_in_process=True
    )
    assert log["planned_steps"] == 400
    assert trained == len(log["trials"]) >= 4, "two of the original run, and each candidate that can engage"
    assert all(outcome["step_seconds"] > 0 for outcome in log["baseline"])
    tuned = load_config("quickstart.tuned.yaml")
    assert tuned.algorithms == log["chosen"]
    states = {v["candidate"]["label"]: v["state"] for v in log["verdicts"]}
    assert (states["early_loss"], states["foreach_optimizer"]) == ("refused", "measured")
    application.main(["-f", "quickstart.tuned.yaml", "trainer.max_duration=2ba", "trainer.eval_batches=1"])
    report = json.loads(Path("runs/quickstart/report.json").read_text())
    assert all(entry["engaged"] for entry in report["algorithms"].values())
    assert not list(Path("runs").glob("trial*"))
