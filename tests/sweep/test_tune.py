"""tune: its keys, the sets, one trial, the search over made-up trials, and the YAML."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from composer_speedups.core.command_line import read_settings
from composer_speedups.core.engaging import refuse_conflicts
from composer_speedups.core.errors import ConfigError, RunFailedError
from composer_speedups.core.registry import build_techniques, technique_class
from composer_speedups.core.run import Run
from composer_speedups.recommendation import RECOMMENDED
from composer_speedups.sweep import trials
from composer_speedups.sweep.processes import Ended
from composer_speedups.sweep.sets import SETS, Changes, combined, forbidden
from composer_speedups.sweep.trials import OriginalRun, Result, Trial, search, trial_config, trial_of
from composer_speedups.sweep.tune import FIRST_LINE_START, PREFIX, TuneConfig, help_text, output_for, write_tuned
from composer_speedups.train.config.load import load_config
from composer_speedups.train.config.schema import Config, TrainerConfig
from tests.conftest import ROOT
from tests.helpers.hangs import HANGS

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
    with pytest.raises(ConfigError, match=r"tune\.output: ours\.yaml is FILE itself; choose another name"):
        output_for("ours.yaml", "ours.yaml")


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

    times = {"original": [100.7, 100.7], "fastest": [62.9, 61.9]}
    result = Result(original, 1000, trials, times, 2.0, faster, 1.65)
    write_tuned(Path("x.yaml"), "original.yaml", config, result, ENVIRONMENT)
    text, tuned = Path("x.yaml").read_text(), load_config("x.yaml")
    assert tuned == config
    assert tuned.algorithms == blocks
    assert "${oc.env:NAME_OF_RUN}" in text
    assert text.startswith(FIRST_LINE_START)
    words = " ".join(text.replace("#", " ").replace("|", " ").split())
    assert "1.65 times as fast with compiled (run in turns: original 100.7, 100.7 s; fastest 62.9, 61.9 s)" in words
    assert "compiled 61.9 s (60.9–62.9) 1.63× 50.0 ms 11.0 s 1.5 GiB" in words
    assert "original 100.7 s (100.7–100.7) 1.00× 100.0 ms 1.0 s" in words
    assert "Not measured: lora: not allowed" in words
    log = json.loads(Path("x.json").read_text())
    assert log["algorithms"] == log["chosen"]["algorithms"] == blocks
    assert log["trials"][1]["step_seconds"] is None


SDPA, FUSED, COMPILE, LORA = "sdpa_attention", "fused_optimizer", "torch_compile", "lora"
FACTORS = {SDPA: 0.8, FUSED: 0.9, COMPILE: 0.5, LORA: 0.1}
KINDS = {LORA: "recipe"}


@dataclass
class World:
    """Steps of 0.1 s times the techniques' factors; compiling takes 20 s; a trial takes 10 seconds of the budget."""

    jitter: Callable[[int], float] = lambda trial: 1.0
    change: Callable[[int], dict[str, Any]] = lambda number: {}
    steps: int = 100
    refused: dict[str, str] = field(default_factory=dict)
    config: Config = field(default_factory=Config)
    sets: list[str] = field(default_factory=list)

    def measure(self, label: str, algorithms: Any, steps: int, timeout: float | None = None) -> Trial:
        self.sets.append("+".join(algorithms))
        step = 0.1 * self.jitter(len(self.sets))
        for name in algorithms:
            step *= FACTORS[name]
        start = 21.0 if COMPILE in algorithms else 1.0
        trial = Trial(label, algorithms, "ok", "", step, start, 3, 40 / step, 1.0, 400.0)
        return dataclasses.replace(trial, **self.change(len(self.sets)))

    def refusal(self, algorithms: Any) -> str | None:
        return next((self.refused[name] for name in algorithms if name in self.refused), None)

    def planned_steps(self, trial: Trial) -> int:
        return self.steps

    def search(self, *sets: str, **settings: Any) -> Result:
        """Try sets of techniques, whose names are joined by ``+``."""
        table: dict[Any, Any] = {}
        for label in sets:
            kind = next((KINDS[name] for name in label.split("+") if name in KINDS), "rounding")
            table.setdefault(kind, {})[label] = {name: {} for name in label.split("+")}
        run: Any = self
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trials.time, "monotonic", lambda: 10.0 * len(self.sets))
            return search(run, table, TuneConfig(**settings))


