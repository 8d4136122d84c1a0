"""bitsandbytes' StableEmbedding in the place of the word embedding of a model whose weights are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def apply_stable_embedding(model: nn.Module) -> list[nn.Parameter]:
    """Turn the word embedding into a StableEmbedding: a LayerNorm over each row looked up, before positions are added.

    The module, its weight (and so weights tied to it), hooks and name stay. Its weight is not drawn anew, as
    StableEmbedding's own constructor would, and the norm starts with the mean standard deviation of the rows as
    its gain, so that a pretrained model keeps the proportion of words to positions that it was trained with.

    Args:
        model: Changed in place. A transformers model (or one around it), or one with a single ``nn.Embedding``.

    Returns:
        The new parameters, ``norm.weight`` and ``norm.bias`` of shape [hidden]; none if it was one already.

    Raises:
        ValueError: No word embedding of class ``nn.Embedding`` is found, or it is frozen.

    Source: Dettmers et al., arXiv 2110.02861, section 2.3.
    """
    from bitsandbytes.nn import StableEmbedding

    module = _word_embedding(model)
    if isinstance(module, StableEmbedding):
        return []
    if type(module) is not nn.Embedding:
        raise ValueError(f"the word embedding is a {type(module).__name__}, not an nn.Embedding")
    if not module.weight.requires_grad:
        raise ValueError("the word embedding is frozen, and a stable embedding is for training it")
    norm = nn.LayerNorm(module.embedding_dim, device=module.weight.device)
    with torch.no_grad():
        norm.weight.fill_(float(module.weight.float().std(1, correction=0).mean()))
    # Its constructor would register the module in bitsandbytes' process-wide manager, for good.
    module.__class__ = StableEmbedding
    module.norm = norm.train(module.training)
    return list(norm.parameters())


def _word_embedding(model: nn.Module) -> nn.Module:
    modules: list[Any] = list(model.modules())
    for module in modules:
        if hasattr(module, "get_input_embeddings"):
            try:
                return module.get_input_embeddings()
            except NotImplementedError:
                continue
    found = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    if len(found) != 1:
        raise ValueError(f"which of its {len(found)} embeddings holds the words, the model does not say")
    return found[0]


def stable_embeddings(model: nn.Module) -> dict[str, Any]:
    """The StableEmbedding modules of a model by name."""
    from bitsandbytes.nn import StableEmbedding

    return {name: m for name, m in model.named_modules() if isinstance(m, StableEmbedding)}


def folded_weights(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of the stock model that computes the same: each row of the embedding already normalised.

    Args:
        model: With stable embeddings; not changed.
        weights: Its state dict; not changed.

    Returns:
        A new dict, without the norms' entries. ``weights`` as it is where the embedding is tied to a decoder,
        which reads the rows as they are.
    """
    folded = dict(weights)
    for name, module in stable_embeddings(model).items():
        own = f"{name}.weight"
        if any(k != own and v.data_ptr() == weights[own].data_ptr() for k, v in weights.items()):
            return weights
        with torch.no_grad(), torch.autocast(module.weight.device.type, enabled=False):
            folded[own] = module.norm(module.weight.float()).to(module.weight.dtype)
        for key in [k for k in weights if k.startswith(f"{name}.norm.")]:
            del folded[key]
    return folded
