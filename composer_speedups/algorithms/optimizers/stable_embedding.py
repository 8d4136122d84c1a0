"""Convert a model's word embedding to bitsandbytes' StableEmbedding, keeping its weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from composer_speedups.algorithms.optimizers.swap import UnfitOptimizerError


def make_stable_embedding(model: nn.Module) -> list[nn.Parameter]:
    """Convert the word embedding to a StableEmbedding, which applies LayerNorm to each row before positions are added.

    The module, its weight (hence also tied weights), hooks and name are kept. The norm's gain is initialized with the
    mean standard deviation of the rows, so a pretrained model keeps its proportion of words to positions.

    Args:
        model: A transformers model (or a module around one), or a model with a single ``nn.Embedding``; changed in
            place.

    Returns:
        The new parameters, ``norm.weight`` and ``norm.bias`` of shape [hidden]; empty if it already was converted.

    Raises:
        UnfitOptimizerError: No word embedding of class ``nn.Embedding`` is found, or it is frozen.

    Source: Dettmers et al., arXiv 2110.02861, section 2.3.
    """
    from bitsandbytes.nn import StableEmbedding

    module = _word_embedding(model)
    if isinstance(module, StableEmbedding):
        return []
    fix = "set stable_embedding=False"
    if type(module) is not nn.Embedding:
        raise UnfitOptimizerError(f"the word embedding is a {type(module).__name__}, not an nn.Embedding", fix)
    if not module.weight.requires_grad:
        raise UnfitOptimizerError("the word embedding is frozen, and a stable embedding must be trained", fix)
    norm = nn.LayerNorm(module.embedding_dim, device=module.weight.device)
    with torch.no_grad():
        norm.weight.fill_(float(module.weight.float().std(1, correction=0).mean()))
    # StableEmbedding's constructor would permanently register the module in bitsandbytes' process-wide manager.
    module.__class__ = StableEmbedding
    module.norm = norm.train(module.training)
    return list(norm.parameters())


def _word_embedding(model: nn.Module) -> Any:
    modules: list[Any] = list(model.modules())
    for module in modules:
        if hasattr(module, "get_input_embeddings"):
            try:
                return module.get_input_embeddings()
            except NotImplementedError:
                continue
    embeddings = [m for m in modules if isinstance(m, nn.Embedding)]
    return embeddings[0] if len(embeddings) == 1 else None


def stable_embeddings(model: nn.Module) -> dict[str, Any]:
    """Return the StableEmbedding modules of a model by name."""
    from bitsandbytes.nn import StableEmbedding

    return {name: m for name, m in model.named_modules() if isinstance(m, StableEmbedding)}


def folded_weights(model: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict of an equivalent stock model, in which the rows of the embedding are normalised.

    ``weights`` is the model's own state dict. It is returned if the embedding is tied to a decoder, which reads rows
    that are not normalised.
    """
    folded = dict(weights)
    for name, module in stable_embeddings(model).items():
        own = f"{name}.weight"
        if any(key != own and tensor.data_ptr() == weights[own].data_ptr() for key, tensor in weights.items()):
            return weights
        with torch.no_grad(), torch.autocast(module.weight.device.type, enabled=False):
            folded[own] = module.norm(module.weight.float()).to(module.weight.dtype)
        del folded[f"{name}.norm.weight"], folded[f"{name}.norm.bias"]
    return folded
