"""Start inductor's compile processes while the run's imports go on."""

from __future__ import annotations

import importlib

from composer_speedups.core.before_imports import PlannedRun


def on_gpu(run: PlannedRun) -> None:
    """Start them where inductor is the backend that will want them."""
    if (run.algorithms["torch_compile"] or {}).get("backend", "inductor") == "inductor":
        importlib.import_module("torch._inductor.async_compile")  # starts them as it is imported
