"""The config keys under ``trainer.fsdp``."""

from dataclasses import dataclass
from typing import Literal

from composer_speedups.core.settings import key

__all__ = ["FSDPConfig"]


@dataclass
class FSDPConfig:
    shard: Literal["grad_op", "full"] = "full"
    """Gradients and optimizer state are shared out over the ranks (ZeRO-2), or the weights too (ZeRO-3)."""
    replicas: int = key(1, ge=1)
    """Copies of the sharded model (HSDP): with the number of nodes, shards stay within a node."""
    cpu_offload: bool = False
    """Keep the shards and the optimizer's state in host memory; needs GPUs, and is slow."""
