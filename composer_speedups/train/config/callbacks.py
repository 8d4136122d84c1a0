"""The keys of callbacks: what is measured, and what stops a run that goes wrong."""

from dataclasses import dataclass
from typing import Literal

from composer_speedups.core.settings import key

__all__ = ["CallbacksConfig", "DivergenceConfig", "FiniteLossConfig", "MemoryConfig", "ThroughputConfig"]


@dataclass
class ThroughputConfig:
    window: int = key(20, ge=1, le=100_000)
    """Batches the logged rate is averaged over."""
    warmup_batches: int = key(3, ge=0, le=8)
    """First batches left out of the steady state; batches that compile are always left out."""


@dataclass
class MemoryConfig:
    interval: int = key(10, ge=1)
    """Batches between two measurements."""


@dataclass
class FiniteLossConfig:
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A loss that is NaN or infinite stops the run (exit status 1), or its batch is left out of training."""
    max_skips: int = key(10, ge=1, le=1_000_000)
    """With skip: stop after this many such batches in a row."""


@dataclass
class DivergenceConfig:
    factor: float = key(1.5, ge=1, le=1e6)
    """The smoothed loss may be this many times what it was at the last good checkpoint (or the start) ..."""
    margin: float = key(0.1, ge=0, le=1e6)
    """... and this much more."""
    batches: int = key(50, ge=1, le=10_000_000)
    """Batches in a row above that which stop the run."""
    smoothing: float = key(0.9, ge=0, le=0.9999)
    """Weight of the past in the smoothed loss, an exponential moving average."""


@dataclass
class CallbacksConfig:
    throughput: ThroughputConfig | None = key(factory=ThroughputConfig)
    """Samples/s, real tokens/s, padding, MFU, warm-up; null turns it off."""
    memory: MemoryConfig | None = key(factory=MemoryConfig)
    """Peak memory and its parts; null turns it off."""
    finite_loss: FiniteLossConfig | None = key(factory=FiniteLossConfig)
    """What a loss that is no number does; it also keeps such weights out of checkpoints. null lets all pass."""
    divergence: DivergenceConfig | None = None
    """Stop when the loss climbs far above that of the last good checkpoint, and write no checkpoint meanwhile."""
