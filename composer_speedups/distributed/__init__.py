"""Training on several GPUs: DDP, FSDP, reductions of host scalars, balanced sampling.

These can be used in your own Composer Trainer, as in ``examples/own_trainer.py``, and ``train.py`` is built on them:

- :class:`OverlappedDDP`, a callback: DDP without gradient copies, and optimizer steps that start early.
- :class:`BalancedSampler`: batches shared between ranks so that all ranks have nearly the same number of tokens.
- :class:`FreezeGarbage`, a callback: excludes imported objects from garbage collection.
- :func:`share_cores`: sets the number of torch's threads on the host.
- :func:`reads_no_gradients`: declares that your own callback for AFTER_BACKWARD or AFTER_TRAIN_BATCH does not read
  gradients, so that optimizer steps may still start early.

They are imported on first use, so that :class:`FSDPConfig`, the keys under ``trainer.fsdp``, does not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal

from pydantic import Field

from composer_speedups.core.settings import Settings

_NAMES = {
    "BalancedSampler": "balanced_sampling",
    "FreezeGarbage": "host",
    "OverlappedDDP": "ddp",
    "reads_no_gradients": "composer_loop",
    "share_cores": "host",
}


class FSDPConfig(Settings):
    shard: Literal["grad_op", "full"] = "full"
    """Shard gradients and optimizer state (grad_op, ZeRO-2), or also the weights (full, ZeRO-3)."""
    replicas: int = Field(1, ge=1)
    """Replicas of the sharded model (HSDP). With one replica per node, shards stay within their node."""
    cpu_offload: bool = False
    """Keep shards and optimizer state in host memory. Needs GPUs, and is slow."""


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_NAMES)
    if name in _NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
