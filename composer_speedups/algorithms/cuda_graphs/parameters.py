"""Placeholders for a model's parameters during capture, and buffers for the gradients of captured graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn


class ParameterPlaceholders:
    """Parameters that replace a model's parameters while it is captured; they use the same memory.

    As long as a loss exists, autograd keeps the nodes that accumulate the parameters' gradients, and each node belongs
    to the stream on which it was created. A capture that uses such a node would make that stream wait for the capturing
    stream, which CUDA forbids. Other leaf tensors with the same memory have their own nodes.

    Args:
        model: The model; a parameter shared by several modules has one placeholder.
    """

    def __init__(self, model: nn.Module) -> None:
        self._slots = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
        self._placeholders = {parameter: _leaf(parameter) for _, _, parameter in self._slots}

    def of(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [self._placeholders[parameter] for parameter in parameters]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the placeholders into the modules, and restore the parameters on exit."""
        try:
            for module, name, parameter in self._slots:
                setattr(module, name, self._placeholders[parameter])  # setattr also updates the weight lists of RNNs
            yield
        finally:
            for module, name, parameter in self._slots:
                setattr(module, name, parameter)


def _leaf(parameter: nn.Parameter) -> nn.Parameter:
    leaf = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    leaf.__dict__.update(parameter.__dict__)
    return leaf


class SharedGradients:
    """One gradient buffer per parameter, shared by all captured graphs; it has the gradient of the last replay.

    If a parameter has no gradient, autograd sets ``parameter.grad`` to the buffer itself.

    Args:
        parameters: The model's parameters; those that require gradients are used.
        buffers: Existing tensors to use as buffers of some parameters, with the parameter's shape and dtype.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], buffers: Mapping[nn.Parameter, Tensor] | None = None
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self._buffers = dict(buffers or {})

    def prepare(self, gradients: Sequence[Tensor | None]) -> frozenset[nn.Parameter]:
        """Allocate the buffers for such gradients, outside of a capture; return the parameters with a gradient."""
        found = [(p, g) for p, g in zip(self.parameters, gradients, strict=True) if g is not None]
        for parameter, gradient in found:
            if parameter not in self._buffers:
                self._buffers[parameter] = torch.empty_like(gradient)
        return frozenset(parameter for parameter, _ in found)

    def fill(self, gradients: Sequence[Tensor | None], begun: Container[nn.Parameter] = ()) -> None:
        """Write the gradients to their buffers, or add them for the parameters in ``begun``."""
        found = [(p, g) for p, g in zip(self.parameters, gradients, strict=True) if g is not None]
        for write, pairs in (
            (torch._foreach_copy_, [(self._buffers[p], g) for p, g in found if p not in begun]),
            (torch._foreach_add_, [(self._buffers[p], g) for p, g in found if p in begun]),
        ):
            if pairs:
                write([buffer for buffer, _ in pairs], [gradient for _, gradient in pairs])

    def release(self) -> None:
        """Copy the gradients that are buffers, before the buffers are overwritten."""
        for parameter, buffer in self._buffers.items():
            if parameter.grad is not None and parameter.grad.data_ptr() == buffer.data_ptr():
                parameter.grad = parameter.grad.clone()

    def of(self, parameters: Iterable[nn.Parameter], trained: Container[nn.Parameter]) -> list[Tensor | None]:
        """Return the buffers of ``parameters``, with None for those not in ``trained``."""
        return [self._buffers[p].detach() if p in trained else None for p in parameters]
