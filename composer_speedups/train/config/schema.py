"""All config keys: type, default, bounds, and below each the doc line that ``--help`` prints."""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from composer_speedups.core.settings import LENGTH, key
from composer_speedups.data.config import DataConfig
from composer_speedups.distributed import FSDPConfig
from composer_speedups.tasks.config import ModelConfig

__all__ = [
    "BaselineConfig",
    "CallbacksConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DivergenceConfig",
    "FSDPConfig",
    "FileConfig",
    "FiniteLossConfig",
    "LoggersConfig",
    "MemoryConfig",
    "ModelConfig",
    "OptimizerConfig",
    "SchedulerConfig",
    "TensorboardConfig",
    "ThroughputConfig",
    "TrainerConfig",
    "WandbConfig",
    "schema_keys",
    "section_of",
]

NO_INTERPOLATIONS: Mapping[tuple[str | int, ...], tuple[str, Any]] = types.MappingProxyType({})


@dataclass
class OptimizerConfig:
    lr: float = key(1e-4, gt=0, le=100)
    """Peak learning rate of AdamW."""
    weight_decay: float = key(1e-2, ge=0, le=100)
    """Decoupled weight decay."""
    beta1: float = key(0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""
    beta2: float = key(0.999, ge=0, lt=1)
    """Decay of AdamW's second moment."""
    eps: float = key(1e-8, gt=0, le=1)
    """Added to AdamW's denominator."""
    decay_bias_and_norm: bool = False
    """Apply weight decay to biases and LayerNorm weights too."""
    max_grad_norm: float | None = key(None, gt=0)
    """Clip the gradient to this global L2 norm; null disables clipping."""


@dataclass
class SchedulerConfig:
    name: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup: str = key("0.1dur", units=(*LENGTH, "dur"))
    """Linear warm-up, as a Composer time: 0.1dur, 100ba."""
    final_fraction: float = key(0.0, ge=0, le=1)
    """Learning rate at the end as a fraction of the peak."""


@dataclass
class TrainerConfig:
    max_duration: str = key("2ep", units=LENGTH, gt=0)
    """How long to train, as a Composer time: 2ep, 500ba."""
    eval_interval: str = key("1ep", units=("ep", "ba"), gt=0)
    """How often to validate."""
    eval_batches: int | None = key(None, ge=1)
    """Number of batches to validate on; null for all."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Where to train; auto uses a GPU if there is one."""
    precision: Literal["fp32", "amp_bf16", "amp_fp16"] = "fp32"
    """Composer's precision. The mixed_precision technique sets it instead if requested."""
    microbatch_size: int | str | None = key(None, ge=1, words=("auto",))
    """Samples per forward pass and device; `auto` finds the largest size that fits a GPU; null does not split
    batches."""
    on_out_of_memory: Literal["halve", "stop"] = "halve"
    """On one GPU: halve the micro-batch and keep the effective batch, with a warning; or stop."""
    fsdp: FSDPConfig | None = None
    """Shard the model across ranks; null trains with DDP, a full replica on each rank."""
    parallelism_config: dict[str, Any] | None = None
    """Composer's own FSDP1 and tensor-parallel settings, instead of trainer.fsdp."""
    dist_timeout: float = key(300.0, gt=0, le=86_400)
    """Seconds that a rank waits for the others before it fails."""
    progress_bar: bool = True
    """Show progress, samples/s, loss and time left: a bar on a terminal, lines in a log file."""
    deterministic: bool = False
    """Use deterministic kernels only; slower."""


@dataclass
class CheckpointConfig:
    interval: str | None = key(None, units=("ep", "ba"), gt=0)
    """How often to write a checkpoint to runs/<run_name>/checkpoints; null writes none."""
    keep: int = key(1, ge=-1)
    """Number of checkpoints to keep; -1 keeps all."""
    load: str | None = None
    """Checkpoint to resume from: weights, optimizer, schedule, data position and random state."""
    weights_only: bool = False
    """Load only the weights from checkpoint.load, and start a new run."""
    autoresume: bool = True
    """Resume an interrupted run with this run_name and a checkpoint.interval from its newest complete checkpoint."""
    trust_checkpoint: bool = False
    """Load a checkpoint without checking its contents: its author can execute any code on this machine."""


@dataclass
class ThroughputConfig:
    window: int = key(20, ge=1, le=100_000)
    """Number of batches that logged rates average over."""
    warmup_batches: int = key(3, ge=0, le=8)
    """Number of first batches excluded from the steady state; batches that compile are always excluded."""


@dataclass
class MemoryConfig:
    interval: int = key(10, ge=1)
    """Number of batches between two measurements."""


@dataclass
class FiniteLossConfig:
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Stop the run at a NaN or infinite loss (exit status 1), or skip the batch."""
    max_skips: int = key(10, ge=1, le=1_000_000)
    """With skip: stop after this many consecutive skipped batches."""


@dataclass
class DivergenceConfig:
    factor: float = key(1.5, ge=1, le=1e6)
    """Limit on the smoothed loss, as a multiple of its value at the last good checkpoint (or at the start) ..."""
    margin: float = key(0.1, ge=0, le=1e6)
    """... plus this margin."""
    batches: int = key(50, ge=1, le=10_000_000)
    """Number of consecutive batches above the limit after which the run stops."""
    smoothing: float = key(0.9, ge=0, le=0.9999)
    """Weight of the past in the exponential moving average of the loss."""


@dataclass
class CallbacksConfig:
    throughput: ThroughputConfig | None = key(factory=ThroughputConfig)
    """Samples/s, real tokens/s, padding, MFU, warm-up; null disables it."""
    memory: MemoryConfig | None = key(factory=MemoryConfig)
    """Peak memory and its breakdown; null disables it."""
    finite_loss: FiniteLossConfig | None = key(factory=FiniteLossConfig)
    """Handle NaN and infinite losses, and keep NaN weights out of checkpoints; null disables it."""
    divergence: DivergenceConfig | None = None
    """Stop when the loss climbs far above its value at the last good checkpoint, and do not write checkpoints
    meanwhile."""


@dataclass
class BaselineConfig:
    algorithms: dict[str, Any] = key(factory=dict)
    """Techniques of the baseline, as under algorithms; {} for none."""
    batches: int = key(100, ge=10, le=100_000)
    """Number of batches that each set trains, on a temporary model."""


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
    """offline needs no account and writes to runs/<run_name>/wandb."""


@dataclass
class TensorboardConfig:
    flush_interval: int = key(100, ge=1)
    """Number of batches between two writes to runs/<run_name>/tensorboard."""


@dataclass
class FileConfig:
    flush_interval: int = key(100, ge=1)
    """Number of batches between two flushes of runs/<run_name>/log-rank<rank>.txt."""


@dataclass
class LoggersConfig:
    wandb: WandbConfig | None = None
    """Weights & Biases."""
    tensorboard: TensorboardConfig | None = None
    """TensorBoard event files."""
    file: FileConfig | None = None
    """A text file."""


@dataclass
class Config:
    run_name: str = key("run", name=True)
    """Name of the run's folder under runs_folder."""
    runs_folder: str = "runs"
    """Folder of all runs; an earlier run of the same name is kept under a dated name."""
    seed: int = key(17, ge=0, lt=2**31)
    """Seed of the weights, dropout and shuffling."""
    on_unavailable: Literal["stop", "warn"] = "stop"
    """stop: a technique that cannot engage stops the run; warn: the run warns and continues without it."""
    export: bool = True
    """Write the trained model to runs/<run_name>/model in transformers' format."""
    plot: bool = True
    """Draw samples/s, loss and accuracy over the run to runs/<run_name>/throughput.png."""
    algorithms: dict[str, Any] = key(factory=dict)
    """Techniques by name, each with its settings: {tf32_matmul: {}, torch_compile: {scope: blocks}}."""
    baseline: BaselineConfig | None = None
    """Before training, compare these techniques with the run's in alternating turns of a few batches, and report
    the ratio."""
    model: ModelConfig = key(factory=ModelConfig)
    """The model and the task."""
    data: DataConfig = key(factory=DataConfig)
    """Samples, tokenizer and DataLoader."""
    optimizer: OptimizerConfig = key(factory=OptimizerConfig)
    """AdamW; a technique may change its implementation but not these values."""
    scheduler: SchedulerConfig = key(factory=SchedulerConfig)
    """Learning-rate schedule."""
    trainer: TrainerConfig = key(factory=TrainerConfig)
    """Settings of Composer's Trainer."""
    checkpoint: CheckpointConfig = key(factory=CheckpointConfig)
    """Saving and resuming."""
    callbacks: CallbacksConfig = key(factory=CallbacksConfig)
    """Measurements."""
    loggers: LoggersConfig = key(factory=LoggersConfig)
    """Where metrics are logged in addition to report.json."""

    # Values that were set as ${...}; load_config sets it for written(). Without an annotation it is not a key.
    interpolations = NO_INTERPOLATIONS


def schema_keys(cls: type = Config, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Every dotted key with its field and type; sections precede their keys."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        yield prefix + field.name, field, hints[field.name]
        section = section_of(hints[field.name])
        if section is not None:
            yield from schema_keys(section, f"{prefix}{field.name}.")


def section_of(hint: Any) -> type | None:
    """The dataclass of ``Section`` or ``Section | None``; None for a plain value."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((o for o in options if dataclasses.is_dataclass(o) and isinstance(o, type)), None)
