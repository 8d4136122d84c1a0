"""The modules to compile in place, and whether they have compiled code."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Literal

from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from composer_speedups.core.stock import HOOKS
from composer_speedups.core.trainer_state import is_composer_model
from composer_speedups.families.blocks import repeated_blocks


def targets(model: nn.Module, scope: Literal["model", "blocks"]) -> list[nn.Module]:
    """The modules to compile; ValueError if one is compiled already, or there are no blocks that can share code."""
    if scope == "blocks":
        chosen = _blocks(model)
    elif is_composer_model(model):  # evaluation calls its forward(), not __call__
        chosen = {name: child for name, child in model.named_children() if any(True for _ in child.parameters())}
    else:
        chosen = {"": model}
    for name, module in chosen.items():
        if module._compiled_call_impl is not None:
            raise ValueError(f"{name or 'the model'} is already compiled by other code")
    return list(chosen.values())


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    try:
        blocks = repeated_blocks(model)
    except ValueError as error:
        raise ValueError(f"{error}, which scope: blocks compiles") from error
    first, *others = map(_hooks_inside, blocks.values())
    if any(hooks != first for hooks in others):
        raise ValueError(
            "the blocks have different hooks on modules inside them, and the code that they share would run those of "
            "the block that is compiled first; use scope: model, or remove the hooks"
        )
    return blocks


def _hooks_inside(block: nn.Module) -> list[tuple[str, Any]]:
    """The hooks of the modules in a block. torch does not check them before it reuses a block's code for another."""
    return [
        (name, hook)
        for name, module in block.named_modules()
        if module is not block
        for kind in HOOKS
        for hook in getattr(module, kind).values()
    ]


def has_compiled_code(module: nn.Module) -> bool:
    """Whether dynamo has compiled code for ``module.forward`` or a function that it wraps."""
    forward: Any = module.forward
    while isinstance(forward, functools.partial):
        forward = forward.func
    return _is_compiled(inspect.unwrap(getattr(forward, "__func__", forward), stop=_is_compiled))


def _is_compiled(function: Any) -> bool:
    code = getattr(function, "__code__", None)  # other callables have none
    return code is not None and bool(_debug_get_cache_entry_list(code))
