"""FSDP with a few config keys: ZeRO-2, ZeRO-3, HSDP and CPU offload, based on Composer's FSDP2.

Composer 0.32's FSDP1 runs on GPUs only, wraps a Hugging Face model as one unit, and does not support CPU offload. Its
FSDP2 (torch's ``fully_shard``) shards block by block, keeps the names and dtypes of parameters, and also runs with
gloo.
"""

from __future__ import annotations

import functools
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from composer import algorithms
from composer.core import Event, State
from composer.distributed import fsdp2
from composer.loggers import Logger
from composer.utils import dist
from composer.utils.parallelism import FSDP2Config
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_

from composer_speedups.core.errors import ConfigError
from composer_speedups.core.reversible import temporary_attribute
from composer_speedups.core.trainer_state import local_shard
from composer_speedups.distributed import FSDPConfig
from composer_speedups.families.blocks import repeated_blocks


@dataclass
class Sharding(FSDP2Config):
    """Composer's FSDP2Config with replicas of the sharded model, which Composer supports for FSDP1 only."""

    replicas: int = 1  # of consecutive ranks: with one replica per node, shards stay within the node
    offload: bool = False  # keep the shards in host memory; see offloading()

    @property
    def data_parallel_replicate_degree(self) -> int | None:
        """The first dimension of Composer's device mesh; None for a one-dimensional mesh."""
        return self.replicas if self.replicas > 1 else None


def check_sharding(config: FSDPConfig, *, on_gpu: bool) -> None:
    """Raise a ConfigError for settings that these ranks or this device do not support."""
    ranks, replicas = dist.get_world_size(), config.replicas
    if ranks % replicas:
        raise ConfigError(
            f"trainer.fsdp.replicas: {ranks} ranks cannot be divided into {replicas} replicas; use a divisor"
        )
    if config.cpu_offload and not on_gpu:
        raise ConfigError("trainer.fsdp.cpu_offload: the weights are already on the CPU; remove it")


def fsdp_parallelism(config: FSDPConfig) -> dict[str, Any]:
    """The ``parallelism_config`` for Composer's Trainer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2 Config/APIs are experimental", UserWarning)
        shards = Sharding(
            reshard_after_forward=config.shard == "full",
            state_dict_type="full",  # checkpoints and exports equal those of one process
            mixed_precision="FULL",  # the precision is that of autocast, as in one process
            replicas=config.replicas,
            offload=config.cpu_offload,
        )
    return {"fsdp": shards}


def sharded_blocks(model: nn.Module) -> None:
    """Make Composer shard each block of the encoder separately. Otherwise the whole model is gathered at once."""
    inner: Any = model.model
    blocks = set(map(id, repeated_blocks(inner).values()))
    inner.fsdp_wrap_fn = lambda module: id(module) in blocks


def offloading(config: Any) -> AbstractContextManager[None]:
    """Around Composer's wrapping of the model: with ``Sharding(offload=True)`` the shards are kept in host memory."""
    if not getattr(config, "offload", False):
        return nullcontext()
    return temporary_attribute(fsdp2, "fully_shard", functools.partial(fully_shard, offload_policy=CPUOffloadPolicy()))


class GradientClipping(algorithms.GradientClipping):
    """Composer's gradient clipping, which under FSDP2 clips by the global L2 norm over all shards.

    Composer's own version looks for FSDP1 modules and clips nothing under FSDP2. The class has Composer's name, because
    checkpoints record it and a run may resume with or without sharding. The norm is reduced on the run's device,
    because collectives are not available for shards in host memory.
    """

    norm: Tensor | None = None  # before the latest clipping, on the run's device; None under FSDP1

    def match(self, event: Event, state: State) -> bool:
        return event is Event.INIT or event is Event.AFTER_TRAIN_BATCH  # asked at each event

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event != Event.AFTER_TRAIN_BATCH or state.fsdp_config_version == 1:
            super().apply(event, state, logger)
            return
        assert self.clipping_type == "norm"
        if not isinstance(state.fsdp_config, FSDP2Config):
            self.norm = clip_grad_norm_(state.model.parameters(), self.clipping_threshold)
        else:
            gradients = [local_shard(p.grad) for p in state.model.parameters() if p.grad is not None]
            norms = torch.stack([g.detach().float().norm() for g in gradients])
            squares = state.device.tensor_to_device(norms.square().sum())
            dist.all_reduce(squares, reduce_operation="SUM")
            # Each replica has counted all shards.
            self.norm = (squares / getattr(state.fsdp_config, "replicas", 1)).sqrt()
            factor = torch.clamp(self.clipping_threshold / (self.norm + 1e-6), max=1.0)  # as in clip_grad_norm_
            for gradient in gradients:
                gradient.mul_(factor.to(gradient.device))
