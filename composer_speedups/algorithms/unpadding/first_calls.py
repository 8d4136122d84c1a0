"""Compare a model that a function changed with the untouched one, in its first calls.

The comparison belongs to the outermost module that may read padding: a transformers model that is not exactly its
class's, or the module of one's own around it. That module gets a class derived from its own until it is compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from composer_speedups.core.comparison import (
    SIXTEEN_BITS,
    Check,
    Tolerance,
    compare,
    outcome_of,
    tolerance_of,
    with_padding,
)
from composer_speedups.core.stock import model_differences, outermost_models
from composer_speedups.packing.call import ModelAroundEncoder, forced
from composer_speedups.packing.derived_classes import derived_class, restore_class, wrap_forward
from composer_speedups.packing.tokens import run_eagerly

__all__ = ["compare_first_calls", "stop_comparing"]


_COMPARED_EAGERLY = (
    "unpadding compares this model with the untouched one in its first calls; call it once before compiling, apply it "
    "with check='never', or call undo_unpadding(model)"
)


def compare_first_calls(model: nn.Module, check: Check, restore: Callable[[nn.Module], Any]) -> None:
    """Compare the outermost transformers models in a module, and the module itself if it is of another library.

    ``restore`` is called with the module if a comparison fails. With ``check="auto"``, a transformers model is compared
    only if it is not exactly its class's when it is called.
    """
    if check == "never":
        return
    for name, outer in outermost_models(model).items():
        because = next(iter(model_differences(outer, name)), "") if check == "auto" else f"check={check!r}"
        if isinstance(outer, ModelAroundEncoder):
            outer.call_rules.first_calls = _FirstCalls(model, name, because, restore)
    known = ("torch.", "composer.", "composer_speedups.")  # such as DDP, HuggingFaceModel and models of tasks
    wraps = type(model).__module__.startswith(known)
    if not isinstance(model, PreTrainedModel) and not wraps and not _is_compared(model):
        root: Any = model
        because = f"the model is a {type(model).__name__}, which is not one of transformers' classes"
        root.__class__ = derived_class(_Compared, type(model))
        root.first_calls = _FirstCalls(model, "", because, restore)


def stop_comparing(model: nn.Module) -> None:
    """Undo :func:`compare_first_calls`."""
    for module in model.modules():
        if _is_compared(module):
            restore_class(module)
            vars(module).pop("first_calls", None)
        elif isinstance(module, ModelAroundEncoder):
            module.call_rules.first_calls = None


class _Compared:
    """Makes the class of a module of one's own until it is compared; see :func:`.derived_class`."""

    prefix = "Compared"

    @staticmethod
    def complete(cls: Any) -> None:
        wrap_forward(cls, _compare_and_run)


def _is_compared(module: nn.Module) -> bool:
    mixin, _ = getattr(type(module), "_derived_from", (None, None))
    return mixin is _Compared


def _compare_and_run(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inner = type(module).inner_forward
    if module.first_calls.before(module, args, kwargs):
        with forced("padded"):
            return inner(module, *args, **kwargs)
    return inner(module, *args, **kwargs)


class _FirstCalls:
    """Compares a module's first call, and its first call with gradients.

    Args:
        model: The model that is restored if they differ.
        name: The module's name in it.
        because: Why they are compared, for the error. Empty if none is known; the first call then looks again.
        restore: Called with the model if they differ.
    """

    def __init__(self, model: nn.Module, name: str, because: str, restore: Callable[[nn.Module], Any]) -> None:
        self._model, self._name, self._because, self._restore = model, name, because, restore
        self._due = {False, True}  # without and with gradients

    def before(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], positional: Sequence[str] = ()
    ) -> bool:
        """Compare a call if that is due. Returns whether it must stay padded, since it cannot be compared."""
        if torch.is_grad_enabled() not in self._due or (torch.compiler.is_dynamo_compiling() and not self._because):
            return False
        return self._compare(module, args, kwargs, positional)  # type: ignore[no-any-return]

    @run_eagerly(_COMPARED_EAGERLY)
    def _compare(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], positional: Sequence[str]) -> bool:
        gradients = torch.is_grad_enabled()
        self._because = self._because or next(iter(model_differences(module, self._name)), "")
        if not self._because:
            self._due.clear()
            return False
        due, self._due = self._due, set()  # the comparison calls the module too
        with forced("packed"):
            changed = outcome_of(module, tuple(map(_own_copy, args)), with_padding(kwargs), positional)
        with forced("padded"):
            untouched = outcome_of(module, tuple(map(_own_copy, args)), with_padding(kwargs), positional)
        difference = compare(untouched, changed, _tolerance(module))
        if difference.beyond is not None:
            stop_comparing(self._model)
            self._restore(self._model)
            raise ValueError(
                f"unpadding does not support this model: {difference.beyond} on the first batch ({self._because}); the "
                "model is restored; if the difference is intended, apply it with check='never'"
            )
        self._due = due - {gradients, False}
        if not self._due and _is_compared(module):
            stop_comparing(module)
        return False


def _tolerance(module: nn.Module) -> Tolerance:
    """As :func:`tolerance_of`; a larger one in the autocast of the module's own ``forward``, as accelerate sets it."""
    device = next((p.device.type for p in module.parameters()), "cpu")
    return SIXTEEN_BITS if "forward" in vars(module) and torch.is_autocast_enabled(device) else tolerance_of(module)


def _own_copy(argument: Any) -> Any:
    """A copy of a batch, to which some models add their results."""
    return with_padding(copy.copy(argument)) if isinstance(argument, Mapping) else argument
