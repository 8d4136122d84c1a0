"""Change the class of modules in place, so that only their ``forward`` changes.

Assigning ``__class__`` keeps the module object: its parameters (with tied weights, parameter groups, ``requires_grad``,
dtype and device), buffers, hooks, train/eval mode and name do not change.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


def swap_class(
    model: nn.Module, old: type[nn.Module], new: type[nn.Module], only: Callable[[nn.Module], bool] = lambda _: True
) -> list[str]:
    """Change every module of exactly class ``old``, not of a subclass, to its subclass ``new``; return their names."""
    names = []
    for name, module in model.named_modules():
        if type(module) is old and only(module):
            module.__class__ = new
            names.append(name)
    return names


class _Derived(type):
    """Metaclass of classes created at run time. Modules of such classes are pickled as their stock class."""


_MADE: dict[Any, type[Any]] = {}
_METACLASSES: dict[type, type[_Derived]] = {type: _Derived}


def derived_class(mixin: Any, stock: Any) -> type[Any]:
    """A subclass of both classes, with ``mixin``'s methods first; the same in every call. It and its modules can be
    copied and pickled."""
    if (mixin, stock) not in _MADE:
        members = {"__module__": mixin.__module__, "_derived_from": (mixin, stock)}
        _MADE[mixin, stock] = _metaclass(type(stock))(f"{mixin.prefix}{stock.__name__}", (mixin, stock), members)
    return _MADE[mixin, stock]


def _metaclass(stock: type) -> type[_Derived]:
    """:class:`_Derived`, or a subclass of it and of another metaclass, such as that of an abstract class."""
    if stock not in _METACLASSES:
        _METACLASSES[stock] = type("_Derived", (_Derived, stock), {})
        copyreg.pickle(_METACLASSES[stock], _reduce)
    return _METACLASSES[stock]


def is_derived(thing: Any) -> bool:
    """Whether something is a class from :func:`derived_class`, or a subclass of one."""
    return isinstance(thing, _Derived)


def stock_class(derived: Any) -> type[nn.Module]:
    """The stock class that a class from :func:`derived_class` was made from; any other class itself."""
    return getattr(derived, "_derived_from", (None, derived))[1]  # type: ignore[no-any-return]


def restore_class(module: nn.Module) -> None:
    """Undo the assignment of a class from :func:`derived_class`, also under a subclass of it, as FSDP2 assigns."""
    changed: Any = type(module)
    restored: Any = stock_class(changed)
    derived = next(kind for kind in changed.__mro__ if "_derived_from" in vars(kind))
    if changed is not derived:
        bases = tuple(restored if base is derived else base for base in changed.__bases__)
        members = {name: value for name, value in vars(changed).items() if name not in ("__dict__", "__weakref__")}
        restored = type(restored)(changed.__name__.replace(derived.__name__, restored.__name__), bases, members)
    module.__class__ = restored


def wrap_forward(cls: Any, wrapper: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Make a derived class's ``forward`` call ``wrapper(module, args, kwargs)``; the old one becomes ``inner_forward``.

    The new one has the stock class's signature, because Trainers remove the entries of a batch that it does not name.
    accelerate keeps a reference to it, so it may be called after the module's class was restored; it then calls the
    stock class's forward.
    """
    stock: Any = stock_class(cls).forward

    def made(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(self, args, kwargs) if isinstance(self, cls) else stock(self, *args, **kwargs)

    forward: Any = functools.update_wrapper(made, stock)
    del forward.__wrapped__  # accelerate would take it for the forward without its autocast
    forward.__signature__ = inspect.signature(stock)
    cls.inner_forward, cls.forward = cls.forward, forward


def _reduce(derived: Any) -> Any:
    return derived_class, derived._derived_from


copyreg.pickle(_Derived, _reduce)
