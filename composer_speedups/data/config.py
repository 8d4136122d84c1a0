"""The config keys under ``data``."""

from dataclasses import dataclass
from typing import Literal

from composer_speedups.core.settings import key

__all__ = ["GENERATED", "DataConfig"]

GENERATED = 8000
"""Number of built-in or random samples for ``train_samples: null`` and ``eval_samples: null``."""


@dataclass
class DataConfig:
    source: Literal["hub", "files", "mds", "builtin", "random"] = "hub"
    """Hub, local files, MDS shards, generated samples, or random tokens (nothing to learn)."""
    streaming: bool = False
    """With source hub or files: stream the training samples instead of loading them into memory (docs/data.md)."""
    shuffle_buffer: int = key(10_000, ge=1, le=10_000_000)
    """With streaming: number of samples in the shuffle buffer."""
    hub_name: str = "stanfordnlp/imdb"
    """Dataset on the hub, with source: hub."""
    hub_config: str | None = None
    """Configuration of the hub dataset, such as mrpc of nyu-mll/glue."""
    hub_revision: str | None = None
    """Branch, tag or commit of the hub dataset; null for the newest."""
    train_split: str = "train"
    """Split of the hub dataset to train on."""
    eval_split: str | None = "test"
    """Split of the hub dataset to validate on; null trains without validation."""
    train_file: str | None = None
    """With source: files, a .parquet, .csv, .tsv, .jsonl, .conll or .txt file, a pattern of several (train-*.parquet),
    or a folder that datasets.save_to_disk wrote; with mds, the folder or address of the shards."""
    eval_file: str | None = None
    """The same for validation; null trains without validation."""
    eval_fraction: float | None = key(None, gt=0, lt=1)
    """Validate on this fraction of the training samples, drawn with data.seed, instead of eval_file or eval_split."""
    text_columns: list[str] | None = None
    """Columns of the text, two for pairs; null for the task's defaults (docs/data.md), [text] for classification."""
    label_column: str | None = None
    """Column of the label; null for the task's default, label for classification."""
    label_columns: list[str] | None = None
    """Task multilabel: columns of 0 and 1, one per label, instead of label_column."""
    labels: list[str] | None = None
    """Names of the classes in the order of the head's outputs; null for those of the training samples."""
    label_all_pieces: bool = False
    """Task token_classification: label every word piece of a word, not only the first."""
    truncation: Literal["longest_first", "only_first", "only_second"] = "longest_first"
    """Which text of a pair is truncated to data.max_length: the longer one token by token, the first or the second."""
    train_samples: int | None = key(None, ge=1)
    """Number of samples to train on, drawn at random with data.seed; null for all (8,000 if they are generated)."""
    eval_samples: int | None = key(None, ge=1)
    """Number of samples to validate on, drawn in the same way; for reranking, queries with all their documents."""
    seed: int = key(17, ge=0, lt=2**31)
    """Seed of drawing samples and of the built-in samples."""
    length_scale: float = key(1.0, gt=0, le=10)
    """Built-in reviews: length as a multiple of IMDB's (mean about 230 words at 1.0)."""
    tokenizer: str | None = None
    """Hub id or local folder; null for the model's; `wordpiece` trains one on the training samples."""
    vocab_size: int = key(4096, ge=128, le=200_000)
    """Size of the vocabulary with tokenizer: wordpiece."""
    max_length: int = key(256, ge=3, le=100_000)
    """Maximum number of tokens per sample."""
    padding: Literal["max_length", "longest"] = "max_length"
    """Pad each batch to max_length, or to its longest sample."""
    pad_to_multiple_of: int = key(8, ge=1, le=1024)
    """With padding: longest, round the length up to a multiple of this (at most max_length)."""
    length_batching: int | None = key(None, ge=2, le=100_000)
    """Sort samples by length within pools of this many batches, so that batches have similar lengths; null draws
    batches at random."""
    mlm_probability: float = key(0.15, gt=0, lt=1)
    """Task mlm: fraction of the tokens (or words) that are masked."""
    whole_word_masking: bool = False
    """Task mlm: mask all word pieces of a word together."""
    packing: bool = False
    """Task mlm: concatenate the texts and cut them into rows of max_length tokens, so that rows are not padded."""
    batch_size: int = key(40, ge=1, le=1_000_000)
    """Samples per optimizer step, over all ranks together."""
    eval_batch_size: int | None = key(None, ge=1, le=1_000_000)
    """Samples per validation batch, over all ranks together; null for data.batch_size."""
    workers: int = key(0, ge=0, le=256)
    """Number of DataLoader worker processes per rank; 0 loads in the training process."""
    pin_memory: bool = True
    """Page-locked host memory for batches; has an effect only with a GPU."""
    prefetch_factor: int | None = key(None, ge=1, le=1024)
    """Batches prefetched by each worker; null for torch's default (2)."""
    persistent_workers: bool = False
    """Keep the workers alive between epochs."""
    worker_timeout: float = key(600.0, gt=0, le=86_400)
    """Seconds to wait for a batch from workers before the run fails."""
    drop_last: bool = False
    """Drop the last training batch of an epoch if it is incomplete."""
    cache_dir: str = ".cache/composer_speedups"
    """Folder of tokenized samples and trained tokenizers."""
