"""The layer freezing technique: a model's first layers stop training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from composer_speedups.core.errors import Refusal
from composer_speedups.core.settings import ComposerTime
from composer_speedups.core.technique import FSDP, Order, Technique

if TYPE_CHECKING:
    from composer_speedups.core.run import FirstBatch, Run


class LayerFreezing(Technique):
    """Stops training the embeddings and first blocks, so that their backward pass is not computed.

    Their parameters no longer require gradients, so the forward pass stores none of their activations, and the backward
    pass ends after them. Their gradients and their state in the optimizers are freed. Dropout stays as it is.

    Raises:
        Refusal: At INIT, without one encoder of a known family, for more blocks than it has, for embeddings that are
            tied to another module, such as a masked-LM head.

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
    start: Annotated[str, ComposerTime(("ba", "ep", "dur"))] = Field("0ba")
    """When they stop training: in ba, ep or dur."""

    @property
    def _blocks(self) -> int:
        """The number of blocks to freeze in addition to the embeddings."""
        return self.layers if isinstance(self.layers, int) else 0

    def reset(self) -> None:
        super().reset()
        self._froze: int | None = None  # trained batches
        self._until: Any = None  # max_duration, which a callback that stops training early replaces

    def needs(self, run: Run) -> Iterable[Refusal]:
        if run.in_other_loop and self.start != "0ba":
            yield self.refusal(f"start={self.start} is a time of Composer's Trainer", "leave start out")

    def engage(self, run: Run) -> dict[str, Any]:
        from composer_speedups.algorithms.layer_freezing.modules import first_parameters
        from composer_speedups.families.blocks import blocks_of, only_encoder

        first_parameters(run.model, self._blocks)
        if float(self.start.rstrip("abdepru")) == 0:  # before DDP builds its buckets
            self._freeze(run)
        return {"layers": self.layers, "blocks": len(blocks_of(only_encoder(run.model))), "start": self.start}

    def _freeze(self, run: Run) -> None:
        from composer_speedups.algorithms.layer_freezing.modules import freeze

        model, optimizers, self._froze = run.model, run.optimizers, 0
        if run.state is not None:
            model, optimizers, self._froze = run.state.model, run.state.optimizers, run.state.timestamp.batch.value
        freeze(model, optimizers, self._blocks)

    def fit_start(self, run: Run) -> None:
        assert run.state is not None
        self._until = run.state.max_duration

    def batch_start(self, run: Run) -> None:
        from composer_speedups.algorithms.layer_freezing.modules import is_due

        assert run.state is not None
        if self._froze is None and is_due(self.start, run.state):
            self._freeze(run)

    def proof(self, run: Run, seen: FirstBatch) -> Mapping[str, Any]:
        return self.summary(run) if self._froze is not None else {"frozen": "nothing yet"}

    def summary(self, run: Run) -> dict[str, Any]:
        from composer_speedups.algorithms.layer_freezing.modules import first_parameters

        if self._froze is None:
            if run.state is not None and run.state.max_duration is not self._until:  # early stopping may come before
                return {"frozen": "nothing", "note": f"training was stopped before start={self.start}"}
            raise self.no_effect(f"training ended before start={self.start}", "set an earlier start")
        parameters = first_parameters(run.model, self._blocks)
        training = next((n for n, p in parameters.items() if p.requires_grad or p.grad is not None), None)
        if training is not None:
            reason = f"{training} requires gradients or has one, although it is frozen"
            raise self.no_effect(reason, "do not change requires_grad after INIT")
        blocks = f" and {self._blocks} block{'s' if self._blocks > 1 else ''}" if self._blocks else ""
        return {
            "frozen": f"embeddings{blocks}",
            "froze_after_batches": self._froze,
            "frozen_parameters": sum(p.numel() for p in set(parameters.values())),
            "trained_parameters": sum(p.numel() for p in run.model.parameters() if p.requires_grad),
        }

    def state(self, run: Run) -> dict[str, Any]:
        return {} if self._froze is None else {"froze": self._froze}

    def load_state(self, run: Run, state: Mapping[str, Any]) -> None:
        """Freeze what was frozen: the checkpoint has no optimizer state for it."""
        if self._froze is None:
            self._freeze(run)
        self._froze = state["froze"]
