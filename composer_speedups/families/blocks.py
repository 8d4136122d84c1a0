"""Find the blocks of an encoder or a model: the modules that are packed, fused, compiled once, or recomputed."""

from __future__ import annotations

from typing import Any

from torch import nn

from composer_speedups.families.family import family_of
from composer_speedups.packing.derived_classes import stock_class


def blocks_of(encoder: nn.Module) -> nn.ModuleList:
    """The blocks of an encoder of a known family."""
    family = family_of(type(encoder))
    assert family is not None
    return _at(encoder, family.blocks)  # type: ignore[no-any-return]


def _at(module: Any, path: str) -> Any:
    """The module at a path; None if there is none."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of an encoder of a known family, or else the longest ModuleList with modules of one class.

    ModuleLists inside such a list are parts of its blocks. With several encoders, the one with the most blocks is used.

    Args:
        model: Any module; BERT's blocks are its encoder layers.

    Returns:
        Name → block, in the list's order.

    Raises:
        ValueError: The model has no such list.
    """
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, nn.ModuleList) and len({stock_class(type(m)) for m in module}) == 1 and not inside:
            lists[name] = module
    encoders = [(module, family) for module in model.modules() if (family := family_of(type(module))) is not None]
    known = [_at(module, family.blocks) for module, family in encoders]
    lists = {name: blocks for name, blocks in lists.items() if any(blocks is other for other in known)} or lists
    if not lists:
        raise ValueError("the model has no ModuleList with blocks of one class")
    name, blocks = max(lists.items(), key=lambda item: len(item[1]))
    return {f"{name}.{i}" if name else str(i): block for i, block in enumerate(blocks)}
