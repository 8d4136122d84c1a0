"""FSDP by a few keys: ZeRO-2, ZeRO-3, HSDP and CPU offload, over Composer's FSDP2.

Composer 0.32's FSDP1 runs on GPUs only, wraps a Hugging Face model in one piece, and has no CPU offload. Its FSDP2
(torch's ``fully_shard``) shards block by block, keeps names and dtypes of parameters, and runs over gloo too.
``trainer.parallelism_config`` still reaches both.
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
from composer_speedups.core.temporary_attribute import temporary_attribute
from composer_speedups.core.trainer_state import local_shard
from composer_speedups.distributed import FSDPConfig
from composer_speedups.families.blocks import repeated_blocks

__all__ = [
    "GradientClipping",
    "Sharding",
    "check_sharding",
    "fsdp_parallelism",
    "offloading",
    "sharded_blocks",
]


@dataclass
class Sharding(FSDP2Config):
    """Composer's FSDP2Config with copies of the sharded model, which Composer has for FSDP1 only.

    Args:
        replicas: Copies. The ranks of one copy are neighbours: with one copy a node, shards stay within the node.
        offload: Keep the shards in host memory; see :func:`offloading`.
    """

    replicas: int = 1
    offload: bool = False

    @property
    def data_parallel_replicate_degree(self) -> int | None:
        """The first dimension of Composer's device mesh; None for a mesh of one dimension."""
        return self.replicas if self.replicas > 1 else None


def check_sharding(config: FSDPConfig, *, on_gpu: bool) -> None:
    """Refuse what these ranks and this device cannot do.

    Raises:
        ConfigError: Names the key and the fix.
    """
    ranks, replicas = dist.get_world_size(), config.replicas
    if ranks % replicas:
        raise ConfigError(f"trainer.fsdp.replicas: {ranks} ranks do not make {replicas} equal copies; use a divisor")
    if config.cpu_offload and not on_gpu:
        raise ConfigError("trainer.fsdp.cpu_offload: the weights are on the CPU already; leave it out")


def fsdp_parallelism(config: FSDPConfig) -> dict[str, Any]:
    """What goes to ``Trainer(parallelism_config=…)``."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2 Config/APIs are experimental", UserWarning)
        shards = Sharding(
            reshard_after_forward=config.shard == "full",
            state_dict_type="full",  # checkpoints and exports are those of one process
            mixed_precision="FULL",  # autocast lowers what it lowers in one process, and nothing else is
            replicas=config.replicas,
            offload=config.cpu_offload,
        )
    return {"fsdp": shards}


def sharded_blocks(model: nn.Module) -> None:
    """Have Composer shard each of the encoder's blocks by itself; without it the model is gathered as a whole."""
    inner: Any = model.model
    blocks = set(map(id, repeated_blocks(inner).values()))
    inner.fsdp_wrap_fn = lambda module: id(module) in blocks


def offloading(config: Any) -> AbstractContextManager[None]:
    """Around Composer's wrapping of the model: with ``Sharding(offload=True)`` the shards go to host memory.

    Composer passes no offload policy on to ``fully_shard``.
    """
    if not getattr(config, "offload", False):
        return nullcontext()
    return temporary_attribute(fsdp2, "fully_shard", functools.partial(fully_shard, offload_policy=CPUOffloadPolicy()))


class GradientClipping(algorithms.GradientClipping):
    """Composer's, which under FSDP2 clips the gradient of all shards together to its global L2 norm.

    Composer's own looks for FSDP1's modules there and, finding none, clips nothing. The name is Composer's too, since
    checkpoints record it: a run may go on with shards or without. The norm is summed on the run's device, since shards
    in host memory have no collective operations there.

    Attributes:
        norm: The gradient's norm before the last clipping, a scalar on the run's device; None before the first, and
            under FSDP1, where Composer keeps it to itself.
    """

    norm: Tensor | None = None

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
