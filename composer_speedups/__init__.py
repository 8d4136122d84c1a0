"""Composer algorithms and callbacks that make fine-tuning Hugging Face encoders fast, and show that they took effect.

    from composer_speedups import FusedOptimizer, MixedPrecision, TorchCompile

Every technique has a class and, unless it is an optimizer, an ``apply_`` function. They are found by the folders under
``algorithms`` and imported on first use, so that reading a config and ``--help`` need not import torch. The file
``__init__.pyi`` lists them for type checkers and editors; ``python -m benchmarks.render`` writes it.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_OTHERS = {
    "BalancedSampler": "composer_speedups.distributed.balanced_sampling",
    "BestWeights": "composer_speedups.callbacks.best_weights",
    "DivergenceGuard": "composer_speedups.callbacks.divergence",
    "EarlyStopping": "composer_speedups.callbacks.early_stopping",
    "EngagementReport": "composer_speedups.callbacks.engagement",
    "FiniteLoss": "composer_speedups.callbacks.finite_loss",
    "FreezeGarbage": "composer_speedups.distributed.host",
    "LossScaleMonitor": "composer_speedups.callbacks.loss_scale",
    "MemoryAnatomy": "composer_speedups.callbacks.memory",
    "OverlappedDDP": "composer_speedups.distributed.ddp",
    "RunSummary": "composer_speedups.callbacks.run_summary",
    "ThroughputMonitor": "composer_speedups.callbacks.throughput",
    "apply_recommended": "composer_speedups.recommendation",
    "recommended": "composer_speedups.recommendation",
    "share_cores": "composer_speedups.distributed.host",
    "split_by_tokens": "composer_speedups.data.token_microbatches",
}


def _public() -> dict[str, str]:
    """Public name → the module that defines it."""
    from composer_speedups.core.catalogue import public_names

    return _OTHERS | public_names()


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_public())
    if not name.startswith("_") and name in _public():
        return getattr(importlib.import_module(_public()[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_public()])
