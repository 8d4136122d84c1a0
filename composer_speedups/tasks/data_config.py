"""The config keys under ``data``."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from composer_speedups.core.settings import Check, Settings

GENERATED = 8000
"""Number of built-in or random samples for ``train_samples: null`` and ``eval_samples: null``."""


class DataConfig(Settings):
    source: Literal["hub", "files", "mds", "builtin", "random"] = "hub"
    """Hub, local files, MDS shards, generated samples, or random tokens (nothing to learn)."""
    streaming: bool = False
    """With source hub or files: stream the training samples instead of loading them into memory (docs/data.md)."""
    shuffle_buffer: int = Field(10_000, ge=1, le=10_000_000)
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
    eval_fraction: float | None = Field(None, gt=0, lt=1)
    """Validate on this fraction of the training samples, drawn with data.seed, instead of eval_file or eval_split."""
    on_invalid: Literal["stop", "drop"] = "stop"
    """Rows without text, or whose label is missing or unknown: stop before training and list them, or drop them and
    report which."""
    train_samples: int | None = Field(None, ge=1)
    """Number of samples to train on, drawn at random with data.seed; null for all (8,000 if they are generated)."""
    eval_samples: int | None = Field(None, ge=1)
    """Number of samples to validate on, drawn in the same way; for reranking, queries with all their documents."""
    seed: int = Field(17, ge=0, lt=2**31)
    """Seed of drawing samples and of the built-in samples."""
    length_scale: float = Field(1.0, gt=0, le=10)
    """Built-in reviews: length as a multiple of IMDB's (mean about 230 words at 1.0)."""
    tokenizer: str | None = None
    """Hub id or local folder; null for the model's; `wordpiece` trains one on the training samples."""
    vocab_size: int = Field(4096, ge=128, le=200_000)
    """Size of the vocabulary with tokenizer: wordpiece."""
    max_length: int = Field(256, ge=3, le=100_000)
    """Maximum number of tokens per sample."""
    padding: Literal["max_length", "longest"] = "max_length"
    """Pad each batch to max_length, or to its longest sample."""
    pad_to_multiple_of: int = Field(8, ge=1, le=1024)
    """With padding: longest, round the length up to a multiple of this (at most max_length)."""
    length_batching: int | None = Field(None, ge=2, le=100_000)
    """Sort samples by length within pools of this many batches, so that batches have similar lengths; null draws
    batches at random."""
    batch_size: int = Field(40, ge=1, le=1_000_000)
    """Samples per optimizer step, over all ranks together."""
    eval_batch_size: int | None = Field(None, ge=1, le=1_000_000)
    """Samples per validation batch, over all ranks together; null for data.batch_size."""
    workers: int = Field(0, ge=0, le=256)
    """Number of DataLoader worker processes per rank; 0 loads in the training process."""
    pin_memory: bool = True
    """Page-locked host memory for batches; has an effect only with a GPU."""
    prefetch_factor: int | None = Field(None, ge=1, le=1024)
    """Batches prefetched by each worker; null for torch's default (2)."""
    persistent_workers: bool = False
    """Keep the workers alive between epochs."""
    drop_last: bool = False
    """Drop the last training batch of an epoch if it is incomplete."""
    cache_dir: str = ".cache/composer_speedups"
    """Folder of tokenized samples and trained tokenizers."""

    @property
    def streams(self) -> bool:
        """Whether the training samples are streamed, so that nothing can be known of all of them up front."""
        return self.streaming or self.source == "mds"

    def checks(self) -> Iterator[Check]:
        source, files = self.source, self.source in ("files", "mds")
        no_stream = f"is for data.source: hub or files, not {source}; remove it"
        yield self.streaming and source not in ("hub", "files"), "streaming", no_stream
        path = "path or pattern of its files" if source == "files" else "folder or address of its shards"
        missing = f"is missing; data.source: {source} needs the {path}"
        yield files and self.train_file is None, "train_file", missing
        needless = "train_file" if self.train_file else "eval_file"
        no_effect = f"has no effect with data.source: {source}; set data.source=files"
        yield not files and (self.train_file or self.eval_file), needless, no_effect
        wordpiece = self.tokenizer == "wordpiece"
        textless = "wordpiece is trained on texts, and data.source: random has none; name a tokenizer"
        yield source == "random" and wordpiece, "tokenizer", textless
        useless = "saves no padding with data.padding: max_length; set data.padding=longest"
        yield self.length_batching is not None and self.padding != "longest", "length_batching", useless
        if self.streams:
            uncounted = "drop counts invalid rows up front; streaming cannot; set data.on_invalid=stop"
            yield self.on_invalid == "drop", "on_invalid", uncounted
            draws = "draws random samples, which streaming cannot; set data.train_samples=null"
            yield self.train_samples is not None, "train_samples", draws
            no_lengths = "needs every length up front; streaming cannot provide them; remove it"
            yield self.length_batching is not None, "length_batching", no_lengths
            no_texts = "wordpiece is trained on all texts up front; streaming cannot provide them; name a tokenizer"
            yield wordpiece, "tokenizer", no_texts
        if self.eval_fraction is not None:
            both = "and data.eval_file both define the validation samples; set one of them to null"
            yield self.eval_file is not None, "eval_fraction", both
            in_memory = source in ("hub", "files") and not self.streaming
            yield not in_memory, "eval_fraction", "needs data.source: hub or files, read into memory"
