"""Convert a model's word embedding to bitsandbytes' StableEmbedding, and back to a stock model's in the export."""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.nn import StableEmbedding
from torch import nn


def make_stable_embedding(model: nn.Module) -> list[nn.Parameter]:
    """Convert the word embedding in place to a StableEmbedding, which applies LayerNorm to each row before positions
    are added, and return the norm's new parameters; empty if it was converted before.

    The norm's gain is initialized with the mean standard deviation of the rows, so a pretrained model keeps its
    proportion of words to positions. Source: Dettmers et al., arXiv 2110.02861, section 2.3.
    """
    inner: Any = next((module for module in model.modules() if hasattr(module, "get_input_embeddings")), None)
    module = None if inner is None else inner.get_input_embeddings()
    if isinstance(module, StableEmbedding):
        return []
    if type(module) is not nn.Embedding:
        raise ValueError(f"the word embedding is a {type(module).__name__}, not an nn.Embedding")
    if not module.weight.requires_grad:
        raise ValueError("the word embedding is frozen, and a stable embedding must be trained")
    norm = nn.LayerNorm(module.embedding_dim, device=module.weight.device)
    with torch.no_grad():
        norm.weight.fill_(float(module.weight.float().std(1, correction=0).mean()))
    module.__class__ = StableEmbedding  # its constructor would register the module for the process's lifetime
    module.norm = norm.train(module.training)
    return list(norm.parameters())


def stable_embeddings(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, StableEmbedding)}


def folded_weights(model: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """The state dict of an equivalent stock model, whose embedding has normalised rows; the model's own ``weights`` if
    a decoder is tied to the embedding, since it reads rows that are not normalised."""
    folded = dict(weights)
    for name, module in stable_embeddings(model).items():
        own = f"{name}.weight"
        if any(key != own and tensor.data_ptr() == weights[own].data_ptr() for key, tensor in weights.items()):
            return weights
        with torch.no_grad(), torch.autocast(module.weight.device.type, enabled=False):
            folded[own] = module.norm(module.weight.float()).to(module.weight.dtype)
        del folded[f"{name}.norm.weight"], folded[f"{name}.norm.bias"]
    return folded
