"""Replace the ``forward`` of one module, by an attribute of the module.

It is not a closure or a bound method: copies would compute with the original module, and it could not be pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

Inner = Callable[..., Any] | None  # the ``forward`` that the instance had already; None for the class's


def replace_forward(module: nn.Module, function: Callable[..., Any], *settings: Any) -> partial[Any]:
    """Make ``module.forward(…)`` call ``function(module, inner, *settings, …)``, and return the new ``forward``.

    ``function`` stands at the top level of a file, and passes ``module`` and ``inner`` on to :func:`call_inner`.
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


def restore_forward(module: nn.Module) -> None:
    """Undo the last :func:`replace_forward`, unless other code replaced or deleted the ``forward`` since."""
    forward: Any = vars(module).get("forward")
    if isinstance(forward, partial) and vars(forward).get("__module__") == __name__:
        del vars(module)["forward"]
        if forward.args[1] is not None:
            vars(module)["forward"] = forward.args[1]
