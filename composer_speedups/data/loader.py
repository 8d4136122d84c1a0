"""DataLoaders: padding, masking, and the real tokens of each batch."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from composer.core import DataSpec
from composer.utils import dist
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling

from composer_speedups.config.schema import DataConfig
from composer_speedups.data.sources import load_reviews
from composer_speedups.data.tokens import load_tokenizer, tokenize
from composer_speedups.errors import ConfigError
from composer_speedups.flops import batch_lengths

__all__ = ["Data", "Pad", "build_data"]

Rows = Sequence[dict[str, Any]]
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
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        width = self.max_length
        if self.longest:
            width = min(width, -(-int(lengths.max()) // self.multiple) * self.multiple)
        mask = (torch.arange(width) < lengths[:, None]).long()
        ids = torch.full(mask.shape, self.pad_id)
        ids[mask.bool()] = torch.tensor([i for row in rows for i in row["input_ids"]])
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": torch.tensor([row["label"] for row in rows]),
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

    def __call__(self, rows: Rows) -> Batch:
        batch = self.pad(rows)
        if self.fixed:
            seed = zlib.crc32(batch["input_ids"].numpy().tobytes())
            self.collator.generator = torch.Generator().manual_seed(seed)
        special = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
        for token_id in self.collator.tokenizer.all_special_ids:
            special |= batch["input_ids"] == token_id
        ids, labels = self.collator.torch_mask_tokens(batch["input_ids"], special_tokens_mask=special)
        return {**batch, "input_ids": ids, "labels": labels}


def build_data(config: DataConfig, *, model_name: str, task: str, on_gpu: bool) -> Data:
    """Reviews, tokens and loaders as the config says, sharded over the ranks.

    The first process of a node prepares the caches; the others find them.

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
        train, evaluation = load_reviews(config)
        tokenizer = load_tokenizer(config, model_name, train)
        train_tokens = tokenize(train, tokenizer, config)
        eval_tokens = None if evaluation is None else tokenize(evaluation, tokenizer, config)

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

    def loader(tokens: Dataset, batch_size: int, *, training: bool) -> DataSpec:
        drop_last = training and config.drop_last
        if drop_last and len(tokens) < batch_size:
            raise ConfigError(
                f"data.drop_last: the {len(tokens)} training reviews do not fill one batch of {batch_size}"
            )
        dataloader = DataLoader(
            tokens,  # type: ignore[arg-type]
            batch_size=batch_size // world,
            sampler=dist.get_sampler(tokens, shuffle=training, drop_last=drop_last),
            collate_fn=collate(training),
            drop_last=drop_last,
            num_workers=config.workers,
            pin_memory=config.pin_memory and on_gpu,
            prefetch_factor=config.prefetch_factor,
            persistent_workers=config.persistent_workers,
        )
        return DataSpec(dataloader, get_num_tokens_in_batch=_real_tokens)

    return Data(
        loader(train_tokens, config.batch_size, training=True),
        eval_tokens and loader(eval_tokens, config.eval_batch_size or config.batch_size, training=False),
        tokenizer,
    )


def _real_tokens(batch: Any) -> int:
    lengths = batch_lengths(batch)
    return 0 if lengths is None else int(lengths.sum())
