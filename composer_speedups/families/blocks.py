"""A model's repeated block: what is compiled once and reused, and what is recomputed."""

from __future__ import annotations

from torch import nn

__all__ = ["repeated_blocks"]


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of the longest ModuleList of one class; lists inside such a list are parts of its blocks.

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
        if isinstance(module, nn.ModuleList) and len({type(m) for m in module}) == 1 and not inside:
            lists[name] = module
    if not lists:
        raise ValueError("the model has no ModuleList of one class of blocks")
    name, blocks = max(lists.items(), key=lambda item: len(item[1]))
    return {f"{name}.{i}" if name else str(i): block for i, block in enumerate(blocks)}
