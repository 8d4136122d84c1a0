"""Every config key: its type, default, bounds, and under it the doc line that ``--help`` prints."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from composer_speedups.core.settings import LENGTH, key
from composer_speedups.data.config import DataConfig
from composer_speedups.distributed.config import FSDPConfig
from composer_speedups.tasks.config import ModelConfig
from composer_speedups.train.config.callbacks import CallbacksConfig, MemoryConfig, ThroughputConfig
from composer_speedups.train.config.loggers import FileConfig, LoggersConfig, TensorboardConfig, WandbConfig

__all__ = [
    "CallbacksConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "FSDPConfig",
    "FileConfig",
    "LoggersConfig",
    "MemoryConfig",
    "ModelConfig",
    "OptimizerConfig",
    "SchedulerConfig",
    "TensorboardConfig",
    "ThroughputConfig",
    "TrainerConfig",
    "WandbConfig",
]

NO_INTERPOLATIONS: Mapping[tuple[str | int, ...], tuple[str, Any]] = MappingProxyType({})


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
    """Reviews a forward pass and device; `auto` finds the largest that fits a GPU; null splits nothing."""
    on_out_of_memory: Literal["halve", "stop"] = "halve"
    """On one GPU: halve the micro-batch, keep the effective batch, and say so; or stop."""
    fsdp: FSDPConfig | None = None
    """Shard the model over the ranks; null is DDP, a whole copy on each."""
    parallelism_config: dict[str, Any] | None = None
    """Composer's own FSDP1 and tensor-parallel settings, passed on, in place of trainer.fsdp."""
    dist_timeout: float = key(300.0, gt=0, le=86_400)
    """Seconds that a rank waits for the others before it ends with an error."""
    progress_bar: bool = True
    """Composer's progress bar."""
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
    """A named run with checkpoint.interval that was interrupted goes on from its newest whole checkpoint."""
    trust_checkpoint: bool = False
    """Load a checkpoint without looking at what it holds: whoever wrote it can run any code here."""


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
    """Draw samples/s over the run to runs/<run_name>/throughput.png."""
    algorithms: dict[str, Any] = key(factory=dict)
    """Techniques by name, each with its settings: {tf32_matmul: {}, torch_compile: {scope: blocks}}."""
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

    # Values that were given as ${...}, for config/written.py; load_config sets it. Without an annotation it is no key.
    interpolations = NO_INTERPOLATIONS
