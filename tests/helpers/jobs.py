"""Short runs of train.py in this process, and a payload for attacks on the files that they read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from composer_speedups.train import application
from composer_speedups.train.cli import exit_codes
from tests.conftest import ROOT
from tests.helpers.forks import Fork

# The quickstart, cut down to seconds, on padded batches as most tests of one technique want them.
SHORT = [
    "baseline=null",
    "algorithms.unpadding=null",
    "algorithms.lean_dispatch=null",
    "algorithms.sdpa_attention={}",
    "data.length_scale=0.12",
    "data.max_length=48",
    "data.train_samples=48",
    "data.eval_samples=16",
    "data.batch_size=8",
    "data.eval_batch_size=8",
    "data.vocab_size=400",
    "trainer.progress_bar=false",
    "plot=false",
    "scheduler.warmup=1ba",
]


def run(*overrides: str, yaml: str = "quickstart", short: bool = True) -> dict[str, Any]:
    """Run a YAML of the repository with overrides; its report.json, from the folder ``runs``."""
    arguments = ["-f", str(ROOT / "yamls" / f"{yaml}.yaml"), *(SHORT if short else []), *overrides]
    application.main(arguments)
    name = next((o.split("=")[1] for o in reversed(overrides) if o.startswith("run_name=")), yaml.replace("/", "_"))
    return json.loads((Path("runs") / name / "report.json").read_text())


def fork_train(*overrides: str, prepare: Callable[[], None] = lambda: None) -> Fork:
    """Start train.py on the shortened quickstart, after ``prepare``, in a process that has imported everything."""

    def job() -> None:
        prepare()
        with exit_codes():
            application.main(["-f", str(ROOT / "yamls" / "quickstart.yaml"), *SHORT, *overrides])

    return Fork(job)


_ON_FILES = """
data.source=files data.train_file=train.jsonl data.eval_file=eval.jsonl data.train_samples=null data.eval_samples=null
data.vocab_size=300 data.batch_size=8 data.eval_batch_size=4 algorithms=null algorithms.unpadding={}
algorithms.fused_layers={} algorithms.fused_optimizer={} trainer.max_duration=1ep scheduler.warmup=1ba
baseline.batches=10 trainer.progress_bar=false plot=false
""".split()


def run_on_files(task: str, max_length: int, *overrides: str) -> dict[str, Any]:
    """Train and evaluate a task for an epoch of ``train.jsonl`` and ``eval.jsonl`` with the fast set and a baseline."""
    return run(f"model.task={task}", f"data.max_length={max_length}", *_ON_FILES, *overrides, short=False)


def assert_resumes_exactly(
    *settings: str, checkpoints: Sequence[str], train: Callable[..., dict[str, Any]] = run
) -> dict[str, Any]:
    """Train without interruption, then again from each checkpoint, such as ``ep0-ba2``, to the same end; the report of
    the first run, called ``whole``."""
    whole = train(*settings, "checkpoint.keep=-1", "run_name=whole")
    for checkpoint in checkpoints:
        load = f"checkpoint.load=runs/whole/checkpoints/{checkpoint}-rank0.pt"
        part = train(*settings, "run_name=part", load, "checkpoint.trust_checkpoint=true")
        assert part["metrics"] == whole["metrics"]
        weights = (load_file(f"runs/{name}/model/model.safetensors") for name in ("part", "whole"))
        torch.testing.assert_close(*weights, rtol=0, atol=0)
    return whole


MARKER = Path("ran")  # the folder that an attack creates


class Payload:
    """Unpickling an instance creates the marker."""

    def __reduce__(self) -> Any:
        return os.mkdir, (str(MARKER),)