def label(result: Result) -> str | None:
    return None if result.chosen is None else result.chosen.label


def test_the_fastest_set_is_run_again_in_turns_with_the_original() -> None:
    world = World()
    result = world.search(FUSED, f"{FUSED}+{SDPA}", SDPA)
    assert label(result) == f"{FUSED}+{SDPA}"
    assert result.kept_original == ""
    assert result.speedup == pytest.approx(10.7 / (1 + 97 * 0.072))
    assert world.sets == ["", FUSED, f"{FUSED}+{SDPA}", SDPA, *["", f"{FUSED}+{SDPA}"] * 2]


def test_compiling_is_chosen_only_for_runs_that_are_long_enough() -> None:
    short = World(steps=100).search(COMPILE)
    assert (label(short), short.kept_original) == (None, "no set was faster")
    assert label(World(steps=1000).search(COMPILE)) == COMPILE


@pytest.mark.parametrize(
    ("jitter", "chosen"),
    [
        # Trials: 1 the original, 2 the set, and then the original and the set in turns.
        ({}, True),
        ({1: 1.3}, False),  # the original's times differ by more than the set saves
        ({3: 1.3}, False),
        ({4: 0.7}, False),  # the set's do
        ({2: 0.3, 4: 1.1, 6: 1.1}, False),  # the set's only trial was lucky
        ({4: 0.98}, True),
    ],
)
def test_a_set_must_be_faster_by_more_than_the_spread_of_either(jitter: dict[int, float], chosen: bool) -> None:
    result = World(jitter=lambda trial: jitter.get(trial, 1.0)).search(FUSED)
    assert len(result.again["fastest"]) == 2
    assert (label(result) == FUSED) == chosen
    assert chosen or "not faster by more than the noise" in result.kept_original


@pytest.mark.parametrize(
    ("number", "kept"),
    [
        (2, "no set could be tried"),
        (3, "original failed when it was run again: why"),
        (6, "fused_optimizer failed when it was run again: why"),
    ],
)
def test_a_trial_that_fails_is_reported(number: int, kept: str) -> None:
    failing = {"status": "out of memory", "reason": "why"}
    result = World(change=lambda count: failing if count == number else {}).search(FUSED)
    assert (label(result), result.kept_original) == (None, kept)


def test_an_original_run_that_fails_is_an_error() -> None:
    with pytest.raises(RunFailedError, match="the original run fails: why; train"):
        World(change=lambda _: {"status": "out of memory", "reason": "why"}).search(FUSED)
    with pytest.raises(ConfigError, match=r"^data\.train_file: none$"):  # exit status 2
        World(change=lambda _: {"status": "refused", "reason": "data.train_file: none"}).search(FUSED)


def test_a_failed_trial_is_printed_and_the_message_of_a_refused_original_is_left_to_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = OriginalRun(Config(), CPU)
    for status, printed in ((1, "original: ValueError: no\n"), (2, "")):
        ended = Ended(status, "ValueError: no\n" if printed else "train.py: no\n", 1.0)
        monkeypatch.setattr(trials, "Process", lambda job, ended=ended: SimpleNamespace(wait=lambda timeout: ended))
        assert run.measure("original", {}, 12).status == ("failed" if printed else "refused")
        assert capsys.readouterr().out == printed
    assert run.measure("a set", {}, 12).status == "refused"
    assert capsys.readouterr().out == "a set: no\n"


