"""What captured graphs read and write in the place of a model's parameters and of their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn


class ParameterPlaceholders:
    """Parameters that stand in for a model's own while it is captured; shared ones have one.

    While a loss is alive, so are autograd's nodes that add up gradients of the parameters, and each belongs to the
    stream that it was made on. A capture that met them would make that stream wait for its own, which CUDA forbids.
    Other leaves of the same memory have nodes of their own.

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


class SharedGradients:
    """One buffer a parameter for all captured graphs, for the gradients of whatever graph was replayed last.

    autograd takes a buffer itself as ``parameter.grad`` where there was none.

    Args:
        parameters: Those that are trained get gradients.
        places: Memory to use as the buffers of some, each of its parameter's shape and dtype.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], places: Mapping[nn.Parameter, Tensor] | None = None) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self._buffers = dict(places or {})

    def prepare(self, gradients: Sequence[Tensor | None]) -> frozenset[nn.Parameter]:
        """Make the buffers that gradients such as these need, outside of a capture; the parameters that have some."""
        found = [(p, g) for p, g in zip(self.parameters, gradients, strict=True) if g is not None]
        for parameter, gradient in found:
            if parameter not in self._buffers:
                self._buffers[parameter] = torch.empty_like(gradient)
        return frozenset(parameter for parameter, _ in found)

    def fill(self, gradients: Sequence[Tensor | None], begun: Container[nn.Parameter] = ()) -> None:
        """Write the gradients to their buffers; those of ``begun`` are added to what is there."""
        found = [(p, g) for p, g in zip(self.parameters, gradients, strict=True) if g is not None]
        for write, pairs in (
            (torch._foreach_copy_, [(self._buffers[p], g) for p, g in found if p not in begun]),
            (torch._foreach_add_, [(self._buffers[p], g) for p, g in found if p in begun]),
        ):
            if pairs:
                write([buffer for buffer, _ in pairs], [gradient for _, gradient in pairs])

    def release(self) -> None:
        """Give parameters whose gradient lies in a buffer a copy of it, before the buffer is written to."""
        for parameter, buffer in self._buffers.items():
            if parameter.grad is not None and parameter.grad.data_ptr() == buffer.data_ptr():
                parameter.grad = parameter.grad.clone()

    def of(self, parameters: Iterable[nn.Parameter], taught: Container[nn.Parameter]) -> list[Tensor | None]:
        """The buffers of ``parameters``; None for those that are not among ``taught``."""
        return [self._buffers[p].detach() if p in taught else None for p in parameters]
