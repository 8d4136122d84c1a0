"""Composer algorithms and callbacks that make fine-tuning Hugging Face encoders fast, and show that they took effect.

    from composer_speedups import FusedOptimizer, MixedPrecision, TorchCompile

Names are imported on first use: the techniques, which need neither torch nor Composer to be declared, and those below.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_OTHERS = {
    "BalancedSampler": "composer_speedups.distributed.balanced_sampling",
    "BestWeights": "composer_speedups.callbacks.evaluations",
    "EarlyStopping": "composer_speedups.callbacks.evaluations",
    "IndexedRows": "composer_speedups.packing.rows",
    "LossMonitor": "composer_speedups.callbacks.losses",
    "MemoryAnatomy": "composer_speedups.callbacks.memory",
    "OverlappedDDP": "composer_speedups.distributed.ddp",
    "RunReport": "composer_speedups.callbacks.run_report",
    "ThroughputMonitor": "composer_speedups.callbacks.throughput",
    "apply": "composer_speedups.core.apply",
    "apply_recommended": "composer_speedups.recommendation",
    "load_sparse_upcycling": "composer_speedups.algorithms.sparse_upcycling.modules",
    "merged_state_dict": "composer_speedups.algorithms.lora.modules",
    "reads_no_gradients": "composer_speedups.distributed.composer_loop",
    "recommended": "composer_speedups.recommendation",
    "save_adapter": "composer_speedups.algorithms.lora.modules",
    "share_cores": "composer_speedups.distributed.cpu",
    "split_by_tokens": "composer_speedups.data.batching",
    "untouched": "composer_speedups.packing.untouched",
    "with_row_lengths": "composer_speedups.packing.encoder",
}


def _public() -> dict[str, str]:
    """Public name → the module that defines it."""
    from composer_speedups.core.registry import technique_class, technique_names

    techniques = map(technique_class, technique_names())
    return _OTHERS | {technique.__name__: technique.__module__ for technique in techniques}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_public())
    if not name.startswith("_") and (module := _OTHERS.get(name) or _public().get(name)) is not None:
        return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_public()])
