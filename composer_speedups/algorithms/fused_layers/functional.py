"""Functions that fuse the layers of an unpadded model outside of a Trainer."""

from __future__ import annotations

from torch import nn

from composer_speedups.algorithms.fused_layers.fusing import (
    LastLayer,
    Precision,
    float8_scales,
    fuse,
    load_float8_scales,
    unfuse,
)

__all__ = ["apply_fused_layers", "float8_scales", "load_float8_scales", "undo_fused_layers"]


def apply_fused_layers(
    model: nn.Module, last_layer: LastLayer = "needed", precision: Precision = "autocast"
) -> list[str]:
    """Make the encoder layers of an unpadded model compute with fused kernels; see :func:`.fuse`."""
    if last_layer not in ("needed", "all"):
        raise ValueError(f"last_layer must be 'needed' or 'all', not {last_layer!r}")
    if precision not in ("autocast", "fp8"):
        raise ValueError(f"precision must be 'autocast' or 'fp8', not {precision!r}")
    return fuse(model, last_layer, precision)


def undo_fused_layers(model: nn.Module) -> list[str]:
    """Restore the classes of layers and embeddings, and return the names of the changed modules."""
    return unfuse(model)
