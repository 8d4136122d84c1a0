"""Dashboards: every panel names what a real run logs; the command line; nothing is sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import pytest

from composer_speedups.core.errors import ConfigError
from composer_speedups.dashboards.__main__ import build_workspace, main, read_request
from composer_speedups.dashboards.layout import Request, Task, as_text, columns, layout
from composer_speedups.tasks.metrics import reported_name
from composer_speedups.tasks.task import task_class
from tests.helpers.wandb_runs import WandbRun, missing_in

SECTIONS = ["Speed", "Loss and scores", "Memory", "Start-up time of each run"]


def test_every_panel_names_a_logged_metric(wandb_run: WandbRun) -> None:
    """test_every_task.py and test_yamls.py look at the runs of all tasks."""
    assert missing_in(wandb_run, "classification") == set()
    assert missing_in(wandb_run, "regression") == {
        "metrics/eval/SpearmanCorrCoef",
        "metrics/eval/MeanSquaredError",
        "metrics/eval/PearsonCorrCoef",
        "metrics/eval/RootMeanSquaredError",
        "metrics/eval/MeanAbsoluteError",
        "summary/spearman",
    }


METRICS = {
    "classification": {"labels": ["a", "b"]},
    "multilabel": {"labels": ["a", "b"]},
    "token_classification": {"labels": ["O", "B-PER"]},
    "embedding": {},
    "mlm": {},
    "regression": {},
    "reranking": {},
}


@pytest.mark.filterwarnings("ignore:Metric .* will save all:UserWarning")
@pytest.mark.parametrize("task", get_args(Task))
def test_the_metrics_of_each_task_are_those_that_it_logs(task: Any) -> None:
    kind = task_class(task)
    logged = set(kind(**METRICS[task]).metrics(training=False))
    if task == "embedding":
        logged |= set(kind(label_column="score").metrics(training=False))
    named = {m.removeprefix("metrics/eval/") for section in layout(task) for c in section.charts for m in c.metrics}
    assert {name for name in named if "/" not in name and name != "_runtime"} == logged
    reported = {name: reported_name(name) for name in logged}
    assert all(name != reported[name] for name in logged), "each has a name for reports"
    assert columns(task)[3].removeprefix("summary/") in reported.values()


def test_a_workspace_has_the_sections_and_groups_runs() -> None:
    request = Request(runs=["fp32", "bf16"], group_by=["techniques", "data.batch_size"])
    workspace = build_workspace(layout(), request, "team", "bert")
    spec: Any = workspace._to_model().spec.section
    assert [s.name for s in spec.panel_bank_config.sections] == SECTIONS
    for section, wanted in zip(spec.panel_bank_config.sections, layout(), strict=True):
        panels = [p.model_dump(by_alias=True) for p in section.panels]
        assert section.is_open
        assert [p["config"]["metrics"] for p in panels] == [list(c.metrics) for c in wanted.charts]
        assert [p["config"].get("xAxis") for p in panels] == [c.over for c in wanted.charts]
        kinds = {True: "Bar Chart", False: "Run History Line Plot"}
        assert [p["viewType"] for p in panels] == [kinds[c.over is None] for c in wanted.charts]
    (runs,) = spec.run_sets
    grouping = [("config", "techniques.value"), ("config", "data.value.batch_size")]
    assert [(key.section, key.name) for key in runs.grouping] == grouping
    (only,) = runs.model_dump()["filters"]["filters"]
    assert (only["key"]["name"], only["op"], only["value"]) == ("displayName", "IN", ["fp32", "bf16"])
    shown = [column.partition(":") for column in runs.run_feed.column_order if column.startswith("summary:summary/")]
    assert {name for _, _, name in shown} == set(columns())
    every: Any = build_workspace(layout(), Request(group_by=[]), "team", "bert")._to_model().spec.section.run_sets[0]
    assert every.grouping == every.model_dump()["filters"]["filters"] == []
    assert every.run_feed.column_order[1] == "summary:summary/samples_per_sec"


def test_a_dry_run_prints_the_layout(capsys: pytest.CaptureFixture[str]) -> None:
    main(["bert", "runs=fp32,bf16", "dry_run=true"])
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == "'Runs side by side' of bert: fp32, bf16, grouped by techniques"
    assert as_text(layout()) in printed
    assert "  samples/s: throughput/samples_per_sec (over batches trained)" in printed.splitlines()


def test_the_workspace_is_saved_and_its_address_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb
    import wandb_workspaces.workspaces as workspaces

    saved: list[Any] = []

    def save(dashboard: Any) -> Any:
        saved.append(dashboard)
        return SimpleNamespace(url="the address")

    monkeypatch.setattr(wandb, "Api", lambda: SimpleNamespace(default_entity="me"))
    monkeypatch.setattr(workspaces.Workspace, "save", save)
    main(["bert"])
    assert capsys.readouterr().out == "the address\n"
    assert (saved[0].entity, saved[0].project) == ("me", "bert")
    monkeypatch.setattr(wandb, "Api", lambda: SimpleNamespace(default_entity=None))
    with pytest.raises(ConfigError, match="entity: this account has no default user or team; add entity=NAME"):
        main(["bert"])

    def refuse(dashboard: Any) -> Any:
        raise RuntimeError("project not found")

    monkeypatch.setattr(workspaces.Workspace, "save", refuse)
    with pytest.raises(ConfigError, match="entity: W&B did not accept the workspace for team/bert: project not found"):
        main(["bert", "entity=team"])


def test_arguments_become_a_request() -> None:
    assert read_request(["bert"]) == ("bert", Request())
    given = ["entity=team", "bert", "runs=a,b", "name=Two configurations", "group_by=", "task=mlm"]
    expected = Request("team", ["a", "b"], "Two configurations", [], "mlm", False)
    assert read_request([*given, "dry_run=false"]) == ("bert", expected)
    with pytest.raises(ConfigError, match="runs must not be empty"):
        read_request(["bert", "runs="])


def test_without_the_extra_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[dashboards\]' in a clone"):
        main(["bert"])
