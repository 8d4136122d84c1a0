"""Replace a model's feed-forward layers by experts, and load an exported model with experts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from composer_speedups.algorithms.sparse_upcycling.modules import Routing, SparseFeedForward
from composer_speedups.core.optimizer_state import replace_parameters
from composer_speedups.core.pretrained import pretrained_config
from composer_speedups.core.stock import outermost_models
from composer_speedups.families.family import families, family_of, family_titles


def upcycle(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], *, experts: int, every: int, top_k: int
) -> None:
    """Replace layers ``every``, ``2·every``, … (counted from 1) by experts, which are copies of the layer.

    The outputs do not change, except for the rounding of weights that add up to one. The settings are stored in the
    model's config as ``sparse_upcycling``. A model that already has these experts is not changed.

    Args:
        model: A Hugging Face model of a family with BERT's or DistilBERT's feed-forward layers, or a module that
            contains one; changed in place.
        optimizers: Experts and routers join the parameter groups of the weights that they replace.
        experts: Experts per layer.
        every: See above.
        top_k: Experts per token.

    Raises:
        ValueError: There is no layer to replace, or the model has layers of experts with other settings.
    """
    encoder, settings = _encoder_of(model), {"experts": experts, "every": every, "top_k": top_k}
    blocks = _find_blocks(model, encoder)
    present = getattr(encoder.config, "sparse_upcycling", None)
    if any(block.is_sparse for block in blocks):
        if present != settings:
            raise ValueError(f"the model already has layers of experts with {present}; build a new model")
        return
    chosen = blocks[every - 1 :: every]
    if not chosen:
        family = family_of(type(encoder))
        if family is not None and family.feed_forward is None:
            known = family_titles(lambda family: family.feed_forward)
            raise ValueError(f"it supports the feed-forward layers of {known}, and this is {family.title}")
        raise ValueError(
            f"the model has {len(blocks)} feed-forward layers like BERT's or DistilBERT's, and every={every} "
            "selects none of them"
        )
    routing = Routing()
    replaced: dict[nn.Parameter, list[nn.Parameter]] = {}
    for block in chosen:
        replaced |= _upcycle(block, routing, experts=experts, top_k=top_k)
    encoder.register_forward_pre_hook(routing.begin, with_kwargs=True)
    encoder.register_forward_hook(routing.end)
    encoder.config.sparse_upcycling = settings
    replace_parameters(list(optimizers), replaced, {p: n for n, p in model.named_parameters()})


def load_sparse_upcycling(folder: str | Path, auto: Any = AutoModelForSequenceClassification) -> PreTrainedModel:
    """Load a model with experts from a folder that ``save_pretrained`` or train.py wrote.

    transformers' ``from_pretrained`` would not find weights for the layers that were replaced by experts.

    Args:
        folder: A local folder with a config.json, which has the settings, and safetensors files.
        auto: The auto class of the model's task. Default AutoModelForSequenceClassification.

    Returns:
        The model in eval mode, on the CPU, in the dtype of its weights.

    Raises:
        ValueError: The folder does not have a model with experts, or lacks some of its weights.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    config = pretrained_config(str(folder)) if files else None
    settings = getattr(config, "sparse_upcycling", None)
    if settings is None:
        raise ValueError(f"{folder} does not have an exported model with experts; load it with from_pretrained")
    with torch.random.fork_rng(devices=[]):  # the drawn weights are overwritten below
        model: PreTrainedModel = auto.from_config(config)
        upcycle(model, (), **settings)
    weights = {name: weight for file in files for name, weight in load_file(file).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    model.tie_weights()
    lacking = [name for name in missing if name not in model.all_tied_weights_keys] + list(unexpected)
    if lacking:
        raise ValueError(f"the weights in {folder} do not fit its config: {lacking[0]} and {len(lacking) - 1} more")
    return model.eval()


class _Block(NamedTuple):
    """A feed-forward block: the owners and attributes of its first Linear, its activation and its second Linear."""

    name: str  # name of the layer
    owners: tuple[nn.Module, nn.Module, nn.Module]
    attributes: tuple[str, str, str]

    @property
    def parts(self) -> tuple[Any, Any, Any]:
        first, middle, last = (getattr(o, a) for o, a in zip(self.owners, self.attributes, strict=True))
        return first, middle, last

    @property
    def is_sparse(self) -> bool:
        return isinstance(self.parts[0], SparseFeedForward)


def _find_blocks(model: nn.Module, encoder: PreTrainedModel) -> list[_Block]:
    """Return the feed-forward layers of a model, first to last, whether dense or already sparse.

    They are searched where the encoder's family has them, or for an unknown family, where any family has them.
    """
    family = family_of(type(encoder))
    searched = families() if family is None else [family]
    layouts = {layout for family in searched if (layout := family.feed_forward) is not None}
    blocks = []
    for name, module in model.named_modules():
        for layout in layouts:
            places = [_owner(module, path) for path in layout]
            if all(hasattr(owner, attribute) for owner, attribute in places):
                owners, attributes = zip(*places, strict=True)
                blocks.append(_Block(name, owners, attributes))
    return blocks


def _owner(module: Any, path: str) -> tuple[Any, str]:
    """Return the module that owns the last attribute of a path (None if it does not exist), and the attribute."""
    *outer, attribute = path.split(".")
    for name in outer:
        module = getattr(module, name, None)
    return module, attribute


def _encoder_of(model: nn.Module) -> PreTrainedModel:
    """Return the Hugging Face encoder in a model, which has the config and receives the attention mask.

    Raises:
        ValueError: There is none, or it computes its feed-forward layers in chunks.
    """
    outermost = next(iter(outermost_models(model).values()), None)
    if outermost is None:
        raise ValueError("the model has no Hugging Face model whose feed-forward layers could be replaced by experts")
    if getattr(outermost.config, "chunk_size_feed_forward", 0):
        raise ValueError("experts need all tokens of a layer at once; set the model's chunk_size_feed_forward to 0")
    encoder = outermost.base_model
    assert isinstance(encoder, PreTrainedModel)
    return encoder


def _upcycle(block: _Block, routing: Routing, *, experts: int, top_k: int) -> dict[nn.Parameter, list[nn.Parameter]]:
    """Replace a dense block by experts, and return the new parameters for each removed one.

    The experts replace the first Linear, and identities the rest of the block. So the layer's forward is unchanged,
    including its dropout, residual and LayerNorm.
    """
    up, activation, down = block.parts
    sparse = SparseFeedForward(up, activation, down, experts=experts, top_k=top_k, name=block.name, routing=routing)
    sparse.train(up.training)
    parts = (sparse, nn.Identity(), nn.Identity())
    for owner, attribute, new in zip(block.owners, block.attributes, parts, strict=True):
        setattr(owner, attribute, new)
    replaced: dict[nn.Parameter, list[nn.Parameter]] = {}
    for part, dense in (("up", up), ("down", down)):
        for name, old in dense.named_parameters():
            replaced[old] = [expert.get_submodule(part).get_parameter(name) for expert in sparse.experts]
    replaced[up.weight].append(sparse.router.get_parameter("weight"))
    return replaced
