"""Which samples are batched together: batches of similar lengths, and micro-batches bounded by real tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from composer_speedups.core.errors import ConfigError
from composer_speedups.distributed.balanced_sampling import BalancedSampler, Integers
from composer_speedups.families.flops import batch_lengths

Split = Callable[[Any, int | float], list[Any]]


def split_by_tokens(max_tokens: int) -> Split:
    """Make a function that splits each batch into micro-batches of at most this many real tokens.

        Trainer(train_dataloader=DataSpec(loader, split_batch=split_by_tokens(8192)), …)

    Samples differ in length, so a number of samples that always fits in memory must be chosen for the longest ones. A
    bound on tokens puts many short samples, or a few long ones, into a micro-batch. It bounds memory if the model is
    unpadded; otherwise padding takes memory, too.

    Micro-batches are consecutive samples, as many as fit. A sample with more tokens than the bound is a micro-batch of
    its own. The ``device_train_microbatch_size`` of Composer's Trainer bounds the samples as well; its default is the
    whole batch. The gradient is that of the whole batch, up to rounding: Composer weights each micro-batch by its
    samples. A loss that is a mean over labelled tokens needs ``accumulate_train_batch_on_tokens=True`` in addition, and
    the number of labels as ``loss_generating`` in the result of the DataSpec's ``get_num_tokens_in_batch``. A loss that
    compares the samples of a batch cannot be split.

    On several ranks, each splits its own samples, so the numbers of forward passes differ. DDP supports this with
    Composer's default ``ddp_sync_strategy``. FSDP and ``device_train_microbatch_size="auto"`` do not, because they
    communicate in every forward pass: the ranks would wait for each other until the timeout.

    Args:
        max_tokens: Maximum number of real tokens per micro-batch and device, at least 1. The tokens of all texts of a
            sample count. Without an attention mask, every position counts.

    Returns:
        A function for ``DataSpec(split_batch=…)``. Batches are mappings with ``input_ids``, and usually
        ``attention_mask``, of shape (samples, …, slots). Other tensors and lists have an entry per sample; any other
        value is the same for all micro-batches. Synchronizes if the batch is on a GPU; Composer splits it before.

    Raises:
        ValueError: ``max_tokens`` is below 1; when a batch is split, it has no ``input_ids``.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
    return partial(_split, max_tokens)


def _split(max_tokens: int, batch: Any, max_samples: int | float) -> list[Any]:
    lengths = batch_lengths(batch)
    if lengths is None:
        raise ValueError(
            f"split_by_tokens needs a mapping with input_ids, not {type(batch).__name__}; remove it from the DataSpec"
        )
    tokens = lengths.reshape(len(lengths), -1).sum(-1) if lengths.ndim > 1 else lengths
    microbatches = _cut(np.arange(len(tokens)), (tokens, max_tokens), (np.ones_like(tokens), max_samples))
    return [batch] if len(microbatches) < 2 else _pieces(batch, [len(samples) for samples in microbatches])


def _pieces(batch: Mapping[str, Any], sizes: Sequence[int]) -> list[Any]:
    split = {key: _pieces_of(value, sizes) for key, value in batch.items()}
    return [{key: pieces[i] for key, pieces in split.items()} for i in range(len(sizes))]


def _pieces_of(value: Any, sizes: Sequence[int]) -> Sequence[Any]:
    if isinstance(value, Tensor):
        return value.split(list(sizes))
    if isinstance(value, Mapping):
        return _pieces(value, sizes)
    if isinstance(value, (list, tuple)):
        if len(value) != sum(sizes):
            raise ValueError(f"a list of {len(value)} entries does not fit a batch of {sum(sizes)} samples")
        remaining = iter(value)
        return [[next(remaining) for _ in range(size)] for size in sizes]
    return [value] * len(sizes)


