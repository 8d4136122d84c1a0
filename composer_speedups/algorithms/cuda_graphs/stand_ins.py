"""Parameters that stand in for a model's own while it is captured.

While a loss is alive, so are autograd's nodes that add up gradients of the parameters, and each belongs to the stream
that it was made on. A capture that met them would make that stream wait for its own, which CUDA forbids. Other leaves
of the same memory have nodes of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import nn

__all__ = ["StandIns"]


class StandIns:
    """One for each parameter of a model, shared parameters included once.

    Args:
        model: Whose parameters they stand in for; they lie in the same memory.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
        self._stand_ins = {parameter: _leaf(parameter) for _, _, parameter in self._places}

    def of(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [self._stand_ins[parameter] for parameter in parameters]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The modules hold them, and afterwards their own parameters again."""
        try:
            for module, name, parameter in self._places:
                setattr(module, name, self._stand_ins[parameter])  # RNNs keep lists of their own, which follow this
            yield
        finally:
            for module, name, parameter in self._places:
                setattr(module, name, parameter)


def _leaf(parameter: nn.Parameter) -> nn.Parameter:
    leaf = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    leaf.__dict__.update(parameter.__dict__)
    return leaf
