"""Observe an optimizer's steps, the parameters that changed, and the state it created."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composer_speedups.core.trainer_state import local_shard

__all__ = [
    "StepWatch",
    "count_state_bits",
    "embedding_weights",
    "plain_tensors",
    "state_bits",
    "state_bytes",
    "state_dtypes",
    "state_tensors",
]

_SAMPLE = 64  # elements compared in each parameter
# with a smaller rate, a step may be too small to change float32 weights, for example at the start of a warm-up
_MIN_RATE = 1e-6
_FIRST_MOMENTS = ("exp_avg", "state1")  # torch's and torchao's name, and bitsandbytes' name


class StepWatch:
    """Counts the steps of an optimizer and checks whether parameters change.

    Attributes:
        steps: Number of steps since :meth:`reset`.
        moved: Number of parameters that changed in the first step with gradients and a learning rate above 1e-6; None
            before that step.
        watched: Number of parameters that had a gradient in that step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.reset()
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def reset(self) -> None:
        self.steps, self.watched = 0, 0
        self.moved: int | None = None
        self._samples: dict[Tensor, Tensor] = {}

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if self.moved is None and any(float(group["lr"]) >= _MIN_RATE for group in optimizer.param_groups):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self._samples = {p: _sample(p).clone() for p in parameters}

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        self.steps += 1
        changed = [(_sample(p) != old).any() for p, old in self._samples.items() if p.grad is not None]
        if changed:  # a skipped batch leaves no gradients, so its step says nothing
            self.watched, self.moved = len(changed), int(torch.stack(changed).sum())
        self._samples = {}


def _sample(parameter: Tensor) -> Tensor:
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLE)][:_SAMPLE]


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


def state_dtypes(optimizer: Optimizer) -> dict[str, list[str]]:
    """The dtypes of the state under each key, without scalars such as step counts."""
    dtypes: dict[str, set[str]] = {}
    for key, tensor in state_tensors(optimizer):
        if tensor.numel() > 1:
            dtypes.setdefault(key, set()).add(str(tensor.dtype).removeprefix("torch."))
    return {key: sorted(names) for key, names in sorted(dtypes.items())}


def embedding_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights of all ``nn.Embedding`` modules. A decoder tied to one of them shares its weight and is not counted
    again."""
    embeddings: list[Any] = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    return list(dict.fromkeys(e.weight for e in embeddings))


def state_bits(optimizer: Optimizer, parameter: Tensor) -> int | None:
    """Bits per value of the first moment, without scales; None before the parameter's first step."""
    state = optimizer.state.get(parameter, {})
    moment = next((state[name] for name in _FIRST_MOMENTS if name in state), None)
    if moment is None:
        return None
    codes = max(plain_tensors(moment), key=lambda t: t.nbytes)
    return round(8 * codes.nbytes / parameter.numel())


def count_state_bits(optimizer: Optimizer, embeddings: Iterable[Tensor] = ()) -> dict[str, Any]:
    """Count the state of every parameter that has stepped, by bits.

    Args:
        optimizer: An optimizer that has stepped.
        embeddings: Parameters whose bits are listed separately.

    Returns:
        ``"tensors_by_state_bits"`` and ``"values_by_state_bits"``, each as ``{"8": n, "32": m}``, and the sorted
        ``"embedding_state_bits"``.
    """
    tensors: Counter[str] = Counter()
    values: Counter[str] = Counter()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            bits = state_bits(optimizer, parameter)
            if bits is not None:
                tensors[str(bits)] += 1
                values[str(bits)] += parameter.numel()
    return {
        "tensors_by_state_bits": dict(tensors),
        "values_by_state_bits": dict(values),
        "embedding_state_bits": sorted({b for e in embeddings if (b := state_bits(optimizer, e)) is not None}),
    }
