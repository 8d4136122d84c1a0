"""Hugging Face classifier or masked LM → ComposerModel that knows its FLOPs."""

from __future__ import annotations

from typing import Any

import torch
from composer.metrics import CrossEntropy, LanguageCrossEntropy, MaskedAccuracy
from composer.models import HuggingFaceModel, huggingface
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSequenceClassification, BertConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from composer_speedups.core.errors import ConfigError
from composer_speedups.core.files import cannot_be_loaded
from composer_speedups.core.replaced import replaced
from composer_speedups.families.flops import batch_lengths, block_weights, frozen_flops, training_flops
from composer_speedups.tasks.config import ModelConfig
from composer_speedups.tasks.metrics import gather_alike
from composer_speedups.tasks.model_names import SIZES, resolve_name

__all__ = ["FinetuneModel", "build_model", "resolve_name"]

# Weights that a pretrained encoder need not have: the head, which fine-tuning trains.
_HEADS = ("classifier", "pooler", "cls", "lm_head", "score", "vocab_", "pre_classifier")
_WITHOUT_HEAD = (
    "to train a new head on its encoder, save that alone with transformers' AutoModel.from_pretrained(…)"
    ".save_pretrained(FOLDER), and the tokenizer beside it"
)
# A model's own files may name code of theirs, for which transformers would otherwise ask on the console.
_SAFE: dict[str, Any] = {"trust_remote_code": False}


class FinetuneModel(HuggingFaceModel):
    """Composer's HuggingFaceModel with the FLOPs of a training step on real tokens."""

    _block_weights: list[torch.Tensor] | None = None  # found once: it takes as long as launching a layer

    def loss(self, outputs: Any, batch: Any) -> Any:
        """The model's own; 0 for a micro-batch without a masked token, which would be the mean of nothing."""
        loss = super().loss(outputs, batch)
        labels = batch.get("labels")
        if isinstance(loss, torch.Tensor) and labels is not None and labels.ndim == 2:
            return torch.where((labels != -100).any(), loss, torch.zeros_like(loss))
        return loss

    def flops_per_batch(self, batch: Any) -> int:
        """FLOPs of a forward and backward pass over ``batch``, padding left out; see :func:`.training_flops`."""
        lengths = batch_lengths(batch)
        assert lengths is not None
        is_mlm = type(self.model).__name__.endswith("ForMaskedLM")
        flops = training_flops(self.model.config, lengths, "mlm" if is_mlm else "classification")
        if self._block_weights is None:
            self._block_weights = block_weights(self.model)
        return flops - frozen_flops(self._block_weights, lengths)


def build_model(config: ModelConfig, tokenizer: Any, max_length: int) -> FinetuneModel:
    """The model of the config, with eager attention: SDPA is a technique, not a hidden default.

    Args:
        config: Name or size, task, and how to initialise.
        tokenizer: Saved with checkpoints and exports; its vocabulary sizes a random model.
        max_length: Tokens a row, which a random model must have positions for.

    Raises:
        ConfigError: It cannot be loaded, is no encoder, has a head for another number of labels, or lacks encoder
            weights, vocabulary or positions.
    """
    auto = AutoModelForMaskedLM if config.task == "mlm" else AutoModelForSequenceClassification
    settings: dict[str, Any] = {} if config.dropout is None else _dropout(config.dropout)
    if config.task == "classification":
        # transformers would set it in the first forward pass, and torch.compile would compile that pass anew.
        settings |= {"problem_type": "single_label_classification"}
        settings |= {"id2label": {0: "negative", 1: "positive"}, "label2id": {"negative": 0, "positive": 1}}
    name = resolve_name(config.name)
    if config.size is not None:
        bert = _sized(config.size, len(tokenizer), max_length, tokenizer.pad_token_id, settings)
        model = auto.from_config(bert, attn_implementation="eager")
    else:
        model = _loaded(auto, name, config, settings)
    _check_fit(model.config, name, tokenizer, max_length)
    # Its check of the labels, which the data's own has seen to, would wait for the device at each batch.
    accuracy = MulticlassAccuracy(num_classes=2, average="micro", validate_args=False)
    metrics: list[Metric] = [accuracy, CrossEntropy()]
    if config.task == "mlm":
        metrics = [MaskedAccuracy(), LanguageCrossEntropy()]
    for metric in metrics:  # counts and sums, of one shape on all ranks
        metric.dist_sync_fn = gather_alike
    # To find out whether a model is a causal LM, Composer imports all of transformers' 180, for seconds.
    with replaced(huggingface, "_is_registered_causal_lm", lambda model: False):
        return FinetuneModel(
            model,
            tokenizer=tokenizer,
            use_logits=True,  # without it, eval metrics would get the whole output object
            metrics=metrics if config.train_metrics else None,
            eval_metrics=metrics,
        )


