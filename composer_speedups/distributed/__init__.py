"""Training on several GPUs: DDP, FSDP, reductions of host scalars, balanced sampling.

For a Composer Trainer of one's own; ``examples/own_trainer.py`` uses them all, and ``train.py`` is built on them:

- :class:`OverlappedDDP`, a callback: DDP without copies of gradients, and optimizer steps that begin early.
- :class:`BalancedSampler`: batches that the ranks share so that all have nearly equally many tokens.
- :class:`FreezeGarbage`, a callback: no full garbage collections of what was imported.
- :func:`share_cores`: torch's threads on the host.
- :func:`reads_no_gradients`: lets a callback of one's own that hears AFTER_BACKWARD or AFTER_TRAIN_BATCH go with early
  steps.

They are imported when first asked for: :class:`FSDPConfig`, the keys under ``trainer.fsdp``, should not wait for torch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

from composer_speedups.core.settings import key

_NAMES = {
    "BalancedSampler": "balanced_sampling",
    "FreezeGarbage": "host",
    "OverlappedDDP": "ddp",
    "reads_no_gradients": "gradient_readers",
    "share_cores": "host",
}


@dataclass
class FSDPConfig:
    shard: Literal["grad_op", "full"] = "full"
    """Gradients and optimizer state are shared out over the ranks (ZeRO-2), or the weights too (ZeRO-3)."""
    replicas: int = key(1, ge=1)
    """Copies of the sharded model (HSDP): with the number of nodes, shards stay within a node."""
    cpu_offload: bool = False
    """Keep the shards and the optimizer's state in host memory; needs GPUs, and is slow."""


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_NAMES)
    if name in _NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
