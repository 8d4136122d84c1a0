"""The layer freezing technique: a model's first layers do not train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from composer_speedups.core.technique import FSDP, Order, Technique

if TYPE_CHECKING:
    from composer_speedups.core.run import FirstBatch, Run


class LayerFreezing(Technique):
    """Freezes the embeddings and first blocks, so that their backward pass is not computed.

    Their parameters no longer require gradients, so the forward pass stores none of their activations, and the backward
    pass ends after them. Their gradients and their state in the optimizers are freed. Dropout stays as it is.

    Raises:
        Refusal: At INIT, without one encoder of a known family, for more blocks than it has, for embeddings that are
            tied to another module, such as a masked-LM head, or under DDP in a loop of your own.

    Source: Lee et al., arXiv 1911.03090.
    """

    name = "layer_freezing"
    order = Order.ADAPTERS
    effect = "recipe"
    not_with: ClassVar = {
        FSDP: "FSDP has already grouped the parameters, and gathers and reduces frozen ones, too",
        "lora": "LoRA already freezes the layers, and layer_freezing would freeze their adapters",
        "sparse_upcycling": "the experts of a frozen layer would remain equal, and its router would not learn",
    }

    layers: Literal["embeddings"] | Annotated[int, Field(ge=1)] = Field("embeddings")
    """embeddings; or a number of blocks, which are frozen together with the embeddings and with everything else that
    computes the blocks' input, such as DeBERTa's relative positions."""

    @property
    def _blocks(self) -> int:
        """The number of blocks to freeze in addition to the embeddings."""
        return self.layers if isinstance(self.layers, int) else 0

    def engage(self, run: Run) -> dict[str, Any]:
        from torch.nn.parallel import DistributedDataParallel

        from composer_speedups.algorithms.layer_freezing.modules import freeze
        from composer_speedups.families.blocks import blocks_of, only_encoder

        if any(isinstance(module, DistributedDataParallel) for module in run.model.modules()):
            reason = "DistributedDataParallel already waits for the gradients of all parameters"
            raise self.refusal(reason, "apply it before DistributedDataParallel wraps the model")
        freeze(run.model, run.optimizers, self._blocks)
        return {"layers": self.layers, "blocks": len(blocks_of(only_encoder(run.model)))}

    def proof(self, run: Run, seen: FirstBatch) -> dict[str, Any]:
        from composer_speedups.algorithms.layer_freezing.modules import first_parameters

        parameters = first_parameters(run.model, self._blocks)
        training = next((n for n, p in parameters.items() if p.requires_grad or p.grad is not None), None)
        if training is not None:
            reason = f"{training} requires gradients or has one, although it is frozen"
            raise self.no_effect(reason, "do not change requires_grad after INIT")
        blocks = f" and {self._blocks} block{'s' if self._blocks > 1 else ''}" if self._blocks else ""
        return {
            "frozen": f"embeddings{blocks}",
            "frozen_parameters": sum(p.numel() for p in set(parameters.values())),
            "trained_parameters": sum(p.numel() for p in run.model.parameters() if p.requires_grad),
        }