def _dropout(rate: float) -> dict[str, float]:
    return {"hidden_dropout_prob": rate, "attention_probs_dropout_prob": rate}


def _sized(size: str, vocab: int, max_length: int, pad: int, settings: dict[str, Any]) -> BertConfig:
    layers, hidden, heads = SIZES[size]
    return BertConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        max_position_embeddings=max(512, max_length),
        pad_token_id=pad,
        **settings,
    )


def _loaded(auto: Any, name: str, asked: ModelConfig, settings: dict[str, Any]) -> Any:
    try:
        stored = AutoConfig.from_pretrained(name, **_SAFE)
        _check_encoder(stored, name)
        _check_quantisation(stored, name)  # transformers would ask for a package, or build layers that do not train
        if asked.init == "random":
            config = AutoConfig.from_pretrained(name, **_SAFE, **settings)
            config.name_or_path = ""  # the weights are not those of that name
            return auto.from_config(config, attn_implementation="eager")
        if asked.task == "classification":
            _check_labels(stored, name)
        settings = {**settings, **_SAFE, "weights_only": True, "ignore_mismatched_sizes": True}
        model, info = auto.from_pretrained(name, attn_implementation="eager", output_loading_info=True, **settings)
    except ConfigError:
        raise
    except Exception as error:  # OSError, ValueError, safetensors' and the hub's own classes
        fix = "give a local folder, or model.init=random with model.size"
        raise cannot_be_loaded("model.name", name, error, fix) from error
    for key, has, needs in sorted(info["mismatched_keys"]):
        raise ConfigError(
            f"model.name: {name!r} has {key} of shape {list(has)} and not {list(needs)}, as model.task: {asked.task} "
            f"and its config need; {_WITHOUT_HEAD}"
        )
    missing = [key for key in sorted(info["missing_keys"]) if not any(head in key for head in _HEADS)]
    if missing:
        raise ConfigError(
            f"model.name: {name!r} lacks {len(missing)} encoder weights, {missing[0]} among them, "
            "which would train from random values; give a complete model"
        )
    return model


def _check_encoder(config: Any, name: str) -> None:
    """Refuse a decoder, which attends to the tokens before only, reads padding from another side, and counts other
    FLOPs than those of :func:`.training_flops`."""
    kind = None
    if getattr(config, "is_encoder_decoder", False):
        kind = "an encoder-decoder"
    elif getattr(config, "is_decoder", False) or (
        config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        and config.model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES  # BERT and its kin are in both
    ):
        kind = "a decoder"
    if kind is not None:
        raise ConfigError(
            f"model.name: {name!r} ({type(config).__name__}) is {kind}, which this program does not train; give an "
            "encoder of the BERT family, such as BERT, RoBERTa, DistilBERT, ELECTRA or ModernBERT"
        )


def _check_labels(config: Any, name: str) -> None:
    """Refuse a classifier that was trained for another number of labels; of an encoder alone the number is nothing."""
    is_classifier = any(each.endswith("ForSequenceClassification") for each in config.architectures or ())
    if is_classifier and config.num_labels != 2:
        labels = f"{config.num_labels} label{'s' if config.num_labels != 1 else ''}"
        raise ConfigError(
            f"model.name: {name!r} is a classifier of {labels}, and model.task: classification needs 2; {_WITHOUT_HEAD}"
        )


def _check_quantisation(config: Any, name: str) -> None:
    if settings := getattr(config, "quantization_config", None):
        raise ConfigError(
            f"model.name: {name!r} holds quantised weights ({settings.get('quant_method')}), which cannot be trained; "
            "give the folder of the model before it was quantised"
        )


def _check_fit(config: Any, name: str, tokenizer: Any, max_length: int) -> None:
    if config.vocab_size < len(tokenizer):
        raise ConfigError(
            f"data.tokenizer has {len(tokenizer)} tokens and the model {name!r} only {config.vocab_size}; "
            "use the model's own tokenizer"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and max_length > positions:
        raise ConfigError(f"data.max_length: {max_length} is more than the {positions} positions of {name!r}")
