"""Which models can run unpadded, and turning their encoders."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn
from transformers import ModernBertModel, PreTrainedModel

from composer_speedups.algorithms.surgery import swap_class
from composer_speedups.algorithms.unpadding.attention import register
from composer_speedups.algorithms.unpadding.encoders import FAMILIES, UnpaddedEncoder
from composer_speedups.algorithms.unpadding.modernbert import UnpaddedModernBertModel

__all__ = ["swap_encoders"]

_SUPPORTED = "BERT, RoBERTa, ELECTRA, DistilBERT and ModernBERT"
_CLASSES = {**FAMILIES, ModernBertModel: UnpaddedModernBertModel}
# Heads that read no slot whose label says to ignore it; all others read the first slot of each row.
_TOKEN_HEADS = ("ForMaskedLM", "ForTokenClassification", "ElectraForPreTraining")
_POOLING_HEADS = ("ForSequenceClassification", "ForMultipleChoice")  # ModernBERT's, over the mask where it says so
_REFUSED_HEADS = {
    "ForQuestionAnswering": "whose loss is over padding positions too",
    "ForCausalLM": "which is a decoder",
    "LMHeadModel": "which is a decoder",
}


class _Found(NamedTuple):
    encoder: Any
    base: PreTrainedModel  # the model directly around it
    head: str  # class of the outermost one


def swap_encoders(model: nn.Module, pad_to_multiple_of: int) -> list[str]:
    """Turn every supported encoder in ``model``; returns the names of those that were not yet.

    Raises:
        ValueError: There is none, or one that cannot run unpadded; nothing is changed then.
    """
    found = _find(model)
    for each in found:
        _check(each)
    changed = []
    for old, new in _CLASSES.items():
        changed += swap_class(model, old, new)
    for encoder, base, head in found:
        base.set_attn_implementation(register())
        encoder.model_config = base.config
        encoder.pad_to_multiple_of = pad_to_multiple_of
        pools_all = getattr(base.config, "classifier_pooling", None) == "mean"
        encoder.reads_first = not (head.endswith(_TOKEN_HEADS) or (pools_all and head.endswith(_POOLING_HEADS)))
    return changed


def _find(model: nn.Module) -> list[_Found]:
    modules = dict(model.named_modules())
    around = {name: module for name, module in modules.items() if isinstance(module, PreTrainedModel)}
    found = []
    for name, module in modules.items():
        if type(module) in _CLASSES or isinstance(module, UnpaddedEncoder):
            # outermost first; ModernBERT's is one itself
            outside = [m for n, m in around.items() if m is not module and (n == "" or name.startswith(f"{n}."))]
            if not outside:
                raise ValueError(f"the encoder {name!r} stands alone; unpadding needs the model around it")
            found.append(_Found(module, outside[-1], type(outside[0]).__name__))
    if not found:
        kinds = sorted({str(m.config.model_type) for m in around.values()}) or ["a model without transformers' parts"]
        raise ValueError(f"unpadding knows {_SUPPORTED}, and this is {', '.join(kinds)}")
    return found


def _check(found: _Found) -> None:
    config = found.base.config
    refused = next((why for end, why in _REFUSED_HEADS.items() if found.head.endswith(end)), None)
    if refused:
        raise ValueError(f"unpadding cannot serve {found.head}, {refused}")
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ValueError("unpadding cannot serve a decoder: its attention is causal or has a second input")
    if getattr(config, "chunk_size_feed_forward", 0):
        raise ValueError("unpadding needs chunk_size_feed_forward=0: chunks need a fixed number of tokens")
    if getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        raise ValueError(f"unpadding knows absolute positions, and these are {config.position_embedding_type}")
