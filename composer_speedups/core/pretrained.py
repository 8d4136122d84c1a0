"""Load configurations, tokenizers and models with transformers, without executing code that their files name.

Nothing else in this package calls ``from_pretrained``.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import find_adapter_config_file

from composer_speedups.core.errors import ConfigError

__all__ = ["pretrained_config", "pretrained_model", "pretrained_tokenizer"]


def pretrained_config(name: str, **settings: Any) -> Any:
    """The configuration of a model: a local folder, or a hub id. ``settings`` replace values of the file."""
    return AutoConfig.from_pretrained(name, trust_remote_code=False, **settings)


def pretrained_tokenizer(name: str, **settings: Any) -> Any:
    """The tokenizer in a local folder or of a hub id. ``settings`` replace values of the file.

    Raises:
        ValueError: There is none. transformers would build one without a vocabulary from the model's type, and every
            word would become ``[UNK]``.
    """
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **settings)
    words = set(tokenizer.get_vocab().values()) - {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    if len(words) < 2:  # T5's has a piece for the space
        raise ValueError("no vocabulary: its tokenizer's files are missing")
    return tokenizer


def pretrained_model(
    auto: Any, name: str, config: Any, key: str, *, dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[Any, dict[str, Any]]:
    """Load a model in eval mode, with eager attention.

    Args:
        auto: The auto class of transformers.
        name: A local folder or a hub id.
        config: Its stored configuration; a hub id is loaded from the same commit.
        key: The config key or argument that names the model, for errors.
        dtype: Dtype of the weights, whatever the dtype of the stored ones. Default float32.
        settings: Values that replace those of the stored configuration, and arguments of the model's class.

    Returns:
        The model, and transformers' loading info: its missing, unexpected and mismatched keys.

    Raises:
        ConfigError: The model has PEFT adapters. transformers would load them, and PEFT imports the module that their
            configuration names.
    """
    commit = getattr(config, "_commit_hash", None)
    pinned = {} if commit is None else {"revision": commit}
    if find_adapter_config_file(name, **pinned) is not None:
        raise ConfigError(
            f"{key}: {name!r} has PEFT adapters (adapter_config.json), which are not loaded, because their "
            "configuration can name code to execute; use the base model, or merge the adapters into it with PEFT's "
            "merge_and_unload() and save_pretrained"
        )
    model, info = auto.from_pretrained(
        name,
        trust_remote_code=False,
        weights_only=True,
        attn_implementation="eager",
        dtype=dtype,
        output_loading_info=True,
        **pinned,
        **settings,
    )
    return model, info
