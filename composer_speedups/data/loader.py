"""DataLoaders: padding, masking, and the real tokens of each batch."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from composer.core import DataSpec
from composer.utils import dist
from datasets import Dataset
from torch.utils.data import Sampler, SequentialSampler
from transformers import DataCollatorForLanguageModeling

from composer_speedups.core.errors import ConfigError, DataError
from composer_speedups.data.config import DataConfig
from composer_speedups.data.flat import FlatTokens, Ragged
from composer_speedups.data.length_batching import LengthGroupedSampler
from composer_speedups.data.sources import load_reviews, load_validation, random_rows
from composer_speedups.data.streams import Tokenized, stream_of_reviews
from composer_speedups.data.tokens import load_tokenizer, tokenize
from composer_speedups.data.watched import WatchedDataLoader
from composer_speedups.distributed.balanced_sampling import BalancedSampler
from composer_speedups.families.flops import batch_lengths

__all__ = ["Data", "Pad", "build_data", "real_tokens"]

_DRAWS = 20  # of masks, after which a batch is taken to hold special tokens only

Rows = Ragged | Sequence[Mapping[str, Any]]
Batch = dict[str, torch.Tensor]


class Data(NamedTuple):
    train: DataSpec
    eval: DataSpec | None
    tokenizer: Any


class Pad:
    """Rows of token ids → ``input_ids`` and ``attention_mask``, (rows, length), and ``labels``, (rows,).

    Args:
        pad_id: Token id of the padding.
        max_length: Length of every batch, or the most it may have with ``longest``.
        longest: Pad to the longest row of the batch instead, rounded up to ``multiple``.
        multiple: See ``longest``.
    """

    def __init__(self, pad_id: int, max_length: int, *, longest: bool, multiple: int = 1) -> None:
        self.pad_id, self.max_length, self.longest, self.multiple = pad_id, max_length, longest, multiple

    def __call__(self, rows: Rows) -> Batch:
        ids_T, lengths_R, labels_R = rows if isinstance(rows, Ragged) else Ragged.of(rows)
        width = self.max_length
        if self.longest:
            width = min(width, -(-int(lengths_R.max()) // self.multiple) * self.multiple)
        # NumPy: torch would wake all its threads for so small a copy
        mask = np.arange(width) < lengths_R[:, None]
        ids = np.full(mask.shape, self.pad_id)
        ids[mask] = ids_T
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(mask.astype(np.int64)),
            "labels": torch.from_numpy(labels_R),
        }


class MaskTokens:
    """A :class:`Pad` batch with ``labels`` for masked language modelling, (rows, length), -100 elsewhere.

    Args:
        pad: Makes the batch.
        tokenizer: Has the mask token, and says which tokens are special and never masked.
        probability: Share of the tokens masked.
        fixed: The same batch gets the same mask each time, so that one evaluation compares with the next, and
            evaluating draws no random numbers that training would otherwise get.
    """

    def __init__(self, pad: Pad, tokenizer: Any, probability: float, *, fixed: bool = False) -> None:
        self.pad, self.fixed = pad, fixed
        self.collator = DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability=probability)
        self._special = np.array(tokenizer.all_special_ids)

    def __call__(self, rows: Rows) -> Batch:
        batch = self.pad(rows)
        if self.fixed:
            seed = zlib.crc32(batch["input_ids"].numpy().tobytes())
            self.collator.generator = torch.Generator().manual_seed(seed)
        special = torch.from_numpy(np.isin(batch["input_ids"].numpy(), self._special))
        for _ in range(_DRAWS):  # a batch without a masked token has no loss
            ids, labels = self.collator.torch_mask_tokens(batch["input_ids"].clone(), special_tokens_mask=special)
            if (labels != -100).any():
                break
        return {**batch, "input_ids": ids, "labels": labels}


def build_data(config: DataConfig, *, model_name: str, task: str, on_gpu: bool, seed: int = 0) -> Data:
    """Reviews, tokens and loaders as the config says, sharded over the ranks.

    The first process of a node prepares the caches; the others find them. ``seed`` is that of the shuffling.

    Raises:
        DataError: Rows or files that cannot be used.
        ConfigError: A batch size that the ranks cannot share, or a tokenizer that cannot be loaded.
    """
    world = dist.get_world_size()
    for name in ("batch_size", "eval_batch_size"):
        size = getattr(config, name)
        if size is not None and size % world:
            raise ConfigError(f"data.{name}: {size} reviews cannot be shared by {world} ranks; use a multiple")
    with dist.run_local_rank_zero_first():
        tokenizer, train_tokens, eval_tokens = _tokens(config, model_name)

    train = None if train_tokens is None else FlatTokens(train_tokens)
    evaluation = None if eval_tokens is None else FlatTokens(eval_tokens)
    _check_same(train, evaluation)
    pad = Pad(
        tokenizer.pad_token_id,
        config.max_length,
        longest=config.padding == "longest",
        multiple=config.pad_to_multiple_of,
    )

    def collate(training: bool) -> Callable[[Rows], Batch]:
        if task != "mlm":
            return pad
        return MaskTokens(pad, tokenizer, config.mlm_probability, fixed=not training)

    def batches(
        rows: Any, size: int, collator: Any, *, drop_last: bool, sampler: Sampler[int] | None = None
    ) -> DataSpec:
        dataloader = WatchedDataLoader(
            rows,
            batch_size=size // world,
            sampler=sampler,
            collate_fn=collator,
            drop_last=drop_last,
            num_workers=config.workers,
            pin_memory=config.pin_memory and on_gpu,
            prefetch_factor=config.prefetch_factor,
            persistent_workers=config.persistent_workers,
            worker_timeout=config.worker_timeout,
        )
        return DataSpec(dataloader, get_num_tokens_in_batch=masked_tokens if task == "mlm" else real_tokens)

    def sampler(tokens: FlatTokens, batch_size: int, training: bool) -> Sampler[int]:
        if not training:
            # Composer asks the device how many reviews a distributed sampler's batch has, and waits, at each batch.
            return SequentialSampler(tokens) if world == 1 else dist.get_sampler(tokens)
        rank, drop_last = dist.get_global_rank(), config.drop_last
        settings: dict[str, Any] = {"ranks": world, "rank": rank, "seed": seed, "drop_last": drop_last}
        if config.length_batching is None:
            return BalancedSampler(tokens.lengths, batch_size, **settings)
        return LengthGroupedSampler(tokens.lengths, batch_size, config.length_batching, **settings)

    def loader(tokens: FlatTokens, batch_size: int, *, training: bool) -> DataSpec:
        drop_last = training and config.drop_last
        if drop_last and len(tokens) < batch_size:
            raise ConfigError(
                f"data.drop_last: the {len(tokens)} training reviews do not fill one batch of {batch_size}"
            )
        return batches(
            tokens, batch_size, collate(training), drop_last=drop_last, sampler=sampler(tokens, batch_size, training)
        )

    def stream(rows: Any) -> DataSpec:
        collator = Tokenized(collate(True), tokenizer, config)
        return batches(rows, config.batch_size, collator, drop_last=config.drop_last)

    return Data(
        stream(stream_of_reviews(config, seed)) if train is None else loader(train, config.batch_size, training=True),
        None if evaluation is None else loader(evaluation, config.eval_batch_size or config.batch_size, training=False),
        tokenizer,
    )


def _check_same(*tokens: FlatTokens | None) -> None:
    """A file may be written between the readings of two ranks, which would then train on different reviews."""
    if dist.get_world_size() == 1:
        return
    mine = [zlib.crc32(part.tobytes()) for each in tokens if each for part in (each.ids, each.lengths, each.labels)]
    if any(theirs != mine for theirs in dist.all_gather_object(mine)):
        raise DataError("data: the ranks read different reviews, so a file changed meanwhile; start again")


def _tokens(config: DataConfig, model_name: str) -> tuple[Any, Dataset | None, Dataset | None]:
    """The tokenizer, and the tokens to train on (None for a stream) and to validate on."""
    if config.source == "random":
        tokenizer = load_tokenizer(config, model_name, None)
        counts = {"train": config.train_samples, "eval": config.eval_samples}
        train, evaluation = (
            random_rows(count or 8000, config.seed, split, config.max_length, tokenizer)
            for split, count in counts.items()
        )
        return tokenizer, train, evaluation
    if config.streaming or config.source == "mds":
        tokenizer = load_tokenizer(config, model_name, None)
        held = load_validation(config)
        return tokenizer, None, None if held is None else tokenize(held, tokenizer, config)
    reviews, validation = load_reviews(config)
    tokenizer = load_tokenizer(config, model_name, reviews)
    return (
        tokenizer,
        tokenize(reviews, tokenizer, config),
        (None if validation is None else tokenize(validation, tokenizer, config)),
    )


def real_tokens(batch: Any) -> int:
    """Tokens of a batch without its padding; 0 for a batch without token ids."""
    lengths = batch_lengths(batch)
    return 0 if lengths is None else int(lengths.sum())


def masked_tokens(batch: Any) -> dict[str, int]:
    """Real tokens, and those that a masked LM's loss is the mean of: by these Composer weighs parts of a batch."""
    return {"total": real_tokens(batch), "loss_generating": int((batch["labels"] != -100).sum())}
