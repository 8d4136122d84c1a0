"""Find NaN and infinite weights and gradients, and describe the step in which they occurred."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from composer.core import State
from torch import Tensor

from composer_speedups.core.engaging import techniques_of
from composer_speedups.core.trainer_state import local_shard

__all__ = ["circumstances", "nonfinite_gradients", "nonfinite_weights"]


def nonfinite_weights(state: State) -> str | None:
    """Return ``"2 of 39 weights, NAME first"``, or None if all weights are finite. Synchronizes with the device
    once."""
    return _format("weights", ((name, p.detach()) for name, p in state.model.named_parameters()))


def nonfinite_gradients(state: State) -> str | None:
    """As :func:`nonfinite_weights`, for the gradients."""
    named = ((name, p.grad) for name, p in state.model.named_parameters() if p.grad is not None)
    return _format("gradients", named)


def _format(what: str, named: Iterable[tuple[str, Tensor]]) -> str | None:
    names, flags = [], []
    for name, tensor in named:
        names.append(name)
        flags.append(torch.isfinite(local_shard(tensor)).all())
    finite = torch.stack(flags).tolist() if flags else []
    bad = [name.removeprefix("module.") for name, good in zip(names, finite, strict=True) if not good]
    return f"{len(bad)} of {len(names)} {what}, {bad[0]} first" if bad else None


def circumstances(state: State, *, ended: bool = True) -> str:
    """The step, its batch, learning rate, precision and techniques, as the middle of a sentence.

    Args:
        ended: Whether Composer has already counted the batch, as at BATCH_END.
    """
    time = state.previous_timestamp if ended and state.previous_timestamp is not None else state.timestamp
    rates = sorted({float(group["lr"]) for optimizer in state.optimizers for group in optimizer.param_groups})
    techniques = [t.name for t in techniques_of(state.algorithms) if t.engaged]
    return (
        f"step {time.batch.value + 1} (batch {time.batch_in_epoch.value + 1} of epoch {time.epoch.value + 1}), "
        f"next learning rate {', '.join(f'{rate:.3g}' for rate in rates)}, {state.precision.value}, "
        f"engaged techniques: {', '.join(techniques) or 'none'}"
    )
