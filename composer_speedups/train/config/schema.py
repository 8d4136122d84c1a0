"""All config keys: type, default, bounds, and below each the doc line that ``--help`` prints."""

import functools
import os
import types
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from string import ascii_lowercase, digits
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    SerializerFunctionWrapHandler,
    create_model,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from composer_speedups.callbacks.config import (
    BestWeightsConfig,
    DivergenceConfig,
    EarlyStoppingConfig,
    FiniteLossConfig,
    MemoryConfig,
    ThroughputConfig,
)
from composer_speedups.core.files import with_working_directory
from composer_speedups.core.registry import technique_class, technique_names
from composer_speedups.core.settings import DURATION_UNITS, Check, ComposerTime, FileName, Settings, keys_of
from composer_speedups.distributed import FSDPConfig
from composer_speedups.tasks.settings import (
    TASKS,
    AnyTask,
    ClassificationSettings,
    DataConfig,
    ModelConfig,
    TaskSettings,
)

OBJECT_STORES = ("s3://", "gs://", "oci://", "azure://", "dbfs:/")
"""Beginnings of addresses from which Composer downloads checkpoints."""


@functools.cache
def _techniques() -> type[Settings]:
    """A section with a key for the settings of each technique."""
    sections: dict[str, Any] = {name: (technique_class(name) | None, None) for name in technique_names()}
    return create_model("Techniques", __base__=Settings, **sections)


def as_mapping(algorithms: Any) -> Any:
    """``[a, {b: {x: 1}}]`` and ``{a: {}, b: {x: 1}}`` are equivalent, and so are null and ``[]``."""
    if algorithms is None:
        return {}
    if isinstance(algorithms, list):
        items = [item for entry in algorithms for item in (entry.items() if isinstance(entry, dict) else [(entry, {})])]
        names = [name for name, _ in items]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"lists {twice!r} twice; list it once")
        if odd := next((name for name in names if not isinstance(name, str)), None):
            raise ValueError(f"must contain technique names, not {odd!r}")
        algorithms = dict(items)
    if not isinstance(algorithms, Mapping):
        raise ValueError(f"must contain technique names, not {algorithms!r}")
    return dict(algorithms)


def _without_those_off(algorithms: Any) -> Any:
    """Leave out techniques that null or false switches off; true means the default settings."""
    given = as_mapping(algorithms).items()
    return {name: {} if value is True else value for name, value in given if value is not None and value is not False}


