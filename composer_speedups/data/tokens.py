"""The tokenizer and the tokenized samples, both cached on disk."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from datasets import Dataset
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from composer_speedups.core.errors import ConfigError, DataError
from composer_speedups.core.files import cannot_be_loaded, check_folder, make_folder, replace_folder
from composer_speedups.core.pretrained import pretrained_tokenizer
from composer_speedups.data.summary import Truncation
from composer_speedups.tasks.settings import DataConfig
from composer_speedups.tasks.task import Task

_MEASURED = 1000  # samples that are tokenized again to measure truncation
_UNLIMITED = 10**6  # tokens of a text, to measure truncation
_SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}


def load_tokenizer(
    config: DataConfig, model_name: str, texts: Sequence[str] | None, *, splits_words: bool = False
) -> Any:
    """Load a tokenizer, or train WordPiece on ``texts``; with ``splits_words``, RoBERTa's put a space before words."""
    if config.tokenizer == "wordpiece":
        assert texts is not None  # ensured by the schema's checks
        return _trained(config, list(texts))
    key = "model.name" if config.tokenizer is None else "data.tokenizer"
    name = check_folder(config.tokenizer or model_name, key)
    try:
        tokenizer = pretrained_tokenizer(name)
        if splits_words and getattr(tokenizer, "add_prefix_space", True) is False:
            tokenizer = pretrained_tokenizer(name, add_prefix_space=True)
    except Exception as error:  # OSError, ValueError, KeyError and classes of the hub
        fix = "save the model's tokenizer in that folder, or name a folder that has it in data.tokenizer"
        raise cannot_be_loaded(key, name, error, fix) from error
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            f"{key}: the tokenizer of {name!r} has no padding token; use a BERT-like encoder and its tokenizer"
        )
    return tokenizer


def _trained(config: DataConfig, texts: list[str]) -> PreTrainedTokenizerFast:
    folder = Path(config.cache_dir) / "tokenizers" / _digest(texts, config.vocab_size)
    if not os.path.isdir(folder):  # also False if the name is too long, which make_folder reports
        make_folder(folder.parent, "data.cache_dir")
        with replace_folder(folder, keep_existing=True) as partial:  # another process may create it first
            _train_wordpiece(texts, config.vocab_size).save_pretrained(partial)
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exceptions
        raise DataError(  # other versions may have trained it with other ids, which checkpoints now depend on
            f"data.cache_dir: the tokenizer in {folder} is damaged; delete that folder to train it again"
        ) from error


def _train_wordpiece(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    # The trainer numbers the characters in words in the order of a hash table, and breaks ties by these numbers. With a
    # predefined alphabet the numbers are the same in every process. A vocabulary of size 0 contains all characters and
    # no merges.
    inner = sorted(token for token in _vocabulary(texts, 0, []) if token.startswith("##"))
    tokenizer = _wordpiece(_vocabulary(texts, vocab_size, inner))  # a new trainer, for which they are not special
    cls, sep = (tokenizer.token_to_id(_SPECIAL[name]) for name in ("cls", "sep"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", cls), ("[SEP]", sep)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],  # as in BERT's own
        **{f"{name}_token": token for name, token in _SPECIAL.items()},
    )


def _vocabulary(texts: list[str], size: int, first: list[str]) -> dict[str, int]:
    """What WordPiece learns from the texts: special tokens, those of ``first``, characters, and merges."""
    tokenizer = _wordpiece({})
    special = [*_SPECIAL.values(), *first]
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.get_vocab()


def _wordpiece(vocab: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=_SPECIAL["unk"]))  # type: ignore[call-arg]
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def tokenize(dataset: Dataset, tokenizer: Any, config: DataConfig, task: Task) -> Dataset:
    """The columns of :meth:`.Task.encode`, cached under a hash of the samples, the tokenizer and the settings."""
    columns = [part for name in dataset.column_names for part in (name, dataset[name])]
    name = _digest(*columns, _identity(tokenizer), config.max_length, repr(task))
    cache = make_folder(Path(config.cache_dir) / "tokens", "data.cache_dir") / f"{name}.arrow"

    def run() -> Dataset:
        return dataset.map(
            lambda rows: task.encode(rows, tokenizer, config.max_length),
            batched=True,
            remove_columns=dataset.column_names,
            cache_file_name=str(cache),
            load_from_cache_file=True,
            new_fingerprint=name[:32],
            desc="tokenizing",
        )

    with contextlib.suppress(pyarrow.ArrowInvalid, pyarrow.ArrowIOError):  # a damaged cache file costs a second pass
        tokens = run()
        if len(tokens) == len(dataset):  # otherwise the file was truncated between two batches
            return tokens
    cache.unlink()
    return run()


def measure_truncation(samples: Dataset, tokenizer: Any, config: DataConfig, task: Task) -> Truncation:
    """How many samples ``max_length`` truncates, of at most 1,000 at random, which are tokenized once more."""
    drawn = np.random.default_rng(config.seed).permutation(len(samples))[:_MEASURED]
    # a copy, because a tokenizer keeps the length of its last call, which is exported
    encoded = task.encode(samples.select(drawn)[:], copy.deepcopy(tokenizer), _UNLIMITED)
    texts = encoded.get("lengths") or [[len(ids)] for ids in encoded["input_ids"]]
    widths = np.array([max(lengths) for lengths in texts])
    length = int(np.quantile(widths, 0.95, method="inverted_cdf"))
    return Truncation(float((widths > config.max_length).mean()), length, exact=len(drawn) == len(samples))


def _identity(tokenizer: Any) -> str:
    """Everything that determines a tokenizer's ids, except the length."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return json.dumps(tokenizer.get_vocab(), sort_keys=True)
    # Truncation and padding of the latest call are excluded, because otherwise a second run would not find its cache.
    return json.dumps({**json.loads(backend.to_str()), "truncation": None, "padding": None}, sort_keys=True)


def _digest(*parts: Any) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        for item in part if isinstance(part, list) else [part]:
            data = str(item).encode()
            hasher.update(len(data).to_bytes(8, "big") + data)
    return hasher.hexdigest()
