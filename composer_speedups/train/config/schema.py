"""Every config key: its type, default, bounds, and under it the doc line that ``--help`` prints."""

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
    """Apply weight decay to biases and LayerNorm too."""
    max_grad_norm: float | None = key(None, gt=0)
    """Clip the gradient to this global norm; null does not clip."""


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
    """Validate on this many batches only."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Where to train; auto takes a GPU when there is one."""
    precision: Literal["fp32", "amp_bf16", "amp_fp16"] = "fp32"
    """Composer's precision. The mixed_precision technique owns it when that is asked for."""
    microbatch_size: int | str | None = key(None, ge=1, words=("auto",))
    """Samples per forward pass and device; `auto` finds the largest that fits a GPU; null splits nothing."""
    on_out_of_memory: Literal["halve", "stop"] = "halve"
    """On one GPU: halve the micro-batch, keep the effective batch, and say so; or stop."""
    fsdp: FSDPConfig | None = None
    """Shard the model over the ranks; null is DDP, a whole copy on each."""
    parallelism_config: dict[str, Any] | None = None
    """Composer's own FSDP1 and tensor-parallel settings, passed on, in place of trainer.fsdp."""
    dist_timeout: float = key(300.0, gt=0, le=86_400)
    """Seconds that a rank waits for the others before it ends with an error."""
    progress_bar: bool = True
    """Show progress, samples/s, loss and time left: a bar on a terminal, lines in a log file."""
    deterministic: bool = False
    """Deterministic kernels only; slower."""


@dataclass
class CheckpointConfig:
    interval: str | None = key(None, units=("ep", "ba"), gt=0)
    """How often to write a checkpoint to runs/<run_name>/checkpoints; null writes none."""
    keep: int = key(1, ge=-1)
    """Checkpoints kept; -1 keeps all."""
    load: str | None = None
    """Checkpoint to resume from: weights, optimizer, schedule, data position and random state."""
    weights_only: bool = False
    """Load only the weights from checkpoint.load, and start the run afresh."""
    autoresume: bool = True
    """A named run with checkpoint.interval that was interrupted resumes from its newest whole checkpoint."""
    trust_checkpoint: bool = False
    """Load a checkpoint without looking at what it holds: whoever wrote it can run any code here."""


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


@dataclass
class BaselineConfig:
    algorithms: dict[str, Any] = key(factory=dict)
    """Techniques of the baseline, as under algorithms; {} is none."""
    batches: int = key(100, ge=10, le=100_000)
    """Batches that each trains, of a model that is then thrown away."""


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


@dataclass
class Config:
    run_name: str = key("run", name=True)
    """Name of the run's folder under runs_folder."""
    runs_folder: str = "runs"
    """Folder of all runs; an earlier run of the same name is kept beside it under a dated name."""
    seed: int = key(17, ge=0, lt=2**31)
    """Seed of the weights, the dropout and the shuffling."""
    on_unavailable: Literal["stop", "warn"] = "stop"
    """A technique that cannot engage here stops the run, or only warns."""
    bytecode: bool = True
    """Keep the packages' bytecode under ~/.cache where the environment keeps none: the next run imports faster."""
    export: bool = True
    """Write the trained model to runs/<run_name>/model in transformers' own format."""
    plot: bool = True
    """Draw samples/s, loss and accuracy over the run to runs/<run_name>/throughput.png."""
    algorithms: dict[str, Any] = key(factory=dict)
    """Techniques by name, each with its settings: {tf32_matmul: {}, torch_compile: {scope: blocks}}."""
    baseline: BaselineConfig | None = None
    """First train a few batches with these techniques and with those of the run, in turns, and report the ratio."""
    model: ModelConfig = key(factory=ModelConfig)
    """What is trained."""
    data: DataConfig = key(factory=DataConfig)
    """Reviews, tokenizer and DataLoader."""
    optimizer: OptimizerConfig = key(factory=OptimizerConfig)
    """AdamW; a technique may change its implementation, never these values."""
    scheduler: SchedulerConfig = key(factory=SchedulerConfig)
    """Learning-rate schedule."""
    trainer: TrainerConfig = key(factory=TrainerConfig)
    """What goes to Composer's Trainer."""
    checkpoint: CheckpointConfig = key(factory=CheckpointConfig)
    """Saving and resuming."""
    callbacks: CallbacksConfig = key(factory=CallbacksConfig)
    """Measurements."""
    loggers: LoggersConfig = key(factory=LoggersConfig)
    """Where the measurements go beside report.json."""

    # Values that were given as ${...}: load_config sets it for written(). Without an annotation it is no key.
    interpolations = NO_INTERPOLATIONS


def schema_keys(cls: type = Config, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Every dotted key with its field and type, sections before what they hold."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        yield prefix + field.name, field, hints[field.name]
        section = section_of(hints[field.name])
        if section is not None:
            yield from schema_keys(section, f"{prefix}{field.name}.")


def section_of(hint: Any) -> type | None:
    """The dataclass behind ``Section`` or ``Section | None``; None for a plain value."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((o for o in options if dataclasses.is_dataclass(o) and isinstance(o, type)), None)
