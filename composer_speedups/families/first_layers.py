"""Find a model's first layers: its embeddings and its first blocks, with everything that they read."""

from __future__ import annotations

from typing import Any

from torch import nn

from composer_speedups.families.blocks import blocks_of
from composer_speedups.families.family import Family, family_of, family_titles


def only_encoder(model: nn.Module) -> nn.Module:
    """The only encoder of a known family in a model, which may be the model itself.

    Raises:
        ValueError: There is none, or there are several.
    """
    families = [(module, family_of(type(module))) for module in model.modules()]
    encoders = [module for module, family in families if family is not None and _is(module, family, family.encoder)]
    if len(encoders) != 1:
        raise ValueError(
            f"the model has {len(encoders)} encoders; a model with one encoder of these families is supported: "
            f"{family_titles()}"
        )
    return encoders[0]


def first_layers(model: nn.Module, blocks: int) -> dict[str, nn.Module]:
    """The modules that compute the input of block number ``blocks``, counted from 0.

    Args:
        model: A model with one encoder of a known family.
        blocks: Number of blocks. For 0, the result is the embeddings only; otherwise it also has what else a family
            computes before its first block, or from which all blocks read positions (:attr:`.Family.around_blocks`).

    Returns:
        Name → module, in the model's order.

    Raises:
        ValueError: The model has no encoder of a known family, or several; it has fewer blocks, or blocks that run
            several times each; or its embeddings were replaced.
    """
    encoder = only_encoder(model)
    family = family_of(type(encoder))
    assert family is not None
    every = blocks_of(encoder)
    if blocks > len(every):
        raise ValueError(f"the model has {len(every)} blocks, not {blocks}")
    if blocks and family.repeats_blocks:
        raise ValueError(f"the blocks of {family.title} run several times each, so the first of them are the last, too")
    chosen: list[Any] = [*_embeddings(model, encoder, family), *every[:blocks]]
    if blocks:
        chosen += _around_blocks(model, family)
    return {name: module for name, module in model.named_modules() if any(module is one for one in chosen)}


def _embeddings(model: nn.Module, encoder: Any, family: Family) -> list[Any]:
    if not family.embeddings:
        return [encoder.get_input_embeddings()]
    found = [module for module in model.modules() if _is(module, family, family.embeddings)]
    if len(found) != 1:
        raise ValueError(f"the model has {len(found)} modules of class {family.embeddings}, instead of one")
    return found


def _around_blocks(model: nn.Module, family: Family) -> list[nn.Module]:
    places = [place.split(".") for place in family.around_blocks]
    held = [vars(m)["_modules"].get(name) for kind, name in places for m in model.modules() if _is(m, family, kind)]
    return [module for module in held if module is not None]


def _is(module: nn.Module, family: Family, kind: str) -> bool:
    """Whether a module is of a class of the family, or of one derived from it."""
    home = f"transformers.models.{family.name}.modeling_{family.name}"
    return any((base.__module__, base.__name__) == (home, kind) for base in type(module).__mro__)
