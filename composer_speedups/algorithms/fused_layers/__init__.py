"""Imported lazily, for :mod:`.beside`, whose process waits for neither Composer nor transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_speedups.algorithms.fused_layers.fused_layers import FusedLayers, apply_fused_layers

__all__ = ["FusedLayers", "apply_fused_layers"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from composer_speedups.algorithms.fused_layers import fused_layers

    return getattr(fused_layers, name)
