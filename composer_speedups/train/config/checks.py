"""Checks of config values: first each against its bounds, then combinations of values."""

from __future__ import annotations

import dataclasses
import os
import typing
import zipfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from composer_speedups.core.catalogue import technique_names
from composer_speedups.core.errors import ConfigError, did_you_mean
from composer_speedups.core.files import with_working_directory
from composer_speedups.core.settings import Origins, check_value
from composer_speedups.data.config import GENERATED
from composer_speedups.tasks.config import TASK_KEYS

if TYPE_CHECKING:
    from composer_speedups.train.config.schema import Config

__all__ = ["MOST_BUILTIN", "check_bounds", "check_together", "checkpoint_problem"]

_STORES = ("s3", "gs", "oci", "azure", "dbfs")  # supported by Composer, which needs an address only
MOST_BUILTIN = 1_000_000  # samples; generating them takes minutes


def check_bounds(config: Any, origin_of: Origins, prefix: str = "") -> None:
    for field in dataclasses.fields(config):
        value, dotted = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            check_bounds(value, origin_of, f"{dotted}.")
        elif problem := check_value(field, value):
            raise ConfigError(f"{origin_of[dotted]}: {dotted} {problem}")


def check_together(config: Config, origin_of: Origins) -> None:
    """Refuse values that are valid separately but not together."""
    model, data = config.model, config.data
    asked = {"algorithms": config.algorithms}
    if config.baseline is not None:
        asked["baseline.algorithms"] = config.baseline.algorithms
    for section, algorithms in asked.items():
        for name in algorithms:
            if name not in technique_names():
                where = origin_of[f"{section}.{name}"]
                hint = did_you_mean(name, technique_names())
                raise ConfigError(f"{where}: unknown technique '{section}.{name}'{hint}")

    def refuse(name: str, text: str) -> typing.NoReturn:
        where = origin_of[name]
        raise ConfigError(f"{where}: {name} {text}")

    if set(config.runs_folder) & set("{}"):
        refuse(
            "runs_folder",
            f"must not contain braces, which Composer replaces in some of its paths: {config.runs_folder}",
        )
    _check_task(config, refuse)
    if model.dtype == "bfloat16":
        for section, algorithms in asked.items():
            if "kahan_optimizer" not in algorithms:
                refuse(
                    "model.dtype",
                    f"bfloat16 weights lose most of AdamW's updates, which are below their resolution; add "
                    f"{section}.kahan_optimizer={{}}, or keep float32 weights and compute in bf16 with mixed_precision",
                )
        if "warn" in (config.on_unavailable, *_on_unavailable(asked)):
            refuse("model.dtype", "bfloat16 cannot be trained without kahan_optimizer; set on_unavailable=stop")
    if model.size is not None and model.init != "random":
        refuse("model.size", "needs model.init: random; a pretrained model has its own size")
    if data.source == "files" and data.train_file is None:
        refuse("data.train_file", "is missing; data.source: files needs the path of a parquet, csv or jsonl file")
    if data.source == "mds" and data.train_file is None:
        refuse("data.train_file", "is missing; data.source: mds needs the folder or address of its shards")
    if data.streaming or data.source == "mds":
        _check_streaming(config, refuse)
    if data.source not in ("files", "mds") and (data.train_file or data.eval_file):
        name = "data.train_file" if data.train_file else "data.eval_file"
        refuse(name, f"has no effect with data.source: {data.source}; set data.source=files")
    for name in ("train_samples", "eval_samples"):
        count = getattr(data, name)
        if data.source == "builtin" and count is not None and count > MOST_BUILTIN:
            refuse(f"data.{name}", f"must be at most {MOST_BUILTIN:,} with data.source: builtin, not {count:,}")
        if data.source == "random" and (count or GENERATED) * data.max_length >= 2**31:  # 32-bit offsets
            refuse(f"data.{name}", "times data.max_length must be less than 2**31 with data.source: random")
    if data.source == "random" and data.tokenizer == "wordpiece":
        refuse("data.tokenizer", "wordpiece is trained on texts, and data.source: random has none; name a tokenizer")
    if data.tokenizer == "wordpiece" and model.init == "pretrained":
        refuse(
            "data.tokenizer",
            "wordpiece trains a new vocabulary, to which the pretrained embeddings do not belong; remove it for the "
            "model's own, or set model.init=random",
        )
    if config.loggers.wandb is not None and not all(isinstance(tag, str) for tag in config.loggers.wandb.tags):
        refuse("loggers.wandb.tags", "must be words")
    if data.workers == 0 and data.persistent_workers:
        refuse("data.persistent_workers", "needs data.workers of at least 1")
    if data.workers == 0 and data.prefetch_factor is not None:
        refuse("data.prefetch_factor", "needs data.workers of at least 1")
    if data.length_batching is not None and data.padding != "longest":
        refuse("data.length_batching", "saves no padding with data.padding: max_length; set data.padding=longest")
    if data.tokenizer is None and model.init == "random" and model.size is not None:
        refuse("data.tokenizer", "is missing; a random model has no tokenizer: name one, or wordpiece to train it")
    if config.checkpoint.weights_only and config.checkpoint.load is None:
        refuse("checkpoint.weights_only", "needs checkpoint.load, the checkpoint to load them from")
    # A resumed run may have deleted the checkpoint it was started with, so RunFolder checks this later.
    goes_on = config.checkpoint.autoresume and config.checkpoint.interval is not None
    pattern = "{" in str(config.checkpoint.load)  # placeholders for the run's name and rank
    if not goes_on and not pattern and (problem := checkpoint_problem(config.checkpoint.load)):
        refuse("checkpoint.load", problem)
    if config.trainer.precision != "fp32" and "mixed_precision" in config.algorithms:
        refuse("trainer.precision", "and algorithms.mixed_precision both set the precision; remove one of them")
    if config.trainer.fsdp is not None:
        if config.trainer.parallelism_config:
            refuse("trainer.parallelism_config", "and trainer.fsdp both shard the model; remove one of them")
        if config.trainer.microbatch_size == "auto":
            refuse("trainer.microbatch_size", "auto is not supported with trainer.fsdp; set a number, or null")
    unknown = set(config.trainer.parallelism_config or {}) - {"fsdp", "tp"}
    if unknown:
        refuse("trainer.parallelism_config", f"accepts fsdp and tp, not {', '.join(sorted(map(str, unknown)))}")


