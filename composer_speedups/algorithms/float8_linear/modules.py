"""torchao's float8 Linear for any number of rows. This module imports torchao, which is optional and slow to import."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torchao.float8.float8_linear import Float8Linear

from composer_speedups.kernels.common import to_autocast_dtype

# torch._scaled_mm needs dimensions that are a multiple of it, also the rows, for the weight's gradient
_MULTIPLE = 16

_ADDED = "_added_for_float8"  # names of the attributes that a plain Linear does not have


class RowPaddedFloat8Linear(Float8Linear):  # type: ignore[misc]
    """torchao's Float8Linear, with its input padded by rows of zeros to a multiple of 16.

    The zeros do not change scales and sums, so outputs and gradients of the real rows are the same. Without padding,
    the backward pass of a batch with another number of rows would raise an error.
    """

    def forward(self, input: Tensor) -> Tensor:
        input = to_autocast_dtype(input)  # torchao casts only on a GPU
        rows = input.shape[:-1].numel()
        if rows == 0:  # an expert without tokens, of which torchao could not compute the maximum
            return F.linear(input, self.weight, self.bias)
        missing = -rows % _MULTIPLE
        if missing == 0:
            return super().forward(input)  # type: ignore[no-any-return]
        padded: Tensor = super().forward(F.pad(input.reshape(rows, input.shape[-1]), (0, 0, 0, missing)))
        return padded[:rows].view(*input.shape[:-1], self.out_features)


def convertible(model: nn.Module) -> list[nn.Linear]:
    """The plain Linears inside a ModuleList, that is, in the encoder's blocks, whose sizes are multiples of 16."""
    inside = {m for blocks in model.modules() if isinstance(blocks, nn.ModuleList) for m in blocks.modules()}
    return [
        module
        for module in model.modules()
        if type(module) is nn.Linear and module in inside and all(size % _MULTIPLE == 0 for size in module.weight.shape)
    ]


def to_float8(module: nn.Linear, config: Any) -> None:
    """Convert a Linear to float8 in place, with torchao's state, keeping the module, its hooks and its mode."""
    state = RowPaddedFloat8Linear.from_float(module, config).__dict__
    added = {key: value for key, value in state.items() if key not in module.__dict__}
    module.__dict__.update(added, **{_ADDED: tuple(added)})
    module.__class__ = RowPaddedFloat8Linear


def to_plain(module: nn.Linear) -> None:
    for key in module.__dict__.pop(_ADDED):
        del module.__dict__[key]
    module.__class__ = nn.Linear
