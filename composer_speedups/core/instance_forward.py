"""Replace the ``forward`` of one module, so that its copies and pickles compute with their own parameters.

The new ``forward`` is an attribute of the module: the module's class, parameters and their names do not change, and a
class that is assigned later is used. It is not a closure or a bound method: ``copy.deepcopy`` would keep the original
module in a closure, and it could not be pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

Inner = Callable[..., Any] | None


def replace_forward(module: nn.Module, function: Callable[..., Any], *settings: Any) -> partial[Any]:
    """Make ``module.forward(…)`` call ``function(module, inner, *settings, …)``, and return the new ``forward``.

    Args:
        module: Changed in place.
        function: A function at the top level of a file, which passes ``module`` and ``inner`` on to
            :func:`call_inner`. ``inner`` is the ``forward`` that the instance had already; None for the class's.
        settings: Further arguments of the function.
    """
    forward = partial(function, module, vars(module).get("forward"), *settings)
    forward.__module__ = __name__  # by which it is known as this package's
    vars(module)["forward"] = forward
    return forward


def call_inner(module: nn.Module, inner: Inner, /, *args: Any, **kwargs: Any) -> Any:
    """Run the ``forward`` that was replaced."""
    if inner is not None:
        return inner(*args, **kwargs)
    # Not a bound method: compiled code would be specific to one block's method, and could not be reused by the others.
    return type(module).forward(module, *args, **kwargs)


def has_forward(module: nn.Module, function: Callable[..., Any]) -> bool:
    """Return whether the module runs ``function`` since :func:`replace_forward`."""
    forward: Any = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func is function


def restore_forward(module: nn.Module) -> None:
    """Undo the last :func:`replace_forward`, unless other code replaced or deleted the ``forward`` since."""
    forward: Any = vars(module).get("forward")
    if isinstance(forward, partial) and vars(forward).get("__module__") == __name__:
        del vars(module)["forward"]
        if forward.args[1] is not None:
            vars(module)["forward"] = forward.args[1]
