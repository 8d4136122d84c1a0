"""Replace an AdamW by one whose state and step are on the CPU."""

from __future__ import annotations

from torch.optim import Optimizer

from composer_speedups.algorithms.offloaded_optimizer.host_adamw import HostAdamW
from composer_speedups.surgery.optimizer_swap import swap_optimizer

__all__ = ["apply_offloaded_optimizer"]


def apply_offloaded_optimizer(optimizer: Optimizer) -> Optimizer:
    """Replace an AdamW by one whose state is in host memory and whose step runs on the CPU.

    Args:
        optimizer: A ``torch.optim.AdamW`` that has not stepped; it must not be used afterwards.

    Returns:
        The new optimizer with the same parameters and groups, or ``optimizer`` if it is already offloaded. Parameters
        on the CPU are supported; they are copied to buffers, too.

    Raises:
        ValueError: The optimizer is not AdamW, or has stepped.

    Source: ZeRO-Offload (arXiv 2101.06840), and torchao's CPUOffloadOptimizer; :mod:`.host_adamw` explains why the
    latter is not used directly.
    """
    return swap_optimizer(optimizer, "AdamW on the CPU", HostAdamW)