def _on_unavailable(asked: dict[str, dict[str, Any]]) -> list[Any]:
    """``on_unavailable`` of the Kahan optimizer in each set of techniques."""
    settings = [algorithms["kahan_optimizer"] for algorithms in asked.values()]
    return [each.get("on_unavailable") for each in settings if isinstance(each, dict)]


def _check_task(config: Config, refuse: Callable[[str, str], typing.NoReturn]) -> None:
    """Refuse settings that the task does not use or support."""
    task, data = config.model.task, config.data
    for name, tasks in TASK_KEYS.items():
        section, field = name.split(".")
        default = next(f.default for f in dataclasses.fields(getattr(config, section)) if f.name == field)
        if task not in tasks and getattr(getattr(config, section), field) != default:
            refuse(name, f"is for model.task: {' or '.join(tasks)}, not {task}; remove it")
    if data.source == "random" and task not in ("classification", "mlm"):
        refuse("data.source", f"random has no labels for model.task: {task}; use builtin")
    if data.packing and (data.streaming or data.source == "mds"):
        refuse("data.packing", "joins all texts up front; streaming cannot provide them; remove it")
    if task == "reranking" and config.model.loss == "pairwise" and (data.streaming or data.source == "mds"):
        refuse(
            "model.loss", "pairwise needs every document of a query up front; streaming cannot provide them; use bce"
        )
    whole_batch = task == "embedding" and config.model.loss != "cosine"
    if whole_batch and config.trainer.microbatch_size is not None:
        refuse(
            "trainer.microbatch_size",
            "would use in-batch negatives of one micro-batch only; set model.gradient_cache instead",
        )
    if config.model.gradient_cache is not None and "cuda_graphs" in config.algorithms:
        refuse(
            "model.gradient_cache", "encodes a batch in chunks, which cuda_graphs cannot capture; remove one of them"
        )
    if data.eval_fraction is not None:
        if data.eval_file is not None:
            refuse("data.eval_fraction", "and data.eval_file both define the validation samples; remove one of them")
        if data.source not in ("hub", "files") or data.streaming:
            refuse("data.eval_fraction", "needs data.source: hub or files, read into memory")


def _check_streaming(config: Config, refuse: Callable[[str, str], typing.NoReturn]) -> None:
    data = config.data
    if data.streaming and data.source not in ("hub", "files"):
        refuse("data.streaming", f"is for data.source: hub or files, not {data.source}; remove it")
    if data.train_samples is not None:
        refuse("data.train_samples", "draws random samples, which streaming cannot; set data.train_samples=null")
    if data.length_batching is not None:
        refuse("data.length_batching", "needs every length up front; streaming cannot provide them; remove it")
    if data.tokenizer == "wordpiece":
        refuse(
            "data.tokenizer",
            "wordpiece is trained on all texts up front; streaming cannot provide them; name a tokenizer",
        )
    times = {
        "trainer.max_duration": config.trainer.max_duration,
        "trainer.eval_interval": config.trainer.eval_interval,
        "checkpoint.interval": config.checkpoint.interval or "",
    }
    for name, time in times.items():
        if data.streaming and time.endswith("ep"):
            refuse(name, f"is {time}, and a stream has no epochs; use batches, such as 500ba")


def checkpoint_problem(name: str | None) -> str | None:
    """Describe what is wrong with a checkpoint's address or local file, as far as can be seen without loading it."""
    if name is None or os.path.isdir(name):  # pathlib raises for names that are too long
        return None
    kind = urlsplit(name.replace("AZURE_BLOBS", "azure"))  # as Composer parses it
    if "://" in name:
        if kind.scheme not in _STORES:
            return (
                f"is an address from which Composer cannot load checkpoints ({kind.scheme}): {name}; download it "
                f"and name the local file, or use an address of {', '.join(_STORES)}"
            )
        return None if kind.netloc else f"does not name a bucket: {name}; write {kind.scheme}://BUCKET/PATH.pt"
    if kind.scheme and os.path.exists(name):
        return f"contains a colon, so Composer would parse it as an address: {name}; write ./{name}"
    if not os.path.isfile(name):
        shown = with_working_directory(name)
        return f"is not a file: {shown}; name a checkpoint, such as runs/NAME/checkpoints/latest-rank0.pt"
    if not zipfile.is_zipfile(name):  # torch.save writes a zip archive, which ends with its directory
        return f"is not a complete checkpoint: {name}; it is damaged or another kind of file"
    return None
