"""The callbacks' settings, which are the config keys under ``callbacks``; they do not import torch."""

from typing import Annotated, Literal

from pydantic import Field

from composer_speedups.core.settings import ComposerTime, Settings

FIRST_VALUE_BY = 9  # batches; afterwards ThroughputMonitor logs a value even if every batch compiled

_SMALLER_IS_BETTER = ("loss", "error", "perplexity", "entropy", "rmse", "mae")


def smaller_is_better(metric: str) -> bool:
    """Whether the smallest value of a metric is best, by its name."""
    return any(word in metric.lower() for word in _SMALLER_IS_BETTER)


class ThroughputConfig(Settings):
    window: int = Field(20, ge=1, le=100_000)
    """Number of batches that logged rates average over."""
    warmup_batches: int = Field(3, ge=0, le=FIRST_VALUE_BY - 1)
    """Number of first batches excluded from the steady state; batches that compile are always excluded."""
    interval: int = Field(10, ge=1)
    """Number of batches between two logged values."""


class MemoryConfig(Settings):
    """MemoryAnatomy has no settings: it is on, or null."""


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


class BestWeightsConfig(Settings):
    metric: str = "loss"
    """Metric of the evaluations to compare, as in report.json: loss, accuracy, entity_f1."""
    mode: Literal["min", "max"] | None = None
    """Whether the smallest or the largest value is best; null: the smallest loss, error or perplexity, and the largest
    value of any other metric."""


class EarlyStoppingConfig(BestWeightsConfig):
    patience: Annotated[str, ComposerTime(("ep", "ba"), gt=0)] = "1ep"
    """Stop at the first evaluation that comes more than this after the last improvement, as a Composer time."""
    min_delta: float = Field(0.0, ge=0)
    """Only a change by more than this counts as an improvement."""
