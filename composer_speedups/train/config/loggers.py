"""The keys of ``loggers``: see :mod:`.schema`."""

from dataclasses import dataclass
from typing import Literal

from composer_speedups.core.settings import key

__all__ = ["FileConfig", "LoggersConfig", "TensorboardConfig", "WandbConfig"]


@dataclass
class WandbConfig:
    project: str = "composer_speedups"
    """Project of the run."""
    entity: str | None = None
    """User or team of the run."""
    group: str | None = None
    """Group of the run."""
    tags: list[str] = key(factory=list)
    """Tags of the run."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """offline needs no account and writes under runs/<run_name>/wandb."""


@dataclass
class TensorboardConfig:
    flush_interval: int = key(100, ge=1)
    """Batches between two writes to runs/<run_name>/tensorboard."""


@dataclass
class FileConfig:
    flush_interval: int = key(100, ge=1)
    """Batches between two flushes of runs/<run_name>/log-rank<rank>.txt."""


@dataclass
class LoggersConfig:
    wandb: WandbConfig | None = None
    """Weights & Biases."""
    tensorboard: TensorboardConfig | None = None
    """TensorBoard event files."""
    file: FileConfig | None = None
    """A text file."""
