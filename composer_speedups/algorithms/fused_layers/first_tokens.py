"""Mark calls for which the last layer needs to compute only each row's first token.

That is sufficient if only transformers' own classification head reads the output and the call comes through that head.
Therefore the outermost model marks the call of its encoder; any other call of the encoder computes all tokens.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from composer_speedups.algorithms.fused_layers.modules import FusedLayer
from composer_speedups.families.blocks import blocks_of
from composer_speedups.families.family import Reads, family_of
from composer_speedups.families.packed_encoder import UnpaddedEncoder, unpadded_encoders
from composer_speedups.families.stock import Untouched, model_differences, outermost_models


class _Mark:
    """A forward pre-hook of the outermost model that sets the mark, and a forward hook that removes it."""

    def __init__(self, model: PreTrainedModel, encoder: UnpaddedEncoder) -> None:
        self._encoder = encoder
        inside = {*blocks_of(encoder).modules(), *model.get_input_embeddings().modules()}
        # Hooks of these modules could read the last layer's output. Other layers and the input embeddings, which
        # transformers hooks for gradient checkpointing, do not have it.
        readers = [module for module in model.modules() if module is not model and module not in inside]
        self._readers = Untouched([*readers, blocks_of(encoder), blocks_of(encoder)[-1]], model)

    def set(self, model: nn.Module, args: Any) -> None:
        self._encoder.first_tokens_only = self._readers.still()

    def clear(self, model: nn.Module, args: Any, output: Any) -> None:
        self._encoder.first_tokens_only = False


def mark_calls(model: nn.Module) -> None:
    """Make the models in a module mark their calls if their head reads only each row's first token."""
    for name, outer in outermost_models(model).items():
        encoders, family = unpadded_encoders(outer), family_of(type(outer))
        if len(encoders) != 1 or family is None or marks_calls(outer):
            continue
        blocks, reads = blocks_of(encoders[0]), family.reads(type(outer).__name__, outer.config)
        if reads is not Reads.FIRST_TOKEN or not isinstance(blocks[-1], FusedLayer):
            continue
        if not model_differences(outer, name, skip=[blocks]):
            mark = _Mark(outer, encoders[0])
            outer.register_forward_pre_hook(mark.set)
            outer.register_forward_hook(mark.clear, always_call=True)


def marks_calls(model: nn.Module) -> bool:
    """Return whether :func:`mark_calls` changed a model or one inside it."""
    return any(_is_mark(hook) for module in model.modules() for hook in module._forward_pre_hooks.values())


def unmark_calls(model: nn.Module) -> None:
    """Undo :func:`mark_calls`."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for handle in [handle for handle, hook in hooks.items() if _is_mark(hook)]:
                del hooks[handle]
                module._forward_hooks_always_called.pop(handle, None)


def _is_mark(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), _Mark)
