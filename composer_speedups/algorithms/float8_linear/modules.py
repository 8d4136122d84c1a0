"""torchao's float8 Linear for any number of rows, and a recorder that sees the matmuls inside it.

Imports torchao, so import it where it is needed: torchao is an extra, and slow to import.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from composer_speedups.core.operator_recorder import OperatorRecorder

_ROWS = 16  # inner dimensions of torch._scaled_mm are multiples of it; in the weight's gradient that is rows
_ADDED = "_added_for_float8"  # attributes that a plain Linear has not
_SETTINGS = "_float8_settings"  # one of them


class RowPaddedFloat8Linear(Float8Linear):  # type: ignore[misc]
    """torchao's Float8Linear, padding its input with rows of zeros to a multiple of 16.

    They change no scale and no sum, so outputs and gradients are those of the real rows. Without them a last batch
    of odd size would stop the run in its backward pass.
    """

    def forward(self, input: Tensor) -> Tensor:
        device_type = input.device.type
        if torch.is_autocast_enabled(device_type):  # torchao asks for a GPU's autocast alone
            input = input.to(torch.get_autocast_dtype(device_type))
        rows = input.shape[:-1].numel()
        if rows == 0:  # an expert without tokens: torchao would ask for the maximum of nothing
            return F.linear(input, self.weight, self.bias)
        missing = -rows % _ROWS
        if missing == 0:
            output: Tensor = super().forward(input)
            return output
        padded: Tensor = super().forward(F.pad(input.reshape(rows, input.shape[-1]), (0, 0, 0, missing)))
        return padded[:rows].view(*input.shape[:-1], self.out_features)


def to_float8(module: nn.Linear, config: Any, settings: dict[str, Any] | None = None) -> None:
    """Turn a Linear into a float8 one in place, with torchao's own state: the module, its hooks and mode stay.

    ``settings`` are for :func:`settings_of` to read back.
    """
    state = RowPaddedFloat8Linear.from_float(module, config).__dict__
    added = {key: value for key, value in state.items() if key not in module.__dict__}
    added[_SETTINGS] = settings or {}
    module.__dict__.update(added, **{_ADDED: tuple(added)})
    module.__class__ = RowPaddedFloat8Linear


def settings_of(module: nn.Linear) -> dict[str, Any]:
    """The settings that :func:`to_float8` was given."""
    settings: dict[str, Any] = module.__dict__[_SETTINGS]
    return settings


def to_plain(module: nn.Linear) -> None:
    """Undo :func:`to_float8`."""
    for key in module.__dict__.pop(_ADDED):
        del module.__dict__[key]
    module.__class__ = nn.Linear


class Float8Recorder(OperatorRecorder):
    """Counts operators inside torchao's float8 tensors too, and matmuls of two such tensors as ``float8_mm``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = [a for a in args if isinstance(a, Float8TrainingTensor)]
        if not operands:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func.overloadpacket.__name__ == "mm" and len(operands) == 2:
            self.counts["float8_mm"] += all(a._data.dtype.itemsize == 1 for a in operands)
        with self:  # torch calls a mode with itself switched off, and would run what is inside unseen
            return Float8TrainingTensor.__torch_dispatch__(func, types, args, kwargs or {})
