"""DataLoaders: padding, and the real tokens of each batch."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from composer.core import DataSpec
from composer.utils import dist
from datasets import Dataset
from torch.utils.data import DataLoader, SequentialSampler

from composer_speedups.core.errors import ConfigError, DataError
from composer_speedups.core.settings import refuse
from composer_speedups.data.batching import LengthGroupedSampler, TokenBatchSampler
from composer_speedups.data.flat import FlatTokens, Ragged
from composer_speedups.data.sources import load_samples, load_validation, random_rows
from composer_speedups.data.streams import Tokenized, stream_of_samples
from composer_speedups.data.summary import DataSummary, check_data
from composer_speedups.data.tokens import load_tokenizer, measure_truncation, tokenize
from composer_speedups.distributed.balanced_sampling import BalancedSampler
from composer_speedups.families.flops import batch_lengths
from composer_speedups.packing.rows import IGNORED, SAMPLES, IndexedRows, lengths_key, row_lengths
from composer_speedups.tasks.labels import TaskWithClasses
from composer_speedups.tasks.settings import GENERATED, DataConfig
from composer_speedups.tasks.task import Task

Batch = dict[str, torch.Tensor]


class Data(NamedTuple):
    train: DataSpec
    eval: DataSpec | None
    tokenizer: Any
    summary: DataSummary


class Pad:
    """Pads rows to (rows, length) or (rows, texts, length): ``max_length``, or the longest, rounded to ``multiple``.

    The batch has the row lengths too, so that nobody counts the mask.
    """

    def __init__(self, pad_id: int, max_length: int, *, longest: bool, multiple: int = 1) -> None:
        self.max_length, self.longest, self.multiple = max_length, longest, multiple
        self.fill = {"input_ids": pad_id, "labels": IGNORED}

    def __call__(self, rows: Ragged) -> Batch:
        width = self.max_length
        if self.longest:
            width = min(width, -(-int(rows.lengths.max()) // self.multiple) * self.multiple)
        # NumPy, because torch would wake all its threads for such a small copy
        mask = np.arange(width) < rows.lengths[..., None]
        arrays = {"attention_mask": mask.astype(np.int64)}
        for name, values_T in rows.tokens.items():
            arrays[name] = np.full(mask.shape, self.fill.get(name, 0))
            arrays[name][mask] = values_T
        batch = {name: torch.from_numpy(values) for name, values in {**arrays, **rows.rows}.items()}
        known = {lengths_key("attention_mask"): rows.lengths}
        if SAMPLES in batch:
            known[SAMPLES] = rows.rows[SAMPLES]
        return batch | {name: row_lengths(numbers) for name, numbers in known.items()}


def build_data(
    config: DataConfig,
    task: Task,
    *,
    model_name: str,
    on_gpu: bool,
    seed: int = 0,
    indexed: bool = False,
    microbatch_tokens: int | None = None,
) -> Data:
    """Build samples, tokens and loaders, sharded over ranks; the first process of a node fills the caches.

    With ``indexed``, training batches have the index of each row's sample, except for those of a stream. With
    ``data.batch_tokens``, a rank's batch has as many micro-batches of one shape as it has ``microbatch_tokens``.
    """
    refuse(task.data_checks(config))
    world = dist.get_world_size()
    for name in ("batch_size", "eval_batch_size"):
        size = getattr(config, name)
        if size is not None and size % world:
            raise ConfigError(f"data.{name}: {size} samples cannot be shared by {world} ranks; use a multiple")
    summary = DataSummary()
    with dist.run_local_rank_zero_first():
        tokenizer, train_tokens, eval_tokens = _tokens(config, task, model_name, summary)
    if train_tokens is not None and "labels" in train_tokens.column_names:
        task.learn_frequencies(train_tokens["labels"])

    train, evaluation = (
        None if tokens is None else task.arranged(FlatTokens(tokens), config.max_length, training=training)
        for tokens, training in ((train_tokens, True), (eval_tokens, False))
    )
    _check_same(train, evaluation)
    longest = config.padding == "longest"
    pad = Pad(tokenizer.pad_token_id, config.max_length, longest=longest, multiple=config.pad_to_multiple_of)
    collate = task.collator(pad, tokenizer, training=True)
    rows: Any = train
    sampler: Any = None
    size, samples = config.batch_size or 0, None
    if train is None:
        rows, declared = stream_of_samples(config, seed)
        if isinstance(task, TaskWithClasses) and task.lacks_classes:
            _learn_from_stream(task, declared)
        collate = Tokenized(collate, tokenizer, task, config.max_length)
    else:
        sampler = _training_sampler(config, train, seed, microbatch_tokens)
        if isinstance(sampler, TokenBatchSampler):
            size, samples = sampler.rows * sampler.parts * world, number_of_samples
            rows = train.filled(pad.fill, config.max_length)
        if indexed:
            rows = IndexedRows(rows, collate)
            collate = rows.collate
    dataloader = partial(
        DataLoader,
        num_workers=config.workers,
        pin_memory=config.pin_memory and on_gpu,
        prefetch_factor=config.prefetch_factor,
        persistent_workers=config.persistent_workers,
    )
    loader = dataloader(rows, size // world, sampler=sampler, collate_fn=collate, drop_last=config.drop_last)
    split = _refuse_to_split if task.needs_whole_batch else None
    count = partial(tokens_and_weight, task) if task.weights_losses else real_tokens
    train_spec = DataSpec(loader, get_num_tokens_in_batch=count, get_num_samples_in_batch=samples, split_batch=split)
    if evaluation is None:
        return Data(train_spec, None, tokenizer, summary)
    # Composer reads the number of samples of a distributed sampler's batch from the device, and waits, at each batch.
    sampler = SequentialSampler(evaluation) if world == 1 else dist.get_sampler(evaluation)
    collate = task.collator(pad, tokenizer, training=False)
    loader = dataloader(evaluation, (config.eval_batch_size or size) // world, sampler=sampler, collate_fn=collate)
    return Data(train_spec, DataSpec(loader, get_num_tokens_in_batch=count), tokenizer, summary)


def _training_sampler(config: DataConfig, tokens: FlatTokens, seed: int, microbatch_tokens: int | None) -> Any:
    ranks, rank, size = dist.get_world_size(), dist.get_global_rank(), config.batch_size
    settings: dict[str, Any] = {"ranks": ranks, "rank": rank, "seed": seed, "drop_last": config.drop_last}
    sampler: BalancedSampler | TokenBatchSampler
    if size is None:
        whole = config.batch_tokens or 0
        each = microbatch_tokens or whole // ranks
        parts, rest = divmod(whole, each * ranks)
        if rest:
            split = "" if microbatch_tokens is None else f" in micro-batches of {each:,}"
            raise ConfigError(f"data.batch_tokens: {whole:,} cannot be shared by {ranks} ranks{split}; use a multiple")
        sampler = TokenBatchSampler(tokens.lengths, each, config.max_length, parts, **settings)
    elif config.length_batching is None:
        sampler = BalancedSampler(tokens.lengths, size, **settings)
    else:
        sampler = LengthGroupedSampler(tokens.lengths, size, config.length_batching, tokens.widths, **settings)
    if not len(sampler):
        batch = size or f"{config.batch_tokens:,} tokens"
        raise ConfigError(f"data.drop_last: the {len(tokens)} training samples do not fill one batch of {batch}")
    return sampler


def _learn_from_stream(task: TaskWithClasses, declared: Mapping[str, list[str]]) -> None:
    """Take the classes that a streamed dataset declares, if there were no validation samples to take them from."""
    if task.label_column not in declared:
        raise ConfigError(
            "data.labels is missing: without validation samples, the classes of a stream are unknown before "
            "training; name them, as in data.labels=[no,yes]"
        )
    task.learn({str(task.label_column): []}, declared, "data.streaming")


def _check_same(*tokens: FlatTokens | None) -> None:
    """A file may change between the reads of two ranks, which would then train on different samples."""
    if dist.get_world_size() == 1:
        return
    splits = [split for split in tokens if split is not None]
    arrays = [array for split in splits for array in (split.lengths, *split.tokens.values(), *split.rows.values())]
    checksums = [zlib.crc32(array.tobytes()) for array in arrays]
    if any(others != checksums for others in dist.all_gather_object(checksums)):
        raise DataError("data: the ranks read different samples because a file changed meanwhile; start again")


def _tokens(
    config: DataConfig, task: Task, model_name: str, summary: DataSummary
) -> tuple[Any, Dataset | None, Dataset | None]:
    """The tokenizer, the tokens to train on (None for a stream), and the tokens to validate on."""
    words = task.splits_words
    if config.source == "random":
        tokenizer = load_tokenizer(config, model_name, None, splits_words=words)
        counts = {"train": config.train_samples, "eval": config.eval_samples}
        classes = len(getattr(task, "labels", None) or ("0", "1"))
        train, evaluation = (
            random_rows(count or GENERATED, config.seed, split, config.max_length, tokenizer, classes)
            for split, count in counts.items()
        )
        return tokenizer, train, evaluation
    if config.streams:
        tokenizer = load_tokenizer(config, model_name, None, splits_words=words)
        train, validation = None, load_validation(config, task, summary)
    else:
        train, validation = load_samples(config, task, summary)
        columns = [train[name] for name in train.column_names if name.startswith("text_")]
        texts = [" ".join(text) if isinstance(text, list) else text for column in columns for text in column]
        tokenizer = load_tokenizer(config, model_name, texts, splits_words=words)
    encoded = [None if split is None else tokenize(split, tokenizer, config, task) for split in (train, validation)]
    if train is not None and not getattr(task, "packing", False):
        summary.truncation = measure_truncation(train, tokenizer, config, task)
    if train is not None and config.report and dist.get_local_rank() == 0:
        summary.check = check_data(task, train, validation, encoded[1])
    return tokenizer, encoded[0], encoded[1]


def real_tokens(batch: Any) -> int:
    """Number of tokens of a batch without padding; 0 for a batch without token ids."""
    lengths = batch_lengths(batch)
    return 0 if lengths is None else int(lengths.sum())


def number_of_samples(batch: Batch) -> int:
    """Number of rows without filler, by which Composer weights the losses of micro-batches and ranks."""
    return int(batch[SAMPLES].numpy().sum())


def tokens_and_weight(task: Task, batch: Batch) -> dict[str, Any]:
    """Number of real tokens, and the weight by which Composer counts the loss of a micro-batch or rank."""
    return {"total": real_tokens(batch), "loss_generating": task.loss_weight(batch)}


def _refuse_to_split(batch: Batch, microbatch_size: int | float) -> list[Batch]:
    """Refuse micro-batches for losses that need the whole batch."""
    if microbatch_size < len(batch["input_ids"]):
        raise ConfigError(
            "trainer.microbatch_size: the loss needs the whole batch, which micro-batches would split; remove it "
            "and set model.gradient_cache"
        )
    return [batch]
