"""The tensors of an optimizer's state, and their size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from composer_speedups.core.trainer_state import local_shard


def state_tensors(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the state with its key; quantised tensors as the plain tensors that they consist of."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield from ((str(key), part) for part in plain_tensors(value))


def plain_tensors(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors that a quantised or sharded tensor consists of, or a plain tensor itself."""
    tensor = local_shard(tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(tensor, name))
    else:
        yield tensor


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of the state on all devices. Tensors that several parameters share, such as look-up tables, count once."""
    return sum({(t.device, t.data_ptr()): t.nbytes for _, t in state_tensors(optimizer)}.values())
