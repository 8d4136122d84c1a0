"""What an optimizer really keeps for each parameter: bits a value and bytes, read off the state's tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["embedding_weights", "plain_tensors", "state_bits", "state_bytes", "summarize_state"]

_FIRST_MOMENTS = ("exp_avg", "state1")  # torch's and torchao's name, and bitsandbytes'


def embedding_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights of all ``nn.Embedding`` modules, each once; a decoder tied to one of them is that weight."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    return list({id(w): w for w in weights}.values())


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor subclass wraps, such as codes and scales; a plain tensor itself."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from plain_tensors(getattr(tensor, name))
    else:
        yield tensor


def state_bits(optimizer: torch.optim.Optimizer, parameter: Tensor) -> int | None:
    """Bits a value of the first moment, scales left out; None before the parameter's first step."""
    state = optimizer.state.get(parameter, {})
    moment = next((state[name] for name in _FIRST_MOMENTS if name in state), None)
    if moment is None:
        return None
    codes = max(plain_tensors(moment), key=lambda t: t.nbytes)
    return round(8 * codes.nbytes / parameter.numel())


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all state tensors on this rank: scales and look-up tables too, each storage once."""
    values = (v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor))
    return sum({_storage(t): t.nbytes for value in values for t in plain_tensors(value)}.values())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def summarize_state(optimizer: torch.optim.Optimizer, embeddings: Iterable[Tensor] = ()) -> dict[str, Any]:
    """State of every parameter that has stepped.

    Args:
        optimizer: After a step.
        embeddings: Parameters whose bits are reported apart.

    Returns:
        ``{"tensors_by_state_bits", "values_by_state_bits"}``, both ``{"8": n, "32": m}``;
        ``"embedding_state_bits"``, sorted; ``"state_bytes_per_value"``, where torch's AdamW in float32 has 8.
        Empty when no parameter has stepped.
    """
    tensors: Counter[str] = Counter()
    values: Counter[str] = Counter()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            bits = state_bits(optimizer, parameter)
            if bits is not None:
                tensors[str(bits)] += 1
                values[str(bits)] += parameter.numel()
    if not tensors:
        return {}
    return {
        "tensors_by_state_bits": dict(tensors),
        "values_by_state_bits": dict(values),
        "embedding_state_bits": sorted({b for e in embeddings if (b := state_bits(optimizer, e)) is not None}),
        "state_bytes_per_value": round(state_bytes(optimizer) / values.total(), 3),
    }
