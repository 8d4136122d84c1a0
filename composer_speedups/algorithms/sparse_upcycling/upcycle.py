"""Find a model's dense feed-forward layers and replace them by experts in place."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from composer_speedups.algorithms.sparse_upcycling.experts import Routing, SparseFeedForward
from composer_speedups.core.stock import outermost_models
from composer_speedups.families.family import families, family_of


class Block(NamedTuple):
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


def find_blocks(model: nn.Module, encoder: PreTrainedModel) -> list[Block]:
    """Return the feed-forward layers of a model, first to last, whether dense or already sparse.

    They are searched where the encoder's family has them, or for an unknown family, where any family has them.
    """
    family = family_of(type(encoder))
    asked = families() if family is None else [family]
    layouts = {layout for each in asked if (layout := each.feed_forward) is not None}
    found = []
    for name, module in model.named_modules():
        for layout in layouts:
            owned = [_owner(module, path) for path in layout]
            if all(hasattr(*each) for each in owned):
                owners, attributes = zip(*owned, strict=True)
                found.append(Block(name, owners, attributes))
    return found


def _owner(module: Any, path: str) -> tuple[Any, str]:
    """Return the module that owns the last attribute of a path (None if it does not exist), and the attribute."""
    *outer, attribute = path.split(".")
    for name in outer:
        module = getattr(module, name, None)
    return module, attribute


def encoder_of(model: nn.Module) -> PreTrainedModel:
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


def upcycle(block: Block, routing: Routing, *, experts: int, top_k: int) -> dict[nn.Parameter, list[nn.Parameter]]:
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
