"""The callbacks' settings, which are the config keys under ``callbacks``; they do not import torch."""

from typing import Literal

from pydantic import Field

from composer_speedups.core.settings import Settings

__all__ = ["DivergenceConfig", "FiniteLossConfig", "MemoryConfig", "ThroughputConfig"]

FIRST_VALUE_BY = 9  # batches; afterwards ThroughputMonitor logs a value even if every batch compiled


class ThroughputConfig(Settings):
    window: int = Field(20, ge=1, le=100_000)
    """Number of batches that logged rates average over."""
    warmup_batches: int = Field(3, ge=0, le=FIRST_VALUE_BY - 1)
    """Number of first batches excluded from the steady state; batches that compile are always excluded."""


class MemoryConfig(Settings):
    interval: int = Field(10, ge=1)
    """Number of batches between two measurements."""


class FiniteLossConfig(Settings):
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Stop the run at a NaN or infinite loss (exit status 1), or skip the batch."""
    max_skips: int = Field(10, ge=1, le=1_000_000)
    """With skip: stop after this many consecutive skipped batches."""


class DivergenceConfig(Settings):
    factor: float = Field(1.5, ge=1, le=1e6)
    """Limit on the smoothed loss, as a multiple of its value at the last good checkpoint (or at the start) ..."""
    margin: float = Field(0.1, ge=0, le=1e6)
    """... plus this margin."""
    batches: int = Field(50, ge=1, le=10_000_000)
    """Number of consecutive batches above the limit after which the run stops."""
    smoothing: float = Field(0.9, ge=0, le=0.9999)
    """Weight of the past in the exponential moving average of the loss."""
