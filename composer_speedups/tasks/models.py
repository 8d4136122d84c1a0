"""Build a task's model: a transformers model with the task's head, wrapped as a ComposerModel that counts FLOPs."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch
import transformers
from composer.models import HuggingFaceModel, huggingface
from torchmetrics import Metric
from transformers import BertConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from composer_speedups.core.errors import ConfigError
from composer_speedups.core.files import cannot_be_loaded
from composer_speedups.core.pretrained import pretrained_config, pretrained_model, pretrained_tokenizer
from composer_speedups.core.reversible import temporary_attribute
from composer_speedups.families.flops import BlockRun, Lengths, block_runs, frozen_flops, training_flops
from composer_speedups.packing.rows import IGNORED
from composer_speedups.tasks.metrics import gather_alike, gather_lists
from composer_speedups.tasks.settings import SIZES, ModelConfig, resolve_name
from composer_speedups.tasks.task import Task

# Weights that a pretrained encoder may lack: the head, which fine-tuning trains.
_HEADS = ("classifier", "pooler", "cls", "lm_head", "score", "vocab_", "pre_classifier")
_WITHOUT_HEAD = (
    "to train a new head on its encoder, save that alone with transformers' AutoModel.from_pretrained(…)"
    ".save_pretrained(FOLDER), and the tokenizer beside it"
)


class FinetuneModel(HuggingFaceModel):
    """Composer's HuggingFaceModel with a task's loss and metrics, and the FLOPs of a training step on real tokens.

    Args:
        model: A transformers model with the task's head.
        task: The task.
        tokenizer: Saved with checkpoints and exports.
        max_length: Maximum number of tokens per sample.
        train_metrics: Compute metrics for each training batch.
    """

    _block_runs: list[BlockRun] | None = None  # determined once, because it takes as long as launching a layer
    prefix_is_cached = False  # set by layer_freezing: training steps do not compute the frozen blocks

    def __init__(
        self, model: Any, task: Task, tokenizer: Any = None, max_length: int = 512, *, train_metrics: bool = True
    ) -> None:
        # to check for a causal LM, Composer would import all 180 of transformers, which takes seconds
        with temporary_attribute(huggingface, "_is_registered_causal_lm", lambda model: False):
            # metrics receive logits instead of the whole output
            super().__init__(model, tokenizer=tokenizer, use_logits=True)
        if not has_token_types(model):
            self.model_forward_args.discard("token_type_ids")
        self.task, self.max_length = task, max_length
        self.train_metrics = metrics_of(task, training=True) if train_metrics else None
        self.val_metrics = metrics_of(task, training=False)

    @property
    def reads_real_tokens(self) -> bool:
        """Whether nothing reads the outputs of a bare encoder at padding positions; assumed False for custom tasks."""
        return self.task.pools_real_tokens and type(self.task).__module__.startswith("composer_speedups.tasks.")

    def forward(self, batch: Any) -> Any:
        return self.task.outputs(self.model, {k: v for k, v in batch.items() if k in self.model_forward_args})

    def loss(self, outputs: Any, batch: Any) -> Any:
        """The task's loss; 0 for a micro-batch without labelled tokens, whose mean would be NaN."""
        loss = self.task.loss(outputs, batch)
        if self.task.loss_per_token and isinstance(loss, torch.Tensor):
            return torch.where((batch["labels"] != IGNORED).any(), loss, torch.zeros_like(loss))
        return loss

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        """A batch's logits; its labels are set aside for the metrics. Composer's method warns of a deprecation."""
        self.labels = batch.pop("labels", None)
        logits = (outputs or self.forward(batch))["logits"]
        return logits.squeeze(1) if logits.ndim == 2 and logits.shape[1] == 1 else logits

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> dict[str, Any]:
        labels: Any = self.labels
        if metric.device.type == "cpu" and labels is not None:
            self.labels = labels = labels.cpu()
        self.task.update_metric(metric, outputs, labels, batch)
        return {}

    def flops_of_rows(self, lengths: Lengths, head_tokens: int | None = None) -> int:
        """FLOPs of a forward and backward pass over rows of these lengths; see :func:`.training_flops`."""
        head: Literal["classification", "mlm"] = "mlm" if self.task.name == "mlm" else "classification"
        flops = training_flops(self.model.config, lengths, head, head_tokens)
        if self._block_runs is None:
            self._block_runs = block_runs(self.model)
        return flops - frozen_flops(self.model, self._block_runs, lengths, cached=self.prefix_is_cached)


def metrics_of(task: Task, *, training: bool) -> dict[str, Metric]:
    with warnings.catch_warnings():  # ranking metrics keep every score, which fits in memory for an evaluation set
        warnings.filterwarnings("ignore", "Metric .* will save all", UserWarning)
        metrics = task.metrics(training=training)
    for metric in metrics.values():
        lists = [name for name, default in metric._defaults.items() if isinstance(default, list)]
        for name in lists:  # joined before they are gathered, because ranks may differ in their number of batches
            metric.add_state(name, default=[], dist_reduce_fx="cat")
        metric.dist_sync_fn = gather_lists if lists else gather_alike  # sums have the same shape on all ranks
    return metrics


