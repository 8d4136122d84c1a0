"""The gradient checkpointing technique: a block's activations are recomputed in the backward pass."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from composer_speedups.core.run import FirstBatch, Run
from composer_speedups.core.technique import Order, Technique

if TYPE_CHECKING:
    from torch import nn

    from composer_speedups.core.reversible import Inner


class GradientCheckpointing(Technique):
    """Recomputes activations block by block in the backward pass, which saves memory and costs a forward pass.

    Raises:
        Refusal: At INIT, without a repeated block, or if transformers' own checkpointing is enabled.

    Source: arXiv 1604.06174; torch.utils.checkpoint without re-entrant autograd.
    """

    name = "gradient_checkpointing"
    order = Order.LAYERS
    effect = "exact"
    not_with: ClassVar = {
        "cuda_graphs": "gradient_checkpointing reads the random generator's state, which is not allowed while a CUDA "
        "graph is captured"
    }
    purpose = "saves memory"

    every: int = Field(1, ge=1)
    """Recompute one of every n blocks; 1 for all of them."""

    def engage(self, run: Run) -> dict[str, Any]:
        from composer_speedups.core.reversible import replace_forward, restore_forward
        from composer_speedups.families.blocks import repeated_blocks

        if any(getattr(module, "gradient_checkpointing", False) for module in run.model.modules()):
            reason = "transformers' gradient checkpointing is enabled, so blocks would be recomputed twice"
            raise self.refusal(reason, "call gradient_checkpointing_disable() on the model")
        blocks = list(repeated_blocks(run.model).values())[:: self.every]
        for block in blocks:
            replace_forward(block, _recomputed)
            run.give_back(restore_forward, block)
        return {"blocks": len(blocks)}

    def proof(self, run: Run, seen: FirstBatch) -> dict[str, Any]:
        from composer_speedups.core.trainer_state import is_compiled

        if count := seen.ran["recomputed_block"]:
            return {"blocks_recomputed": count, "seen_in": "backward pass"}
        if is_compiled(run.model):  # whose code recomputes without running Python code that could count
            return {"seen_in": "compiled code"}
        raise self.no_effect(
            "no block was recomputed in the backward pass",
            "do not change the blocks after INIT, keep them in training mode, and train at least one of them",
        )


def _recomputed(block: nn.Module, inner: Inner, /, *args: Any, **kwargs: Any) -> Any:
    """Hooks of the block run around it, so once per step, and not again when it is recomputed."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from composer_speedups.core.reversible import call_inner

    if not (block.training and torch.is_grad_enabled()):
        return call_inner(block, inner, *args, **kwargs)
    if kwargs.get("past_key_values") is not None:
        raise ValueError("a block that writes a key-value cache cannot be recomputed; set use_cache=False")
    return checkpoint(partial(_observed, block, inner), *args, use_reentrant=False, **kwargs)


def _observed(block: nn.Module, inner: Inner, /, *args: Any, **kwargs: Any) -> Any:
    import torch

    from composer_speedups.core.reversible import call_inner
    from composer_speedups.kernels.common import ran

    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:  # inside a backward pass
        ran("recomputed_block")
    return call_inner(block, inner, *args, **kwargs)
