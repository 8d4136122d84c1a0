"""Training on several GPUs: DDP, FSDP, host reductions, balanced sampling. FSDP's settings do not import torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from composer_speedups.core.settings import Settings


class FSDPConfig(Settings):
    shard: Literal["grad_op", "full"] = "full"
    """Shard gradients and optimizer state (grad_op, ZeRO-2), or also the weights (full, ZeRO-3)."""
    replicas: int = Field(1, ge=1)
    """Replicas of the sharded model (HSDP). With one replica per node, shards stay within their node."""
