"""Changing the class of modules in place, so that everything about them but their ``forward`` stays.

Assigning ``__class__`` keeps the module object: its parameters (and so tied weights, the optimizer's groups,
``requires_grad``, dtype and device), buffers, hooks, train/eval mode and name cannot change.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["derived_class", "stock_class", "swap_class"]


def swap_class(
    model: nn.Module,
    old: type[nn.Module],
    new: type[nn.Module],
    only: Callable[[nn.Module], bool] = lambda _: True,
) -> list[str]:
    """Turn every module of exactly class ``old`` into ``new``.

    Subclasses of ``old`` are left alone: they have a ``forward`` of their own.

    Args:
        model: Changed in place.
        old: The class looked for.
        new: A subclass of ``old`` that adds no parameters, buffers or constructor state.
        only: Leaves alone the modules for which it is false; by default, none.

    Returns:
        The names of the modules changed, in ``named_modules`` order; empty when there were none.
    """
    if not issubclass(new, old):
        raise ValueError(f"{new.__name__} must be a subclass of {old.__name__} to take over its state")
    names = []
    for name, module in model.named_modules():
        if type(module) is old and only(module):
            module.__class__ = new
            names.append(name)
    return names


class _Derived(type):
    """The class of classes that no module has by their names: a pickle holds what they are derived from."""


_MADE: dict[Any, type[Any]] = {}


def derived_class(mixin: Any, stock: Any) -> type[Any]:
    """The subclass of both, with the methods of ``mixin`` first; the same one at every call.

    It is called as the stock class is, with the mixin's attribute ``prefix`` before it. It and its modules can be
    copied and pickled.
    """
    if (mixin, stock) not in _MADE:
        members = {"__module__": mixin.__module__, "_derived_from": (mixin, stock)}
        _MADE[mixin, stock] = _Derived(f"{mixin.prefix}{stock.__name__}", (mixin, stock), members)
    return _MADE[mixin, stock]


def stock_class(derived: type[nn.Module]) -> type[nn.Module]:
    """The class that :func:`derived_class` was given."""
    stock: type[nn.Module] = vars(derived)["_derived_from"][1]
    return stock


def _reduce(derived: Any) -> Any:
    return derived_class, derived._derived_from


copyreg.pickle(_Derived, _reduce)
