"""Dashboards: every panel names what a real run logs; the command line; nothing is sent."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from composer_speedups.core.errors import ConfigError
from composer_speedups.dashboards import as_text, layout
from composer_speedups.dashboards.__main__ import main, read_request
from composer_speedups.dashboards.layout import Request, Task, columns
from composer_speedups.tasks.metrics import reported_name
from composer_speedups.tasks.task import task_class
from composer_speedups.train.cli import exit_codes
from tests.helpers.wandb_runs import WandbRun, missing_in

SECTIONS = ["Speed", "Loss and scores", "Memory", "Start-up time of each run"]


def test_every_panel_names_a_logged_metric(wandb_run: WandbRun) -> None:
    """test_every_task.py and test_yamls.py look at the runs of all tasks."""
    assert missing_in(wandb_run, "classification") == set()
    assert missing_in(wandb_run, "regression") == {
        "metrics/eval/SpearmanCorrCoef",
        "metrics/eval/MeanSquaredError",
        "metrics/eval/PearsonCorrCoef",
        "summary/spearman",
    }


def test_the_workspace_as_wandb_stores_it_names_only_what_the_run_logged(wandb_run: WandbRun) -> None:
    from composer_speedups.dashboards.build import build_workspace

    request = Request(runs=[wandb_run.name], group_by=["techniques", "data.batch_size"])
    spec: Any = build_workspace(layout(), request, "team", "bert")._to_model().spec.section
    for section in spec.panel_bank_config.sections:
        for panel in (panel.model_dump(by_alias=True)["config"] for panel in section.panels):
            logged = wandb_run.history if panel.get("xAxis") else wandb_run.summary
            assert set(panel["metrics"]) <= set(logged)
            assert panel.get("xAxis") in {None, *wandb_run.history}
    (runs,) = spec.run_sets
    (only,) = runs.model_dump()["filters"]["filters"]
    assert (only["key"]["name"], only["value"]) == ("displayName", ["quickstart"])
    for key in runs.grouping:
        first, value, *rest = key.name.split(".")
        assert value == "value"
        logged_value: Any = wandb_run.config[first]
        for name in rest:
            logged_value = logged_value[name]
        assert logged_value == {"techniques": "unpadding + fused_optimizer", "data": 8}[first]
    shown = [column.partition(":") for column in runs.run_feed.column_order if column.startswith("summary:summary/")]
    assert {name for _, _, name in shown} == set(columns()) <= set(wandb_run.summary)


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
    from composer_speedups.dashboards.build import build_workspace

    workspace = build_workspace(layout(), Request(runs=["fp32", "bf16"]), "team", "bert")
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
    assert [(key.section, key.name) for key in runs.grouping] == [("config", "techniques.value")]
    (only,) = runs.model_dump()["filters"]["filters"]
    assert (only["key"]["name"], only["op"], only["value"]) == ("displayName", "IN", ["fp32", "bf16"])
    assert runs.run_feed.column_order[1:3] == ["config:techniques.value", "summary:summary/samples_per_sec"]
    every: Any = build_workspace(layout(), Request(group_by=[]), "team", "bert")._to_model().spec.section.run_sets[0]
    assert every.grouping == every.model_dump()["filters"]["filters"] == []
    assert every.run_feed.column_order[1] == "summary:summary/samples_per_sec"


def test_a_report_holds_a_grid_of_panels_for_each_section() -> None:
    import wandb_workspaces.reports.v2 as reports

    from composer_speedups.dashboards.build import build_report

    report = build_report(layout(), Request(runs=["fp32"]), "team", "bert")
    assert (report.title, report.entity, report.project) == ("Runs side by side", "team", "bert")
    headings = [block.text for block in report.blocks if isinstance(block, reports.H2)]
    grids = [block for block in report.blocks if isinstance(block, reports.PanelGrid)]
    assert headings == SECTIONS
    for grid, section in zip(grids, layout(), strict=True):
        assert [panel.title for panel in grid.panels] == [c.title for c in section.charts]
        shown = [panel.y if isinstance(panel, reports.LinePlot) else panel.metrics for panel in grid.panels]
        assert shown == [list(c.metrics) for c in section.charts]
        places = [(panel.layout.x, panel.layout.y) for panel in grid.panels]
        assert len(set(places)) == len(places), "panels lie over each other"
        (runset,) = grid.runsets
        assert runset.groupby == ["config.techniques"]
        assert "fp32" in str(runset.filters)


def test_a_dry_run_prints_the_layout(capsys: pytest.CaptureFixture[str]) -> None:
    main(["bert", "runs=fp32,bf16", "dry_run=true"])
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == "workspace 'Runs side by side' of bert: fp32, bf16, grouped by techniques"
    assert as_text(layout()) in printed
    assert "  samples/s: throughput/samples_per_sec (over batches trained)" in printed.splitlines()


@pytest.mark.parametrize("kind", ["workspace", "report"])
def test_the_workspace_is_saved_and_its_address_printed(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    saved: list[Any] = []

    def save(dashboard: Any) -> Any:
        saved.append(dashboard)
        return SimpleNamespace(url="the address")

    monkeypatch.setattr(wandb, "Api", lambda: SimpleNamespace(default_entity="me"))
    cls = workspaces.Workspace if kind == "workspace" else reports.Report
    monkeypatch.setattr(cls, "save", save)
    main(["bert", f"kind={kind}"])
    assert capsys.readouterr().out == "the address\n"
    ((dashboard,), entity) = saved, saved[0].entity
    assert isinstance(dashboard, cls)
    assert (entity, dashboard.project) == ("me", "bert")

    def refuse(dashboard: Any) -> Any:
        raise RuntimeError("project not found")

    monkeypatch.setattr(cls, "save", refuse)
    message = f"entity: W&B did not accept the {kind} for team/bert: project not found"
    with pytest.raises(ConfigError, match=message):
        main(["bert", f"kind={kind}", "entity=team"])


def test_arguments_become_a_request() -> None:
    assert read_request(["bert"]) == ("bert", Request())
    given = ["entity=team", "bert", "runs=a,b", "kind=report", "name=Two configurations", "group_by=", "task=mlm"]
    expected = Request("team", ["a", "b"], "report", "Two configurations", [], "mlm", False)
    assert read_request([*given, "dry_run=false"]) == ("bert", expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "command line: expected PROJECT and then key=value"),
        ("a b", "command line: expected PROJECT and then key=value"),
        ("team/bert", "PROJECT: 'team/bert' contains a slash; write bert entity=team"),
        ("bert rns=a", "command line: unknown key 'rns'; did you mean 'runs'?"),
        ("bert --kind=report", "command line: cannot read '--kind=report'; expected PROJECT or key=value"),
        ("bert kind=page", "command line: kind must be 'workspace' or 'report', not 'page'"),
        ("bert runs=", "runs: names no run; write runs=a,b"),
        ("bert name=a+b", "name: W&B does not accept emoji or signs"),
        (f"bert name={'a' * 129}", "name: must be at most 128 characters, not 129"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_argument(
    arguments: str, message: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os._exit", sys.exit)  # of this process
    with pytest.raises(SystemExit) as exited, exit_codes("dashboards"):
        main(arguments.split())
    assert exited.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"dashboards: {message}")


def test_accepted_names_are_valid_for_wandb() -> None:
    from composer_speedups.dashboards.build import build_workspace

    name = read_request(["bert", "name=Größe: fp32, bf16 (2 Läufe) & mehr"])[1].name
    assert build_workspace(layout(), Request(name=name), "e", "p").name == name
    with pytest.raises(ValueError, match="Emojis"):
        build_workspace(layout(), Request(name="a+b"), "e", "p")


def test_without_the_extra_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[dashboards\]' in a clone"):
        main(["bert"])
