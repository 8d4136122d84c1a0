"""The config keys under ``data``."""

from dataclasses import dataclass
from typing import Literal

from composer_speedups.core.settings import key

__all__ = ["DataConfig"]


@dataclass
class DataConfig:
    source: Literal["hub", "files", "mds", "builtin", "random"] = "hub"
    """Hub, local parquet/csv/jsonl files, MDS shards, generated reviews, or random tokens (nothing to learn)."""
    streaming: bool = False
    """With source hub or files: read the training reviews as training goes (docs/DATA.md)."""
    shuffle_buffer: int = key(10_000, ge=1, le=10_000_000)
    """With streaming: reviews held in memory, from which the next one is drawn."""
    hub_name: str = "stanfordnlp/imdb"
    """Dataset on the hub, with source: hub."""
    train_split: str = "train"
    """Split of the hub dataset to train on."""
    eval_split: str = "test"
    """Split of the hub dataset to validate on."""
    train_file: str | None = None
    """Local .parquet, .csv or .jsonl file to train on, with source: files; folder or address of shards, with mds."""
    eval_file: str | None = None
    """Local file to validate on, with source: files or mds; null trains without validation."""
    text_column: str = "text"
    """Column of the reviews."""
    label_column: str = "label"
    """Column of the labels: 0 or 1."""
    train_samples: int | None = key(8000, ge=1)
    """Reviews to train on, drawn at random with data.seed; null takes all of them."""
    eval_samples: int | None = key(8000, ge=1)
    """Reviews to validate on, drawn likewise."""
    seed: int = key(17, ge=0, lt=2**31)
    """Seed of the draw and of the built-in reviews."""
    length_scale: float = key(1.0, gt=0, le=10)
    """Built-in reviews: length as a multiple of IMDB's (mean about 230 words at 1.0)."""
    tokenizer: str | None = None
    """Hub id or local folder; null takes the model's; `wordpiece` trains one on the training reviews."""
    vocab_size: int = key(4096, ge=128, le=200_000)
    """Size of the vocabulary with tokenizer: wordpiece."""
    max_length: int = key(256, ge=3, le=100_000)
    """Tokens a review is cut to."""
    padding: Literal["max_length", "longest"] = "max_length"
    """Pad each batch to max_length, or to its longest review."""
    pad_to_multiple_of: int = key(8, ge=1, le=1024)
    """With padding: longest, round the length up to this multiple (never past max_length)."""
    length_batching: int | None = key(None, ge=2, le=100_000)
    """Batches of reviews of like length, sorted within pools of this many batches; null draws each batch at random."""
    mlm_probability: float = key(0.15, gt=0, lt=1)
    """Share of the tokens masked, with model.task: mlm."""
    batch_size: int = key(40, ge=1, le=1_000_000)
    """Reviews an optimizer step, over all ranks together."""
    eval_batch_size: int | None = key(None, ge=1, le=1_000_000)
    """Reviews a validation batch, over all ranks together; null takes data.batch_size."""
    workers: int = key(0, ge=0, le=256)
    """DataLoader worker processes a rank; 0 loads in the training process."""
    pin_memory: bool = True
    """Page-locked host memory for batches; has an effect on a GPU only."""
    prefetch_factor: int | None = key(None, ge=1, le=1024)
    """Batches loaded ahead by each worker; null is torch's default (2)."""
    persistent_workers: bool = False
    """Keep the workers from one epoch to the next."""
    worker_timeout: float = key(600.0, gt=0, le=86_400)
    """Seconds to wait for a batch from workers; a run that gets none ends, instead of waiting for ever."""
    drop_last: bool = False
    """Drop the last training batch of an epoch when it is short."""
    cache_dir: str = ".cache/composer_speedups"
    """Folder of tokenized reviews and trained tokenizers."""