def test_sets_that_are_refused_forbidden_equal_or_late_cost_no_trial() -> None:
    world = World(refused={SDPA: "it needs a GPU"}, config=Config(algorithms={FUSED: {}}))
    result = world.search(SDPA, LORA, FUSED)
    assert set(world.sets) == {FUSED}, "the original's"
    assert [(t.status, t.reason) for t in result.trials] == [
        ("refused", "it needs a GPU"),
        ("untried", "the same techniques as the original YAML"),
        ("untried", "changes the training recipe, which is not allowed; tune.allow=[recipe] allows it"),
    ]
    assert result.kept_original == "no set could be tried"
    assert label(World().search(LORA, allow=["recipe"])) == LORA
    with_lora = World(config=Config(algorithms={LORA: {}})).search(FUSED)
    assert with_lora.chosen.algorithms == {LORA: {}, FUSED: {}}, "the recipe stays"
    late = World().search(FUSED, SDPA, budget_seconds=15)
    assert [trial.status for trial in late.trials] == ["ok", "untried"]
    assert "increase tune.budget_seconds" in late.trials[1].reason


CPU = Run(torch.device("cpu"))


def test_a_trial_is_the_original_run_shortened() -> None:
    own = ["checkpoint.interval=1ep", "loggers.file={}", "callbacks.throughput=null", "on_unavailable=warn"]
    config = load_config(ROOT / "yamls" / "quickstart.yaml", [*own, "trainer.microbatch_tokens=512"])
    trial = trial_config(config, {"lora": {}}, 12, Path("folder"))
    assert (trial.model, trial.optimizer) == (config.model, config.optimizer)
    assert trial.data.batch_size == trial.data.eval_batch_size == 32
    assert (trial.trainer.max_duration, trial.trainer.eval_batches) == ("12ba", 1)
    assert (trial.trainer.microbatch_tokens, trial.trainer.on_out_of_memory) == (512, "stop")
    assert (trial.algorithms, trial.on_unavailable) == ({"lora": {}}, "stop")
    assert trial_config(config, config.algorithms, 12, Path("folder")).on_unavailable == "warn"
    assert trial.checkpoint.interval is trial.loggers.file is trial.baseline is None
    assert trial.callbacks.throughput is not None
    assert trial.export is trial.plot is False


def test_the_length_of_the_planned_run_is_counted_in_steps() -> None:
    run = OriginalRun(Config(), CPU)
    run.config.data.batch_size, run.batches_per_epoch = 40, 25
    for duration, steps in {"2ep": 50, "7ba": 7, "81sp": 3, "80sp": 2, "5500tok": 6}.items():
        run.config.trainer.max_duration = duration
        assert run.planned_steps(Trial("", tokens_per_step=1000.0)) == steps
    trial = Trial("", step_seconds=0.5, start_seconds=4.0, start_steps=3)
    assert [trial.planned_seconds(steps) for steps in (103, 2)] == [54.0, 4.0]
    assert Trial("", status="failed").planned_seconds(2) == float("inf")
    run.config.trainer.max_duration = "6ep"
    measured = Trial("", step_seconds=2.0, samples_per_sec=1234.5, peak_gib=3.44)
    assert run.outcome(measured) == "1,234 samples/s, about 5 minutes and 3.4 GiB"
    slow = dataclasses.replace(measured, samples_per_sec=2.694)
    assert run.outcome(slow).startswith("2.69 samples/s, ")
    assert run.outcome(Trial("", status="failed", reason="why")) == "why"


def test_a_set_that_train_py_would_refuse_has_its_reason() -> None:
    config = Config()
    run = OriginalRun(config, CPU)
    assert "needs a CUDA GPU" in (run.refusal({"tf32_matmul": {}}) or "")
    assert "nothing packs them" in (run.refusal({"fused_layers": {}}) or "")
    assert run.refusal({"fused_layers": {}, "unpadding": {}}) is None
    config.trainer.precision = "amp_bf16"
    assert "both set the precision" in (run.refusal({"mixed_precision": {}}) or "")