def build_model(config: ModelConfig, task: Task, tokenizer: Any, max_length: int) -> FinetuneModel:
    """Build the config's model, with eager attention, because SDPA is a technique."""
    auto = getattr(transformers, task.auto_class)
    settings = task.head_settings()
    if config.dropout is not None:
        settings |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), config.dropout)
    name = resolve_name(config.name)
    if config.size is not None:
        layers, hidden, heads = SIZES[config.size]
        bert = BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * hidden,
            max_position_embeddings=max(512, max_length),
            pad_token_id=tokenizer.pad_token_id,
            **settings,
        )
        model = _from_config(auto, bert, task, config.dtype)
    else:
        model = _loaded(auto, name, config, task, settings)
    _check_fit(model, name, tokenizer, max_length)
    if config.init == "pretrained":
        _check_vocabulary(name, tokenizer)
    return FinetuneModel(model, task, tokenizer, max_length, train_metrics=config.train_metrics)


def _from_config(auto: Any, config: Any, task: Task, dtype: str) -> Any:
    arguments = task.model_arguments(auto._model_mapping[type(config)])
    return auto.from_config(config, attn_implementation="eager", dtype=getattr(torch, dtype), **arguments)


def _loaded(auto: Any, name: str, asked: ModelConfig, task: Task, settings: dict[str, Any]) -> Any:
    try:
        stored = pretrained_config(name)
        _check_encoder(stored, name)
        config = pretrained_config(name, **settings)
        if asked.init == "random":
            config.name_or_path = ""  # the weights belong to another model
            return _from_config(auto, config, task, asked.dtype)
        _check_labels(stored, name, task, settings)
        arguments = task.model_arguments(auto._model_mapping[type(config)])
        dtype = getattr(torch, asked.dtype)
        model, info = pretrained_model(
            auto, name, config, "model.name", dtype=dtype, ignore_mismatched_sizes=True, **arguments
        )
    except ConfigError:
        raise
    except Exception as error:  # OSError, ValueError, and classes of safetensors and the hub
        fix = "use another folder, or model.init=random with model.size"
        raise cannot_be_loaded("model.name", name, error, fix) from error
    for key, has, needs in sorted(info["mismatched_keys"]):
        raise ConfigError(
            f"model.name: {name!r} has {key} of shape {list(has)}, not {list(needs)} as model.task: {task.name} "
            f"and its config need; {_WITHOUT_HEAD}"
        )
    missing = [key for key in sorted(info["missing_keys"]) if not any(head in key for head in _HEADS)]
    if missing:
        raise ConfigError(
            f"model.name: {name!r} lacks {len(missing)} encoder weights, {missing[0]} among them, "
            "which would start from random values; use a complete model"
        )
    return model


def _check_encoder(config: Any, name: str) -> None:
    """Refuse decoders, whose attention is causal and whose FLOPs differ from :func:`.training_flops`."""
    kind = config.model_type  # BERT and similar encoders are also among the causal LMs
    causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if causal or getattr(config, "is_encoder_decoder", False) or getattr(config, "is_decoder", False):
        raise ConfigError(
            f"model.name: {name!r} ({type(config).__name__}) is or has a decoder, which this program does not train; "
            "use an encoder of the BERT family, such as BERT, RoBERTa, DistilBERT, ELECTRA or ModernBERT"
        )


def _check_labels(config: Any, name: str, task: Task, settings: dict[str, Any]) -> None:
    """Refuse a head that was trained for other labels. A bare encoder has no labels to check."""
    needed = len(settings["id2label"]) if "id2label" in settings else settings.get("num_labels")
    head = task.auto_class.removeprefix("AutoModel")
    if needed is None or not any(name.endswith(head) for name in config.architectures or ()):
        return
    if config.num_labels != needed:
        raise ConfigError(
            f"model.name: the head of {name!r} is for {config.num_labels} label(s), and model.task: {task.name} needs "
            f"{needed} for this data; {_WITHOUT_HEAD}"
        )
    stored, wanted = list(config.id2label.values()), list(settings.get("id2label", {}).values())
    if stored != wanted and sorted(stored) == sorted(wanted):
        raise ConfigError(
            f"model.name: the head of {name!r} has its labels in a different order than the data; set "
            f"data.labels=[{','.join(stored)}]"
        )


def positions_of(model: Any) -> int | None:
    """The largest number of tokens that a model has positions for; None for one with relative positions only."""
    for name, module in model.named_modules():  # RoBERTa and MPNet count from the position after the padding token's
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    positions: int | None = getattr(model.config, "max_position_embeddings", None)
    return positions


def has_token_types(model: Any) -> bool:
    """Whether a model may tell the two texts of a pair apart. RoBERTa and others have one type of tokens only."""
    return getattr(model.config, "type_vocab_size", 2) > 1


def _check_fit(model: Any, name: str, tokenizer: Any, max_length: int) -> None:
    if model.config.vocab_size < len(tokenizer):
        raise ConfigError(
            f"data.tokenizer has {len(tokenizer)} tokens and the model {name!r} only {model.config.vocab_size}; "
            "use the model's own tokenizer"
        )
    positions = positions_of(model)
    if positions is not None and max_length > positions:
        raise ConfigError(
            f"data.max_length: {max_length} is more than the {positions} positions of {name!r}; set {positions} or less"
        )


def _check_vocabulary(name: str, tokenizer: Any) -> None:
    """Refuse a tokenizer other than the one of the pretrained embeddings, added tokens aside."""
    if tokenizer.name_or_path == name:
        return
    try:
        given, own = tokenizer.get_vocab(), pretrained_tokenizer(name).get_vocab()
    except Exception:  # OSError, ValueError, and classes of tokenizers and the hub: the model has none
        return
    fewer, more = sorted((given, own), key=len)
    if other := next((token for token, number in fewer.items() if more.get(token) != number), None):
        raise ConfigError(
            f"data.tokenizer gives the token {other!r} the id {given.get(other)}, and that of {name!r} "
            f"{own.get(other)}; use the model's own tokenizer, or set model.init=random"
        )
