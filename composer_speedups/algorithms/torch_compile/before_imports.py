"""Start inductor's compile processes during the run's imports."""

from __future__ import annotations

import importlib

from composer_speedups.core.before_imports import PlannedRun


def on_gpu(run: PlannedRun) -> None:
    """Start the processes if the run's backend is inductor."""
    if (run.algorithms["torch_compile"] or {}).get("backend", "inductor") == "inductor":
        importlib.import_module("torch._inductor.async_compile")  # importing it starts them
