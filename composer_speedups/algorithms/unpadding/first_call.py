"""Compare a model with the untouched one in its first calls, in a loop without Composer's Trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from composer_speedups.core.stock import model_differences
from composer_speedups.packing.comparison import (
    SIXTEEN_BITS,
    Check,
    Tolerance,
    compare,
    outcome_of,
    tolerance_of,
    with_padding,
)
from composer_speedups.packing.layout import run_eagerly
from composer_speedups.packing.untouched import untouched, with_everything_packed

_COMPARED_EAGERLY = (
    "unpadding compares this model with the untouched one in its first calls; call it once before compiling, or set "
    "check='never'"
)


class FirstCall:
    """Runs a transformers model's first call, and its first call with gradients, with and without packing.

    Args:
        name: The model's name in the module around it.
        check: ``"auto"`` compares only a model that is not exactly its class's when it is called.
        restore: Called if the results differ.
    """

    def __init__(self, name: str, check: Check, restore: Callable[[], Any]) -> None:
        self._name, self._restore = name, restore
        self._because = f"check={check!r}" if check == "always" else ""
        self._due = {False, True}  # without and with gradients

    def compare(self, module: nn.Module, inputs: dict[str, Any], positional: Sequence[str]) -> None:
        """See :class:`~...packing.call.FirstCalls`."""
        if torch.is_grad_enabled() in self._due and (self._because or not torch.compiler.is_dynamo_compiling()):
            self._compare(module, inputs, positional)

    @run_eagerly(_COMPARED_EAGERLY)
    def _compare(self, module: nn.Module, inputs: dict[str, Any], positional: Sequence[str]) -> None:
        self._because = self._because or next(iter(model_differences(module, self._name)), "")  # type: ignore[arg-type]
        due, self._due = self._due, set()  # the comparison calls the module too
        if not self._because:
            return

        def outcome() -> Any:
            given = {name: copy.copy(value) if isinstance(value, Mapping) else value for name, value in inputs.items()}
            return outcome_of(module, (), with_padding(given), positional)

        with with_everything_packed():
            changed = outcome()
        with untouched(module):
            expected = outcome()
        difference = compare(expected, changed, _tolerance(module))
        if difference.beyond is not None:
            self._restore()
            raise ValueError(
                f"unpadding does not support this model: {difference.beyond} on the first batch ({self._because}); the "
                "model is restored; if the difference is intended, set check='never'"
            )
        self._due = due - {torch.is_grad_enabled(), False}


def _tolerance(module: nn.Module) -> Tolerance:
    """As :func:`tolerance_of`; a larger one in the autocast of the module's own ``forward``, as accelerate sets it."""
    device = next((p.device.type for p in module.parameters()), "cpu")
    return SIXTEEN_BITS if "forward" in vars(module) and torch.is_autocast_enabled(device) else tolerance_of(module)
