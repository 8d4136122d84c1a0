"""Calls for which the last layer needs to compute only each row's first token.

That is sufficient if only transformers' own classification head reads the output and the call comes through that head.
"""

from __future__ import annotations

from torch import nn

from composer_speedups.algorithms.fused_layers.modules import FusedLayer
from composer_speedups.core.stock import Untouched, model_differences, outermost_models
from composer_speedups.families.blocks import blocks_of
from composer_speedups.families.family import Reads, family_of
from composer_speedups.packing.call import ModelAroundEncoder
from composer_speedups.packing.encoder import unpadded_encoders


def compute_first_tokens(model: nn.Module) -> None:
    """Compute only each row's first token in the last layer of every model whose head reads no others."""
    for name, outer in outermost_models(model).items():
        encoders, family = unpadded_encoders(outer), family_of(type(outer))
        if len(encoders) != 1 or family is None or not isinstance(outer, ModelAroundEncoder):
            continue
        blocks, reads = blocks_of(encoders[0]), family.reads(type(outer).__name__, outer.config)
        known = outer.call_rules.first_token_readers
        if (known is not None and known.is_unchanged()) or reads is not Reads.FIRST_TOKEN:
            continue
        if isinstance(blocks[-1], FusedLayer) and not model_differences(outer, name, skip=[blocks]):
            inside = {*blocks.modules(), *outer.get_input_embeddings().modules()}
            # Hooks of these modules could read the last layer's output. Other layers and the input embeddings, which
            # transformers hooks for gradient checkpointing, do not have it.
            readers = [module for module in outer.modules() if module is not outer and module not in inside]
            outer.call_rules.first_token_readers = Untouched([*readers, blocks, blocks[-1]], outer)


def compute_all_tokens(model: nn.Module) -> None:
    """Undo :func:`compute_first_tokens`."""
    for module in model.modules():
        if isinstance(module, ModelAroundEncoder):
            module.call_rules.first_token_readers = None
