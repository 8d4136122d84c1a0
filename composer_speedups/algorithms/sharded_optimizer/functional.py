"""Replace an AdamW by one whose state is split over the ranks of DistributedDataParallel."""

from __future__ import annotations

from typing import Any

from torch import distributed
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from composer_speedups.algorithms.sharded_optimizer.sharded_adamw import ShardedAdamW
from composer_speedups.core.trainer_state import world_size
from composer_speedups.surgery.optimizer_swap import UnfitOptimizerError, swap_optimizer

__all__ = ["apply_sharded_optimizer"]


def apply_sharded_optimizer(optimizer: Optimizer) -> Optimizer:
    """Replace an AdamW by one that keeps each parameter's state on one rank only (ZeRO stage 1).

    Call it on every rank after ``torch.distributed.init_process_group``, with the same parameters in the same order.
    The model has to be wrapped in ``DistributedDataParallel``, before or afterwards. Before saving, call the new
    optimizer's ``consolidate_state_dict()`` on every rank; ``state_dict()`` on rank 0 is then that of a plain AdamW.
    ``load_state_dict`` accepts it on any number of ranks.

    Args:
        optimizer: A ``torch.optim.AdamW`` that has not stepped; it must not be used afterwards.

    Returns:
        The new optimizer with the same parameters and groups, or ``optimizer`` if it is already split. On a GPU it
        steps with torch's fused AdamW. With one rank, it is a plain AdamW.

    Raises:
        ValueError: The optimizer is not AdamW, has stepped, has parameters of several dtypes, fewer parameters than
            there are ranks, or parameters that FSDP sharded; or there is no process group.

    Source: Rajbhandari et al., "ZeRO" (arXiv 1910.02054), and ``torch.distributed.optim.ZeroRedundancyOptimizer``.
    """
    ranks = world_size()
    if ranks > 1 and not distributed.is_initialized():
        raise UnfitOptimizerError(
            f"the {ranks} ranks have no process group yet", "call torch.distributed.init_process_group first"
        )
    return swap_optimizer(optimizer, "AdamW split over the ranks", _build, stock_state=True)


def _build(groups: list[dict[str, Any]]) -> Optimizer:
    parameters = [p for group in groups for p in group["params"]]
    if any(isinstance(p, DTensor) for p in parameters):
        raise UnfitOptimizerError("FSDP already shards the optimizer's state", "keep torch.optim.AdamW")
    dtypes = sorted({str(p.dtype) for p in parameters})
    if len(dtypes) > 1:
        raise UnfitOptimizerError(
            f"the optimizer has parameters of {' and '.join(dtypes)}", "train parameters of one dtype"
        )
    ranks = world_size()
    if ranks == 1:
        return AdamW(groups, fused=all(p.is_cuda for p in parameters) or None)
    if len(parameters) < ranks:
        raise UnfitOptimizerError(
            f"{len(parameters)} parameters cannot be divided among {ranks} ranks", "use torch.optim.AdamW"
        )
    return ShardedAdamW(groups)
