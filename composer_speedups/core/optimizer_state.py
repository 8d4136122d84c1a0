"""How many bits an optimizer keeps a value of each parameter, read off its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from composer_speedups.core.optimizer_evidence import plain_tensors

__all__ = ["count_state_bits", "embedding_weights", "state_bits", "why_not_quantised"]

_FIRST_MOMENTS = ("exp_avg", "state1")  # torch's and torchao's name, and bitsandbytes'


def embedding_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights of all ``nn.Embedding`` modules, each once; a decoder tied to one of them is that weight."""
    embeddings: list[Any] = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    return list(dict.fromkeys(e.weight for e in embeddings))


def state_bits(optimizer: Optimizer, parameter: Tensor) -> int | None:
    """Bits a value of the first moment, scales left out; None before the parameter's first step."""
    state = optimizer.state.get(parameter, {})
    moment = next((state[name] for name in _FIRST_MOMENTS if name in state), None)
    if moment is None:
        return None
    codes = max(plain_tensors(moment), key=lambda t: t.nbytes)
    return round(8 * codes.nbytes / parameter.numel())


def count_state_bits(optimizer: Optimizer, embeddings: Iterable[Tensor] = ()) -> dict[str, Any]:
    """The state of every parameter that has stepped.

    Args:
        optimizer: After a step.
        embeddings: Parameters whose bits are given apart.

    Returns:
        ``"tensors_by_state_bits"`` and ``"values_by_state_bits"``, ``{"8": n, "32": m}`` each, and
        ``"embedding_state_bits"``, sorted.
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


def why_not_quantised(counts: dict[str, Any], bits: int, embedding_bits: int | None) -> str | None:
    """What in :func:`count_state_bits` contradicts a ``bits``-bit optimizer; None when nothing does.

    Args:
        counts: From :func:`count_state_bits`.
        bits: Bits a value that some tensors must have.
        embedding_bits: Bits that embeddings must have; None where it does not matter.
    """
    if str(bits) not in counts["tensors_by_state_bits"]:
        return f"no parameter has {bits}-bit state"
    others = [b for b in counts["embedding_state_bits"] if b != embedding_bits]
    if embedding_bits is not None and others:
        return f"embeddings have {others[0]}-bit state"
    return None