def test_a_report_becomes_a_trial() -> None:
    report: dict[str, Any] = {
        "throughput": {
            "steady_batches": 5, "other_batches": 3, "step_seconds": 0.2, "data_seconds": 0.05,
            "warmup_seconds": 2.0, "samples_per_sec": 40.0,
        },
        "startup": {"trainer_seconds": 1.5, "imports_seconds": 9.0},
        "memory": {"peak_gib": 1.25},
        "training": {"batches": 8, "tokens": 800},
    }  # fmt: skip
    Path("report.json").write_text(json.dumps(report))
    trial = trial_of("x", {"lora": {}}, Ended(0, "", 20.0), Path())
    assert trial == Trial("x", {"lora": {}}, "ok", "", 0.25, 3.5, 3, 40.0, 1.25, 100.0)
    report["throughput"]["steady_batches"] = 0
    Path("report.json").write_text(json.dumps(report))
    assert "steady state" in trial_of("x", {}, Ended(0, "", 20.0), Path()).reason


@pytest.mark.parametrize(
    ("status", "output", "expected", "reason"),
    [
        (2, "Warning\ntrain.py: lora: no; add it\n", "refused", "lora: no; add it"),
        (2, "train.py: no 'text'\ntrain.py: no 'label'\n", "refused", "no 'text' | no 'label'"),
        (1, "Traceback\ntorch.OutOfMemoryError: CUDA out of memory.\n", "out of memory", "CUDA out of memory"),
        (-9, "", "out of memory", "status -9"),
        (1, "RuntimeError: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)", "out of memory", "CUBLAS"),
        (1, "Traceback\nKeyError: 'x'\n\n", "failed", "KeyError: 'x'"),
        (None, "Traceback", "time", "tune.budget_seconds was used up while it ran; increase it"),
    ],
)
def test_a_failed_trial_has_a_one_line_reason(status: int | None, output: str, expected: str, reason: str) -> None:
    trial = trial_of("x", {}, Ended(status, output, 1.0), Path("none"))
    assert trial.status == expected
    assert reason in trial.reason


EVERY = [
    pytest.param(device, changes, techniques, id=f"{device}: {label}")
    for device, by_changes in SETS.items()
    for changes, labelled in by_changes.items()
    for label, techniques in labelled.items()
]


@pytest.mark.parametrize(("device", "changes", "techniques"), EVERY)
def test_every_set_is_valid_and_changes_what_the_table_says(device: str, changes: Changes, techniques: Any) -> None:
    refuse_conflicts(build_techniques(techniques))
    kinds = {technique_class(name).effect_with(settings, device) for name, settings in techniques.items()}
    order = ("exact", "rounding", "lower_precision", "recipe")
    assert max(kinds, key=order.index) == changes
    assert sum(param.values[2] == techniques and param.values[0] == device for param in EVERY) == 1


def test_the_recipe_stays_and_the_sets_techniques_that_conflict_with_it_are_left_out() -> None:
    def whole(algorithms: Any, precision: Any = "fp32") -> dict[str, Any]:
        return combined(Config(algorithms=algorithms, trainer=TrainerConfig(precision=precision)), RECOMMENDED)

    assert whole({"torch_compile": {}, "sdpa_attention": {}}) == RECOMMENDED
    assert whole({"lora": {"rank": 2}}) == {"lora": {"rank": 2}, **RECOMMENDED}
    factored = {name: settings for name, settings in RECOMMENDED.items() if name != "fused_optimizer"}
    assert whole({"adafactor": {}, "fused_optimizer": {}}) == {"adafactor": {}, **factored}
    assert "fused_layers" not in whole({"sparse_upcycling": {}})
    assert "mixed_precision" not in whole({}, "amp_bf16")


def test_only_permitted_changes_are_tried() -> None:
    assert forbidden("rounding", ()) is forbidden("lower_precision", ("lower_precision",)) is None
    assert "tune.allow=[lower_precision] allows it" in (forbidden("lower_precision", ()) or "")
    assert "tune.allow=[lower_precision, recipe]" in (forbidden("recipe", ("lower_precision",)) or "")
