"""Tiny random models of every supported family with every head, and batches that fit them."""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import (
    AlbertConfig,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    CamembertConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    EsmConfig,
    EuroBertConfig,
    JinaEmbeddingsV3Config,
    ModernBertConfig,
    MPNetConfig,
    NomicBertConfig,
    PreTrainedConfig,
    RobertaConfig,
    T5Config,
    XLMRobertaConfig,
)

from tests.helpers.common import VOCABULARY, Batch

Family = str  # one of EVERY and ENCODERS
Head = Literal["classification", "tokens", "choice", "answering", "mlm"]
FAMILIES: tuple[Family, ...] = ("bert", "roberta", "distilbert", "electra")
ROTARY: tuple[Family, ...] = ("esm", "eurobert", "nomic_bert", "jina_embeddings_v3")
UNPADDED: tuple[Family, ...] = (*FAMILIES, "albert", "mpnet", "modernbert", "deberta_v2", *ROTARY)
COPIES: tuple[Family, ...] = ("xlm_roberta", "camembert")  # RoBERTa's code by other names; tests/families has them
EVERY: tuple[Family, ...] = (*UNPADDED, *COPIES)
ENCODERS: tuple[Family, ...] = ("t5",)  # most of their heads are on a decoder
# whose layers fused_layers supports
FUSED: tuple[Family, ...] = (*FAMILIES, "modernbert", "deberta_v2", "albert", "mpnet", "esm", "jina_embeddings_v3")
HEADS: tuple[Head, ...] = ("classification", "mlm")  # one that reads a slot a row, and one that reads all

_AUTO: dict[Head, Any] = {
    "classification": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
    "choice": AutoModelForMultipleChoice,
    "answering": AutoModelForQuestionAnswering,
    "mlm": AutoModelForMaskedLM,
}


def tiny_model(
    family: Family,
    head: Head = "classification",
    *,
    dropout: float = 0.0,
    attention_dropout: float | None = None,
    seed: int = 0,
    layers: int = 2,
    **settings: Any,
) -> Any:
    """Layers of 32 with eager attention and, in ``settings``, anything else of the configuration."""
    torch.manual_seed(seed)
    config = _config(family, layers, dropout, dropout if attention_dropout is None else attention_dropout)
    for name, value in settings.items():
        setattr(config, name, value)
    return _AUTO[head].from_config(config, attn_implementation="eager")


def _config(family: Family, layers: int, dropout: float, attention_dropout: float) -> PreTrainedConfig:
    common = {"vocab_size": VOCABULARY, "max_position_embeddings": 80, "initializer_range": 0.2}
    if family == "distilbert":
        rates = {"dropout": dropout, "attention_dropout": attention_dropout}
        rates |= {"seq_classif_dropout": dropout, "qa_dropout": dropout}
        return DistilBertConfig(n_layers=layers, n_heads=2, dim=32, hidden_dim=64, **common, **rates)
    if family == "modernbert":
        rates = dict.fromkeys(("embedding_dropout", "mlp_dropout", "classifier_dropout"), dropout)
        kinds = ["full_attention", "sliding_attention"] * layers
        return ModernBertConfig(
            **{**common, "initializer_range": 0.3},  # its layers scale it down
            num_hidden_layers=layers,
            num_attention_heads=2,
            hidden_size=32,
            intermediate_size=32,
            pad_token_id=0,
            layer_types=kinds[-layers:],  # the last is local
            local_attention=8,
            attention_dropout=attention_dropout,
            **rates,
        )
    if family == "eurobert":
        sizes = {"num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
        tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 3}
        settings = {"attention_dropout": attention_dropout, "intermediate_size": 64, "classifier_pooling": "bos"}
        settings |= {"tie_word_embeddings": True}
        return EuroBertConfig(**common, **sizes, **tokens, **settings)
    if family == "t5":
        sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "num_layers": layers, "vocab_size": VOCABULARY}
        sizes |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
        return T5Config(**sizes, dropout_rate=dropout, classifier_dropout=dropout)
    common |= {"num_hidden_layers": layers, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64}
    common |= {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": attention_dropout}
    if family == "mpnet":
        return MPNetConfig(**common)
    if family == "esm":  # with what ESM-2 has; tests/families/test_variants.py has its token_dropout
        return EsmConfig(**common, position_embedding_type="rotary", pad_token_id=1, mask_token_id=3)
    common |= {"type_vocab_size": 2}
    if family == "deberta_v2":  # as v3 has it, with buckets of several distances within the tests' rows
        own: dict[str, Any] = {"relative_attention": True, "position_buckets": 6, "norm_rel_ebd": "layer_norm"}
        own |= {"share_att_key": True, "pos_att_type": "p2c|c2p", "position_biased_input": False}
        return DebertaV2Config(**common, **own, pooler_dropout=dropout)
    if family == "electra":
        common |= {"summary_last_dropout": dropout}  # of its head for multiple choice
        return ElectraConfig(embedding_size=16, **common)  # smaller than the hidden size: a projection between
    if family == "nomic_bert":
        return NomicBertConfig(**common)
    if family == "jina_embeddings_v3":
        return JinaEmbeddingsV3Config(**common)
    if family == "albert":
        own = {"embedding_size": 16, "classifier_dropout_prob": dropout, "hidden_act": "gelu"}  # as version 1 has it
        return AlbertConfig(**own, **common)
    like_bert = {"roberta": RobertaConfig, "xlm_roberta": XLMRobertaConfig, "camembert": CamembertConfig}
    return like_bert.get(family, BertConfig)(**common)


def fit_batches(model: Any, batches: list[Batch]) -> list[Batch]:
    """The batches with the model's padding id, from which RoBERTa counts positions, and labels of every third token for
    a masked LM."""
    pad = model.config.pad_token_id
    fitted = []
    for batch in batches:
        real = batch["attention_mask"].bool()
        ids = batch["input_ids"].masked_fill(batch["input_ids"] == pad, pad + 1).masked_fill(~real, pad)
        labels = batch["labels"]
        if type(model).__name__.endswith("ForMaskedLM"):
            asked = real & (torch.arange(ids.shape[1]) % 3 == 0)
            labels = ids.masked_fill(~asked, -100)
        fitted.append({**batch, "input_ids": ids, "labels": labels})
    return fitted
