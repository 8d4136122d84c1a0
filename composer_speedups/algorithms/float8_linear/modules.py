"""torchao's float8 Linear for any number of rows, and a recorder of the matmuls inside it.

Import this module only when needed: it imports torchao, which is optional and slow to import.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from composer_speedups.core.operator_recorder import OperatorRecorder
from composer_speedups.kernels.autocast import to_autocast_dtype

_ROWS = 16  # torch._scaled_mm needs inner dimensions that are a multiple of it: the rows, in the weight's gradient
_ADDED = "_added_for_float8"  # names of the attributes that a plain Linear does not have
_SETTINGS = "_float8_settings"  # one of these attributes


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
        missing = -rows % _ROWS
        if missing == 0:
            output: Tensor = super().forward(input)
            return output
        padded: Tensor = super().forward(F.pad(input.reshape(rows, input.shape[-1]), (0, 0, 0, missing)))
        return padded[:rows].view(*input.shape[:-1], self.out_features)


def to_float8(module: nn.Linear, config: Any, settings: dict[str, Any] | None = None) -> None:
    """Convert a Linear to float8 in place, with torchao's state, keeping the module, its hooks and its mode.

    ``settings`` are stored for :func:`settings_of`.
    """
    state = RowPaddedFloat8Linear.from_float(module, config).__dict__
    added = {key: value for key, value in state.items() if key not in module.__dict__}
    added[_SETTINGS] = settings or {}
    module.__dict__.update(added, **{_ADDED: tuple(added)})
    module.__class__ = RowPaddedFloat8Linear


def settings_of(module: nn.Linear) -> dict[str, Any]:
    """Return the settings that were passed to :func:`to_float8`."""
    settings: dict[str, Any] = module.__dict__[_SETTINGS]
    return settings


def to_plain(module: nn.Linear) -> None:
    """Undo :func:`to_float8`."""
    for key in module.__dict__.pop(_ADDED):
        del module.__dict__[key]
    module.__class__ = nn.Linear


class Float8Recorder(OperatorRecorder):
    """Counts operators inside torchao's float8 tensors, too, and matmuls of two such tensors as ``float8_mm``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = [a for a in args if isinstance(a, Float8TrainingTensor)]
        if not operands:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func.overloadpacket.__name__ == "mm" and len(operands) == 2:
            self.counts["float8_mm"] += all(a._data.dtype.itemsize == 1 for a in operands)
        with self:  # torch disables a mode while it handles a call, so operators inside would not be counted
            return Float8TrainingTensor.__torch_dispatch__(func, types, args, kwargs or {})
