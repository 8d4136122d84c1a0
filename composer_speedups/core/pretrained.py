"""Load configurations, tokenizers and models with transformers, without executing code that their files name.

Nothing else in this package calls ``from_pretrained``.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers.utils import find_adapter_config_file

from composer_speedups.core.errors import ConfigError


def pretrained_config(name: str, **settings: Any) -> Any:
    """The configuration of a model, with other ``settings``; ValueError for those that it does not know, and for
    quantised weights.

    Keys of transformers' internals are left out: ``"_attn_implementation": "owner/kernel"`` would execute code.
    """
    stored = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if quantisation := getattr(stored, "quantization_config", None):
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else type(quantisation).__name__
        raise ValueError(f"its weights are quantised with {method}; use the model before quantisation")
    commit = getattr(stored, "_commit_hash", None)
    values, _ = PreTrainedConfig.get_config_dict(name, revision=commit)
    config, unknown = type(stored).from_dict(
        {**_public(values), "name_or_path": name}, return_unused_kwargs=True, **settings
    )
    if unknown:
        raise ValueError(f"{type(config).__name__} has no {', '.join(unknown)}")
    config._commit_hash = commit
    return config


_PRIVATE = ("attn_implementation", "experts_implementation")
_BY_LABEL = ("id2label", "label2id")


def _public(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _public(value) if isinstance(value, dict) and key not in _BY_LABEL else value
        for key, value in values.items()
        if not key.startswith("_") and key not in _PRIVATE
    }


def pretrained_tokenizer(name: str, **settings: Any) -> Any:
    """The tokenizer, with other ``settings``; ValueError if there is none, for which transformers would build one
    without a vocabulary."""
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **settings)
    words = set(tokenizer.get_vocab().values()) - {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    if len(words) < 2:  # T5's has a piece for the space
        raise ValueError("no vocabulary: its tokenizer's files are missing")
    return tokenizer


def pretrained_model(
    auto: Any, name: str, config: Any, key: str, *, dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[Any, dict[str, Any]]:
    """Load a model in eval mode, with eager attention and weights in ``dtype``, and transformers' loading info: its
    missing, unexpected and mismatched keys. PEFT adapters are refused: their configuration names a module to import."""
    revision = getattr(config, "_commit_hash", None) or "main"
    if find_adapter_config_file(name, revision=revision) is not None:
        raise ConfigError(
            f"{key}: {name!r} has PEFT adapters (adapter_config.json), whose configuration can name code to execute; "
            "use the base model, or merge the adapters into it with PEFT's merge_and_unload() and save_pretrained"
        )
    model, info = auto.from_pretrained(
        name,
        config=config,
        trust_remote_code=False,
        weights_only=True,
        attn_implementation="eager",
        dtype=dtype,
        output_loading_info=True,
        revision=revision,
        **settings,
    )
    return model, info
