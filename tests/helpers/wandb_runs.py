"""What a run gave Weights & Biases, read back from the file of an offline run."""

from __future__ import annotations

import json
import shutil
import warnings
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.jobs import run


@dataclass
class WandbRun:
    history: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    rows: list[dict[str, Any]] = field(default_factory=list)  # of the history
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, str] = field(default_factory=dict)  # metric → what it is drawn over
    group: str = ""
    tags: tuple[str, ...] = ()


def train_offline(*overrides: str) -> WandbRun:
    """The short quickstart, six batches long, with an offline run in the group ``configurations`` and tag ``a``."""
    job = (
        "trainer.max_duration=6ba",
        "loggers.wandb={mode: offline, tags: [a], group: configurations}",
        "algorithms.sdpa_attention=null",
        "algorithms.unpadding={}",
        *overrides,
    )
    import wandb

    wandb.teardown()  # one that an earlier test left
    try:
        run(*job)
    except Exception as error:
        # On a busy machine wandb's writing process once failed to start. A second failure is an error.
        warnings.warn(f"trained again, since wandb did not begin its run: {error!r}", stacklevel=2)
        wandb.teardown()
        shutil.rmtree("runs", ignore_errors=True)
        run(*job)
    wandb.teardown()  # the process that writes the file has then ended
    (file,) = Path("runs/quickstart/wandb").glob("offline-run-*/run-*.wandb")
    return read_wandb(file)


def read_wandb(file: Path) -> WandbRun:
    from wandb.proto import wandb_internal_pb2 as pb
    from wandb.sdk.internal.datastore import DataStore

    store, seen = DataStore(), WandbRun()
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        record = pb.Record()  # type: ignore[attr-defined]
        record.ParseFromString(data)
        if record.HasField("run"):
            seen.group, seen.tags = record.run.run_group, tuple(record.run.tags)
        if record.HasField("metric") and record.metric.name:
            seen.axes[record.metric.name] = record.metric.step_metric
        if row := _items(record.history.item):
            seen.rows.append(row)
        for name, value in row.items():
            seen.history[name].append(value)
        seen.summary |= _items(record.summary.update)
        seen.config |= _items([*record.config.update, *record.run.config.update])
    store.close()
    return seen


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