class LengthGroupedSampler(BalancedSampler):
    """Shuffles the epoch, sorts each pool of ``pool`` batches by length, cuts it into batches, and shuffles these;
    ``widths`` are the lengths to sort by, if not ``lengths``."""

    def __init__(
        self,
        lengths: Sequence[int] | Integers,
        batch_size: int,
        pool: int,
        widths: Sequence[int] | Integers | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(lengths, batch_size, **settings)
        self.pool, self.widths = pool, self.lengths if widths is None else np.asarray(widths)

    def arranged(self, batches: Integers, generator: torch.Generator) -> Integers:
        pools = [batches[start : start + self.pool].ravel() for start in range(0, len(batches), self.pool)]
        by_length = [pool[np.argsort(self.widths[pool], kind="stable")] for pool in pools]
        grouped = np.concatenate([batches.ravel()[:0], *by_length]).reshape(batches.shape)
        return grouped[torch.randperm(len(batches), generator=generator).numpy()]


class TokenBatchSampler(DistributedSampler[int]):
    """Shuffles the epoch, and fills micro-batches of one shape: ``tokens`` tokens in ``rows`` rows of 1 to ``width``.

    A sample that does not fit begins the next micro-batch. The remaining tokens are filler: rows of padding tokens, for
    which the sampler yields ``len(lengths)`` plus their number of tokens (:meth:`.FlatTokens.filled`). A batch has
    ``parts`` micro-batches on each rank.

    The order depends only on the seed and the epoch. Every sample occurs once per epoch, except for those of the last,
    incomplete batch with ``drop_last``. ``rows`` suffices for the batches of the first epoch; in later epochs, more
    samples in the same tokens do not fit. Composer needs the same number of batches in each epoch: the most of three
    orders. Where an order has too few micro-batches, those with the most samples are halved, and single samples are
    repeated; one with too many is drawn again.

    Raises:
        ConfigError: The tokens are too few for the longest sample.
    """

    def __init__(
        self, lengths: Integers, tokens: int, width: int, parts: int = 1, ranks: int = 1, rank: int = 0, **settings: Any
    ) -> None:
        super().__init__(lengths, ranks, rank, shuffle=True, **settings)  # type: ignore[arg-type]
        self.lengths, self.tokens, self.width, self.parts = lengths, tokens, width, parts
        orders = [*islice(self._orders(), 3)]
        padding = max(width * len(m) - int(lengths[m].sum()) for m in _cut(orders[0], (lengths, tokens)))
        self.rows = -(-(tokens + padding) // width)
        if (longest := int(lengths.max())) > tokens - self.rows + 1:
            raise ConfigError(
                f"data.batch_tokens: {tokens:,} tokens per forward pass are too few for samples of up to {longest:,}; "
                "use at least twice as many"
            )
        self.batches = max(self._batches(self._microbatches(order)) for order in orders)
        self.num_samples = self.batches * parts * self.rows
        self.total_size = self.num_samples * ranks

    def __iter__(self) -> Iterator[int]:
        count, drawn = self.batches * self.parts * self.num_replicas, map(self._microbatches, self._orders())
        filled = [samples.tolist() for samples in next(m for m in drawn if 0 < self._batches(m) <= self.batches)]
        del filled[len(filled) - self.drop_last :]
        while len(filled) < count:
            largest = max(filled, key=len)
            half = -(-len(largest) // 2)
            filled.append(largest[half:] or largest)
            del largest[half:]
        for index, samples in enumerate(filled[:count]):
            if index % self.num_replicas == self.rank:
                yield from samples
                rest, rows = self.tokens - int(self.lengths[samples].sum()), self.rows - len(samples)
                yield from (len(self.lengths) + (rest + row) // rows for row in range(rows))

    def _orders(self) -> Iterator[Integers]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        while True:
            yield torch.randperm(len(self.lengths), generator=generator).numpy()

    def _microbatches(self, order: Integers) -> list[Integers]:
        # Every row, also of filler, has at least one token, and at most ``width``.
        padding = self.width - self.lengths, self.rows * self.width - self.tokens
        return _cut(order, (self.lengths - 1, self.tokens - self.rows), padding)

    def _batches(self, microbatches: Sequence[Integers]) -> int:
        share = self.parts * self.num_replicas
        return (len(microbatches) - 1) // share if self.drop_last else -(-len(microbatches) // share)


def _cut(order: Integers, *bounds: tuple[Integers, int | float]) -> list[Integers]:
    """Cut an order of samples when the next one would exceed a bound on the sum of a number that each sample has."""
    sums = [(np.concatenate([[0], np.cumsum(numbers[order])]), most) for numbers, most in bounds]
    cuts = [0]
    while cuts[-1] < len(order):
        ends = [np.searchsorted(total, total[cuts[-1]] + most, side="right") - 1 for total, most in sums]
        cuts.append(max(int(min(ends)), cuts[-1] + 1))
    return np.split(order, cuts[1:-1])
