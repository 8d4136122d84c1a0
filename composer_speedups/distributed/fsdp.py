"""FSDP with a few config keys: ZeRO-2, ZeRO-3 and HSDP, based on Composer's FSDP2.

Composer 0.32's FSDP1 runs on GPUs only, and wraps a Hugging Face model as one unit. Its FSDP2 (torch's
``fully_shard``) shards block by block, keeps the names and dtypes of parameters, and also runs with gloo.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from composer import algorithms
from composer.core import Event, State
from composer.loggers import Logger
from composer.utils import dist
from composer.utils.parallelism import FSDP2Config
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from composer_speedups.core.errors import ConfigError
from composer_speedups.distributed import FSDPConfig
from composer_speedups.families.blocks import repeated_blocks


@dataclass
class Sharding(FSDP2Config):
    """Composer's FSDP2Config with replicas of the sharded model, which Composer supports for FSDP1 only."""

    replicas: int = 1  # of consecutive ranks: with one replica per node, shards stay within the node

    @property
    def data_parallel_replicate_degree(self) -> int | None:
        """The first dimension of Composer's device mesh; None for a one-dimensional mesh."""
        return self.replicas if self.replicas > 1 else None


def check_sharding(config: FSDPConfig) -> None:
    """Raise a ConfigError for settings that these ranks do not support."""
    ranks, replicas = dist.get_world_size(), config.replicas
    if ranks % replicas:
        raise ConfigError(
            f"trainer.fsdp.replicas: {ranks} ranks cannot be divided into {replicas} replicas; use a divisor"
        )


def fsdp_parallelism(config: FSDPConfig) -> dict[str, Any]:
    """The ``parallelism_config`` for Composer's Trainer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2 Config/APIs are experimental", UserWarning)
        shards = Sharding(
            reshard_after_forward=config.shard == "full",
            state_dict_type="full",  # checkpoints and exports equal those of one process
            mixed_precision="FULL",  # the precision is that of autocast, as in one process
            replicas=config.replicas,
        )
    return {"fsdp": shards}


def sharded_blocks(model: nn.Module) -> None:
    """Make Composer shard each block of the encoder separately. Otherwise the whole model is gathered at once."""
    inner: Any = model.model
    blocks = set(map(id, repeated_blocks(inner).values()))
    inner.fsdp_wrap_fn = lambda module: id(module) in blocks


class GradientClipping(algorithms.GradientClipping):
    """Composer's gradient clipping, which under FSDP2 clips by the global L2 norm over all shards.

    Composer's own version looks for FSDP1 modules and clips nothing under FSDP2. The class has Composer's name, because
    checkpoints record it and a run may resume with or without sharding.
    """

    norm: Tensor | None = None  # before the latest clipping, on the run's device; None under FSDP1

    def match(self, event: Event, state: State) -> bool:
        return event is Event.INIT or event is Event.AFTER_TRAIN_BATCH  # asked at each event

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event != Event.AFTER_TRAIN_BATCH or state.fsdp_config_version == 1:
            super().apply(event, state, logger)
            return
        assert self.clipping_type == "norm"
        norm = clip_grad_norm_(state.model.parameters(), self.clipping_threshold)
        self.norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
