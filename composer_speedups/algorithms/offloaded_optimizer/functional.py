"""AdamW's state, and its step, in host memory."""

from __future__ import annotations

from torch.optim import Optimizer

from composer_speedups.algorithms.offloaded_optimizer.host_adamw import HostAdamW
from composer_speedups.surgery.optimizer_swap import swap_optimizer

__all__ = ["apply_offloaded_optimizer"]


def apply_offloaded_optimizer(optimizer: Optimizer) -> Optimizer:
    """Put an AdamW in the place of AdamW whose state is in host memory and whose arithmetic the CPU does.

    Args:
        optimizer: A ``torch.optim.AdamW`` that has not stepped; not to be used any more.

    Returns:
        The new optimizer, over the same parameters and groups; ``optimizer`` itself if it is this one already.
        Parameters on the CPU work too, through buffers of their own.

    Raises:
        ValueError: The optimizer is not AdamW, or has stepped.

    Source: ZeRO-Offload (arXiv 2101.06840), and torchao's CPUOffloadOptimizer; :mod:`.host_adamw` says why the
    latter is not used itself.
    """
    return swap_optimizer(optimizer, "AdamW on the CPU", HostAdamW)