@dataclass(frozen=True)
class _Checked:
    """Metadata of a mapping that is checked as a section, and kept as it was written: techniques are built for each
    Trainer, such as the baseline's, and report.json and the resume guard compare the settings that were asked for."""

    section: Callable[[], type[Settings]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def check(self, values: dict[str, Any]) -> dict[str, Any]:
        self.section().model_validate(values)
        return values


Techniques = Annotated[dict[str, Any], BeforeValidator(_without_those_off), _Checked(_techniques)]


class OptimizerConfig(Settings):
    lr: float = Field(1e-4, gt=0, le=100)
    """Peak learning rate of AdamW."""
    weight_decay: float = Field(1e-2, ge=0, le=100)
    """Decoupled weight decay."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of AdamW's second moment."""
    eps: float = Field(1e-8, gt=0, le=1)
    """Added to AdamW's denominator."""
    decay_bias_and_norm: bool = False
    """Apply weight decay to biases and LayerNorm weights too."""
    max_grad_norm: float | None = Field(None, gt=0)
    """Clip the gradient to this global L2 norm; null disables clipping."""


class SchedulerConfig(Settings):
    name: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup: Annotated[str, ComposerTime((*DURATION_UNITS, "dur"))] = "0.1dur"
    """Linear warm-up, as a Composer time: 0.1dur, 100ba."""


class TrainerConfig(Settings):
    max_duration: Annotated[str, ComposerTime(DURATION_UNITS, gt=0)] = "2ep"
    """How long to train, as a Composer time: 2ep, 500ba."""
    eval_interval: Annotated[str | None, ComposerTime(("ep", "ba"), gt=0)] = "1ep"
    """How often to validate; null validates only after training."""
    eval_batches: int | None = Field(None, ge=1)
    """Number of batches to validate on; null for all."""
    early_stopping: EarlyStoppingConfig | None = None
    """Stop training when a metric of the evaluations no longer improves; null trains for max_duration."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Where to train; auto uses a GPU if there is one."""
    precision: Literal["fp32", "amp_bf16", "amp_fp16"] = "fp32"
    """Composer's precision. The mixed_precision technique sets it instead if requested."""
    microbatch_size: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Samples per forward pass and device; `auto` finds the largest that fits a GPU; null does not split batches."""
    microbatch_tokens: int | None = Field(None, ge=1)
    """Real tokens per forward pass and device at most; a longer sample is a micro-batch of its own."""
    on_out_of_memory: Literal["halve", "stop"] = "halve"
    """On one GPU: halve the micro-batch and keep the effective batch, with a warning; or stop."""
    fsdp: FSDPConfig | None = None
    """Shard the model across ranks; null trains with DDP, a full replica on each rank."""
    dist_timeout: float = Field(300.0, gt=0, le=86_400)
    """Seconds that a rank waits for the others before it fails."""
    progress_bar: bool = True
    """Show progress, samples/s, loss, time left, and once an estimate of the whole time and of memory: a bar on a
    terminal, lines in a log file."""
    deterministic: bool = False
    """Use deterministic kernels only; slower."""

    def checks(self) -> Iterator[Check]:
        if self.fsdp is not None:
            no_auto = "auto is not supported with trainer.fsdp; set a number, or null"
            yield self.microbatch_size == "auto", "microbatch_size", no_auto
        if self.microbatch_tokens is not None:
            searched = "cannot be combined with microbatch_size=auto; set a number, or null"
            yield self.microbatch_size == "auto", "microbatch_tokens", searched
            sharded = "gives ranks different numbers of forward passes, which FSDP cannot take; set microbatch_size"
            yield self.fsdp is not None, "microbatch_tokens", sharded
        if self.early_stopping is not None:
            unevaluated = "needs evaluations during the training; set trainer.eval_interval"
            yield self.eval_interval is None, "early_stopping", unevaluated
            times = self.early_stopping.patience, self.eval_interval or "0", self.max_duration
            (waits, every, end), units = zip(*map(_number_and_unit, times), strict=True)
            never = f"is {times[0]}, too long to stop a training of {times[2]} early; lower it, or train for longer"
            yield len({*units}) == 1 and (end - 1) // every * every - every <= waits, "early_stopping.patience", never


class CheckpointConfig(Settings):
    interval: Annotated[str | None, ComposerTime(("ep", "ba"), gt=0)] = None
    """How often to write a checkpoint to runs/<run_name>/checkpoints; null writes none."""
    keep: int = Field(1, ge=-1)
    """Number of checkpoints to keep; -1 keeps all."""
    best: BestWeightsConfig | None = None
    """Export the weights of the best evaluation, which every checkpoint then contains too; null exports the last."""
    load: str | None = None
    """Checkpoint of this run's folder to continue from: weights, optimizer, schedule, data position and random state.
    Of another run, a file or an address such as s3://BUCKET/NAME.pt, with weights_only or trust_checkpoint."""
    weights_only: bool = False
    """Load only the weights from checkpoint.load, and start a new run."""
    autoresume: bool = True
    """Resume an interrupted run with this run_name and a checkpoint.interval from its newest complete checkpoint."""
    trust_checkpoint: bool = False
    """Load all of a checkpoint, as Composer does: its author can execute any code on this machine."""

    def checks(self) -> Iterator[Check]:
        missing = "needs checkpoint.load, the checkpoint to load them from"
        yield self.weights_only and self.load is None, "weights_only", missing
        # A resumed run may have deleted the checkpoint it was started with, so RunFolder checks this later.
        if not (self.autoresume and self.interval is not None):
            problem = checkpoint_problem(self.load)
            yield problem, "load", str(problem)


class CallbacksConfig(Settings):
    throughput: ThroughputConfig | None = Field(default_factory=ThroughputConfig)
    """Samples/s, real tokens/s, padding, MFU, warm-up; null disables it."""
    memory: MemoryConfig | None = Field(default_factory=MemoryConfig)
    """Peak memory and its breakdown; null disables it."""
    finite_loss: FiniteLossConfig | None = Field(default_factory=FiniteLossConfig)
    """Handle NaN and infinite losses, and keep NaN weights out of checkpoints; null disables it."""
    divergence: DivergenceConfig | None = None
    """Stop when the loss climbs far above its value at the last good checkpoint, and write no checkpoints meanwhile."""


class BaselineConfig(Settings):
    algorithms: Techniques = Field(default_factory=dict)
    """Techniques of the baseline, as under algorithms; {} for none."""
    batches: int = Field(100, ge=10, le=100_000)
    """Number of batches that each set trains, on a temporary model."""


class WandbConfig(Settings):
    project: str = "composer_speedups"
    """Project of the run."""
    entity: str | None = None
    """User or team of the run."""
    group: str | None = None
    """Group of the run."""
    tags: list[str] = Field(default_factory=list, examples=["[baseline]"])
    """Tags of the run."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """offline needs no account and writes to runs/<run_name>/wandb; null follows WANDB_MODE, or is online."""


class TensorboardConfig(Settings):
    flush_interval: int = Field(100, ge=1)
    """Number of batches between two writes to runs/<run_name>/tensorboard."""


class FileConfig(Settings):
    flush_interval: int = Field(100, ge=1)
    """Number of batches between two flushes of runs/<run_name>/log-rank<rank>.txt."""


class LoggersConfig(Settings):
    interval: int = Field(10, ge=1)
    """Number of batches between two values of time and training loss in Weights & Biases and TensorBoard."""
    wandb: WandbConfig | None = None
    """Weights & Biases."""
    tensorboard: TensorboardConfig | None = None
    """TensorBoard event files."""
    file: FileConfig | None = None
    """A text file."""


class Config(Settings):
    run_name: FileName = "run"
    """Name of the run's folder under runs_folder."""
    runs_folder: str = "runs"
    """Folder of all runs; an earlier run of the same name is kept under a dated name."""
    seed: int = Field(17, ge=0, lt=2**31)
    """Seed of the weights, dropout and shuffling."""
    on_unavailable: Literal["stop", "warn"] = "stop"
    """stop: a technique that cannot engage stops the run; warn: the run warns and continues without it."""
    export: bool = True
    """Write the trained model to runs/<run_name>/model in transformers' format."""
    plot: bool = True
    """Draw samples/s, loss and accuracy to runs/<run_name>/throughput.png, and a confusion matrix to confusion.png."""
    algorithms: Techniques = Field(default_factory=dict)
    """Techniques by name, each with its settings: {tf32_matmul: {}, torch_compile: {scope: blocks}}."""
    baseline: BaselineConfig | None = None
    """Before training, compare these techniques with the run's in turns of a few batches, and report the ratio."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    """The model."""
    task: AnyTask = Field(default_factory=ClassificationSettings)
    """The keys under model and data of the task that model.task names: its head, loss, metrics, and columns."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Samples, tokenizer and DataLoader."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """AdamW; a technique may change its implementation but not these values."""
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    """Learning-rate schedule."""
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    """Settings of Composer's Trainer."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Saving and resuming."""
    callbacks: CallbacksConfig = Field(default_factory=CallbacksConfig)
    """Measurements."""
    loggers: LoggersConfig = Field(default_factory=LoggersConfig)
    """Where metrics are logged in addition to report.json."""

    interpolations: ClassVar[Mapping[tuple[str, ...], tuple[Any, Any]]] = types.MappingProxyType({})
    """Path of keys → what was written there as ${...}, and its value; load_config sets it for written()."""

    @classmethod
    def key_of(cls, name: str) -> str:
        return "" if name == "task" else name  # its keys are written under model and data

    @model_validator(mode="before")
    @classmethod
    def _choose_task(cls, values: Any) -> Any:
        """Move the task-specific keys of the sections ``model`` and ``data`` to ``task``."""
        if not isinstance(values, dict) or isinstance(values.get("task"), TaskSettings):
            return values
        if "task" in values:
            found = [("task", "is not a key; did you mean 'model.task'?")]
            raise PydanticCustomError("checks", "{found}", {"found": found})
        values, chosen = dict(values), {"task": "classification"}
        keys = {key for kind in TASKS.values() for key, _, _ in keys_of(kind)}
        for name in ("model", "data"):
            if isinstance(section := values.get(name), dict):
                values[name] = {key: value for key, value in section.items() if f"{name}.{key}" not in keys}
                chosen |= {key: value for key, value in section.items() if f"{name}.{key}" in keys}
        return {**values, "task": chosen}

    @model_serializer(mode="wrap")
    def _as_written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The sections as they are written in YAML."""
        values: dict[str, Any] = handler(self)
        for name, value in values.pop("task").items():
            section, _, key = self.task.key_of("loss" if name == "loss_name" else name).partition(".")
            values[section][key] = value
        return values

    def checks(self) -> Iterator[Check]:
        model, data, precision = self.model, self.data, self.trainer.precision
        braces = f"must not contain braces, which Composer replaces in some of its paths: {self.runs_folder}"
        yield set(self.runs_folder) & set("{}"), "runs_folder", braces
        yield from self.task.run_checks(self)
        lossy = (
            "bfloat16 weights lose most of AdamW's updates, which are below their resolution; add "
            "algorithms.kahan_optimizer={}, or keep float32 weights and compute in bf16 with mixed_precision"
        )
        yield model.dtype == "bfloat16" and "kahan_optimizer" not in self.algorithms, "model.dtype", lossy
        must_stop = "bfloat16 cannot be trained without kahan_optimizer; set on_unavailable=stop"
        may_continue = self.algorithms.get("kahan_optimizer", {}).get("on_unavailable", self.on_unavailable) == "warn"
        yield model.dtype == "bfloat16" and may_continue, "model.dtype", must_stop
        foreign = (
            "wordpiece trains a new vocabulary, to which the pretrained embeddings do not belong; remove it for the "
            "model's own, or set model.init=random"
        )
        yield data.tokenizer == "wordpiece" and model.init == "pretrained", "data.tokenizer", foreign
        missing = "is missing; a random model has no tokenizer: set data.tokenizer=wordpiece to train one, or name one"
        yield data.tokenizer is None and model.init == "random" and model.size is not None, "data.tokenizer", missing
        both = "and algorithms.mixed_precision both set the precision; remove one of them"
        yield precision != "fp32" and "mixed_precision" in self.algorithms, "trainer.precision", both
        samples = "counts samples, of which batches of data.batch_tokens differ; set trainer.microbatch_tokens"
        split = data.batch_tokens is not None and self.trainer.microbatch_size is not None
        yield split, "trainer.microbatch_size", samples
        times = {
            "trainer.max_duration": self.trainer.max_duration,
            "trainer.eval_interval": self.trainer.eval_interval,
            "trainer.early_stopping.patience": (stopping := self.trainer.early_stopping) and stopping.patience,
            "scheduler.warmup": self.scheduler.warmup,
            "checkpoint.interval": self.checkpoint.interval,
        }
        for key, time in times.items():
            endless = f"is {time}, and a stream has no epochs; use batches, such as 500ba"
            yield data.streaming and str(time).endswith("ep"), key, endless
        yield from self.warmup_checks()

    def warmup_checks(self, batches_per_epoch: int | None = None) -> Iterator[Check]:
        """A warm-up that is longer than the training, or whose unit cannot be compared with the training's."""
        warmup, duration = self.scheduler.warmup, self.trainer.max_duration
        if warmup.endswith("dur"):
            return
        times = [_number_and_unit(time) for time in (warmup, duration)]
        units = {unit for _, unit in times}
        both = f"is {warmup} and trainer.max_duration is {duration}"
        fix = "use one unit for both, or a fraction such as 0.1dur"
        comparable = len(units) == 1 or units == {"ep", "ba"}
        yield not comparable, "scheduler.warmup", f"{both}, which cannot be compared; {fix}"
        if len(units) == 1 or batches_per_epoch is not None:
            waits, trains = (n * (batches_per_epoch or 1) if unit == "ep" else n for n, unit in times)
            longer = f"{both}, so the learning rate never reaches its peak; shorten the warm-up, or train for longer"
            yield waits > trains, "scheduler.warmup", longer


def _number_and_unit(time: str) -> tuple[int, str]:
    return int(time.rstrip(ascii_lowercase)), time.lstrip(digits)


def checkpoint_problem(name: str | None) -> str | None:
    """What is wrong with a local checkpoint, as far as can be seen without loading it."""
    if name is None or name.startswith(OBJECT_STORES):
        return None
    if not os.path.isfile(name):
        shown = with_working_directory(name)
        return f"is not a file: {shown}; name a checkpoint, such as runs/NAME/checkpoints/latest-rank0.pt"
    if not zipfile.is_zipfile(name):  # torch.save writes a zip archive, which ends with its directory
        return f"is not a complete checkpoint: {name}; it is damaged or another kind of file"
    return None
