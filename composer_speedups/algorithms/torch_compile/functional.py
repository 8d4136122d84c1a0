"""Compile a whole model, or one of its repeated blocks, whose code the other blocks reuse."""

from __future__ import annotations

import os
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch._inductor
import torch._inductor.config
from torch import nn

from composer_speedups.core.stock import HOOKS
from composer_speedups.core.trainer_state import is_composer_model
from composer_speedups.families.blocks import repeated_blocks
from composer_speedups.surgery.already_applied import refuse_other_settings

__all__ = ["apply_torch_compile"]

Scope = Literal["model", "blocks"]
# Compiled module → its settings. Not an attribute of the module, because its copies are not compiled.
_APPLIED: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()


def apply_torch_compile(
    model: nn.Module,
    scope: Literal["model", "blocks"] = "model",
    backend: str = "inductor",
    mode: str | None = None,
    dynamic: bool | None = None,
) -> list[str]:
    """Compile a model in place, keeping its class, its parameter names and its ``state_dict``.

    The code is compiled at the first call, for training and evaluation.

    Args:
        model: A model, or a ComposerModel, whose inner model is compiled.
        scope: ``"model"`` compiles the whole model; ``"blocks"`` compiles its repeated block (of the longest ModuleList
            with one class), and the other blocks reuse the graph.
        backend: One of ``torch._dynamo.list_backends()``.
        mode: inductor's mode, such as ``"max-autotune-no-cudagraphs"``; None for the default mode.
        dynamic: True for dynamic shapes, False for static shapes, None to use dynamic shapes after a first recompile.

    Returns:
        Names of the compiled modules; empty if the model is already compiled with the same settings.

    Raises:
        ValueError: An unknown scope, no repeated block for ``"blocks"`` or blocks with different hooks inside,
            compilation is disabled in torch, or the model is already compiled with other settings or by other code.

    Source: torch.nn.Module.compile.
    """
    if (off := switched_off()) is not None:
        raise ValueError(f"{off} is set, which disables torch.compile; unset it")
    settings = {"scope": scope, "backend": backend, "mode": mode, "dynamic": dynamic}
    targets = _targets(model, scope)
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None and module in _APPLIED:
            refuse_other_settings("compiled modules", _APPLIED[module], settings)
        elif module._compiled_call_impl is not None and name in targets:
            raise ValueError(f"{name or 'the model'} is already compiled by other code; remove that, or this")
    changed = []
    for name, module in targets.items():
        if module._compiled_call_impl is None:
            module.compile(backend=backend, mode=mode, dynamic=dynamic)
            _APPLIED[module] = settings
            changed.append(name)
    return changed


def switched_off() -> str | None:
    """Return the name of the variable or flag that disables torch.compile; None if it is enabled."""
    variables = [name for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE") if os.environ.get(name) == "1"]
    if getattr(torch._dynamo.config, "disable", False):
        variables.append("torch._dynamo.config.disable")
    return next(iter(variables), None)


def _targets(model: nn.Module, scope: Scope) -> dict[str, nn.Module]:
    if scope == "model":
        if is_composer_model(model):  # evaluation calls its forward(), not __call__
            return {n: m for n, m in model.named_children() if any(True for _ in m.parameters())}
        return {"": model}
    if scope != "blocks":
        raise ValueError(f"scope must be 'model' or 'blocks', not {scope!r}")
    try:
        blocks = repeated_blocks(model)
    except ValueError as error:
        raise ValueError(f"{error}; use scope='model'") from error
    first, *others = map(_hooks_inside, blocks.values())
    if any(hooks != first for hooks in others):
        raise ValueError(
            "the blocks have different hooks on modules inside them, and the code that they share would run those of "
            "the block that is compiled first; use scope='model', or remove the hooks"
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
