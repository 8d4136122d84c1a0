"""Find a model's blocks, which are packed, fused, compiled once, recomputed or frozen, and the modules before them."""

from __future__ import annotations

from typing import Any

from torch import nn

from composer_speedups.families.family import Family, family_of, family_titles
from composer_speedups.packing.call import module_at
from composer_speedups.packing.derived_classes import stock_class


def blocks_of(encoder: nn.Module) -> nn.ModuleList:
    """The blocks of an encoder of a known family."""
    family = family_of(type(encoder))
    assert family is not None
    return module_at(encoder, family.blocks)  # type: ignore[no-any-return]


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of an encoder of a known family, or else the longest ModuleList with modules of one class, by name.

    ModuleLists inside such a list are parts of its blocks. With several encoders, the one with the most blocks is used.

    Raises:
        ValueError: The model has no such list.
    """
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, nn.ModuleList) and len({stock_class(type(m)) for m in module}) == 1 and not inside:
            lists[name] = module
    encoders = [(module, family) for module in model.modules() if (family := family_of(type(module))) is not None]
    known = [module_at(module, family.blocks) for module, family in encoders]
    lists = {name: blocks for name, blocks in lists.items() if any(blocks is other for other in known)} or lists
    if not lists:
        raise ValueError("the model has no ModuleList with blocks of one class")
    name, blocks = max(lists.items(), key=lambda item: len(item[1]))
    return {f"{name}.{i}" if name else str(i): block for i, block in enumerate(blocks)}


def only_encoder(model: nn.Module) -> nn.Module:
    """The only encoder of a known family in a model, which may be the model itself; ValueError if there is not one."""
    families = [(module, family_of(type(module))) for module in model.modules()]
    encoders = [module for module, family in families if family is not None and _is(module, family, family.encoder)]
    if len(encoders) != 1:
        raise ValueError(
            f"the model has {len(encoders)} encoders; a model with one encoder of these families is supported: "
            f"{family_titles()}"
        )
    return encoders[0]


def first_layers(model: nn.Module, blocks: int) -> dict[str, nn.Module]:
    """The modules that compute the input of block number ``blocks``, counted from 0, by name.

    For 0, these are the embeddings only; otherwise also what else a family computes before its first block, or from
    which all blocks read positions (:attr:`.Family.around_blocks`).

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
    if blocks and family.inner_layer:
        raise ValueError(f"the blocks of {family.title} run several times each, so the first of them are the last, too")
    chosen: list[Any] = [*_embeddings(model, encoder, family), *every[:blocks]]
    for kind, name in (place.split(".") for place in family.around_blocks if blocks):
        chosen += [getattr(module, name, None) for module in model.modules() if _is(module, family, kind)]
    return {name: module for name, module in model.named_modules() if any(module is one for one in chosen)}


def _embeddings(model: nn.Module, encoder: Any, family: Family) -> list[Any]:
    if not family.embeddings:
        return [encoder.get_input_embeddings()]
    found = [module for module in model.modules() if _is(module, family, family.embeddings)]
    if len(found) != 1:
        raise ValueError(f"the model has {len(found)} modules of class {family.embeddings}, instead of one")
    return found


def _is(module: nn.Module, family: Family, kind: str) -> bool:
    """Whether a module is of a class of the family, or of one derived from it."""
    home = f"transformers.models.{family.name}.modeling_{family.name}"
    return any((base.__module__, base.__name__) == (home, kind) for base in type(module).__mro__)
