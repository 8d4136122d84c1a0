"""Offline runs of Weights & Biases, read from their files, and the keys that dashboards expect in them."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from composer_speedups.dashboards.layout import Request, columns, layout
from tests.helpers.jobs import run


@dataclass
class WandbRun:
    history: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    rows: list[dict[str, Any]] = field(default_factory=list)  # of the history
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    name: str = ""  # dashboards select runs by it
    group: str = ""
    tags: tuple[str, ...] = ()


def train_offline() -> WandbRun:
    """Train six batches of the short quickstart, logged offline in the group ``configurations`` with the tag ``a``."""
    job = ["trainer.max_duration=6ba", "algorithms.sdpa_attention=null", "algorithms.unpadding={}"]
    job.append("loggers.wandb={mode: offline, tags: [a], group: configurations}")
    import wandb

    wandb.teardown()  # of an earlier test
    run(*job)
    return read_wandb(Path("runs/quickstart"))


def read_wandb(folder: Path) -> WandbRun:
    """Read the only run below ``folder``, whose Trainer is closed."""
    import wandb
    from wandb.proto import wandb_internal_pb2 as pb
    from wandb.sdk.internal.datastore import DataStore

    wandb.teardown()  # waits for the process that writes the file, which finish() does not
    (file,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    store, seen = DataStore(), WandbRun()
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        record = pb.Record()  # type: ignore[attr-defined]
        record.ParseFromString(data)
        if record.HasField("run"):
            seen.name, seen.group = record.run.display_name, record.run.run_group
            seen.tags = tuple(record.run.tags)
        if row := _items(record.history.item):
            seen.rows.append(row)
        for name, value in row.items():
            seen.history[name].append(value)
        seen.summary |= _items(record.summary.update)
        seen.config |= _items([*record.config.update, *record.run.config.update])
    store.close()
    return seen


def missing_in(run: WandbRun, task: Any) -> set[str]:
    """Return the keys that a task's dashboard reads and the run did not log."""
    charts = [chart for section in layout(task) for chart in section.charts]
    missing = {key for key in Request().group_by if key not in run.config}
    missing |= {key for key in columns(task) if key not in run.summary}
    for chart in charts:
        if chart.over is None:
            missing |= set(chart.metrics) - run.summary.keys()
        else:
            drawn = [row.keys() for row in run.rows if chart.over in row]
            missing |= {key for key in chart.metrics if not any(key in row for row in drawn)}
    return missing if torch.cuda.is_available() else missing - {"memory/activations_gib"}


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
