"""The layer freezing technique: a model's first layers stop training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from composer_speedups.core.errors import Refusal
from composer_speedups.core.settings import Check, ComposerTime
from composer_speedups.core.technique import FSDP, Order, Technique

if TYPE_CHECKING:
    from torch import nn

    from composer_speedups.core.run import FirstBatch, Run


class LayerFreezing(Technique):
    """Stops training the embeddings and first blocks, so that their backward pass is not computed.

    Their parameters no longer require gradients, so the forward pass stores none of their activations, and the backward
    pass ends after them. Their gradients and their state in the optimizers are freed. Dropout stays as it is.

    Raises:
        Refusal: At INIT, without one encoder of a known family, for more blocks than it has, for embeddings that are
            tied to another module, such as a masked-LM head, and if no parameter would be left to train.

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

    layers: Literal["embeddings"] | int = Field("embeddings")
    """embeddings; or a number of blocks, which are frozen together with the embeddings and with everything else that
    computes the blocks' input, such as DeBERTa's relative positions."""
    start: Annotated[str, ComposerTime(("ba", "ep", "dur"))] = Field("0ba")
    """When they stop training: in ba, ep or dur."""

    def checks(self) -> Iterable[Check]:
        none = self._blocks < 1 and self.layers != "embeddings"
        yield none, "layers", f"must be greater than or equal to 1, not {self.layers}"

    @property
    def _blocks(self) -> int:
        """The number of blocks to freeze in addition to the embeddings."""
        return self.layers if isinstance(self.layers, int) else 0

    def reset(self) -> None:
        super().reset()
        self._froze: tuple[int, int] | None = None  # trained batches, and bytes of optimizer state that were freed
        self._weights: dict[str, float] = {}  # sums of the frozen weights, when training began or they were frozen
        self._until: Any = None  # max_duration, which a callback that stops training early replaces

    def needs(self, run: Run) -> Iterable[Refusal]:
        if getattr(run.techniques.get("bnb_optimizer"), "stable_embedding", False):
            reason = (
                "conflicts with bnb_optimizer: a stable embedding (stable_embedding: true) adds a norm to the "
                "embeddings, which must be trained"
            )
            yield self.refusal(reason, "set stable_embedding: false, or remove one of them")
        if run.in_other_loop and self.start != "0ba":
            yield self.refusal(f"start={self.start} is a time of Composer's Trainer", "leave start out")

    def engage(self, run: Run) -> dict[str, Any]:
        from composer_speedups.algorithms.layer_freezing.modules import check_freezing, is_due
        from composer_speedups.families.blocks import blocks_of, only_encoder

        try:
            check_freezing(run.model, self._blocks)
        except ValueError as error:
            raise self.refusal(str(error), "remove it for this model") from error
        if run.in_other_loop or is_due(self.start, None):
            self._freeze(run)
        return {"layers": self.layers, "blocks": len(blocks_of(only_encoder(run.model))), "start": self.start}

    def _freeze(self, run: Run) -> None:
        from composer_speedups.algorithms.layer_freezing.modules import freeze
        from composer_speedups.core.optimizer_state import state_bytes

        model, optimizers, batches = run.model, run.optimizers, 0
        if run.state is not None:
            model, optimizers, batches = run.state.model, run.state.optimizers, run.state.timestamp.batch.value
        before = sum(map(state_bytes, optimizers))
        freeze(model, optimizers, self._blocks)
        self._froze = batches, before - sum(map(state_bytes, optimizers))
        self.fit_start(run)

    def _parameters(self, run: Run) -> dict[str, nn.Parameter]:
        """The parameters that must be frozen, by name."""
        from composer_speedups.families.blocks import first_layers

        modules = {} if self._froze is None else first_layers(run.model, self._blocks)
        return {f"{path}.{name}": p for path, module in modules.items() for name, p in module.named_parameters()}

    def fit_start(self, run: Run) -> None:
        from composer_speedups.algorithms.layer_freezing.modules import sums

        self._weights = sums(self._parameters(run))  # after a checkpoint was loaded
        self._until = None if run.state is None else run.state.max_duration

    def batch_start(self, run: Run) -> None:
        from composer_speedups.algorithms.layer_freezing.modules import is_due

        if self._froze is None and is_due(self.start, run.state):
            self._freeze(run)

    def proof(self, run: Run, seen: FirstBatch) -> Mapping[str, Any]:
        return self.summary(run) if self._froze is not None else {"frozen": "nothing yet"}

    def summary(self, run: Run) -> dict[str, Any]:
        from composer_speedups.algorithms.layer_freezing.modules import sums
        from composer_speedups.core.optimizer_state import state_bytes

        parameters = self._parameters(run)
        if self._froze is None:
            if run.state is not None and run.state.max_duration is not self._until:  # early stopping may come before
                return {"frozen": "nothing", "note": f"training was stopped before start={self.start}"}
            raise self.no_effect(f"training ended before start={self.start}", "set an earlier start")
        fix = "do not change requires_grad and the frozen weights after INIT"
        training = next((n for n, p in parameters.items() if p.requires_grad or p.grad is not None), None)
        if training is not None:
            raise self.no_effect(f"{training} requires gradients or has one, although it is frozen", fix)
        changed = next((name for name, value in sums(parameters).items() if value != self._weights[name]), None)
        if changed is not None:
            raise self.no_effect(f"{changed} changed, although it is frozen", fix)
        blocks = f" and {self._blocks} block{'s' if self._blocks > 1 else ''}" if self._blocks else ""
        batches, freed = self._froze
        return {
            "frozen": f"embeddings{blocks}",
            "froze_after_batches": batches,
            "frozen_parameters": sum(p.numel() for p in set(parameters.values())),
            "trained_parameters": sum(p.numel() for p in run.model.parameters() if p.requires_grad),
            "optimizer_bytes": sum(map(state_bytes, run.optimizers)),
            "optimizer_bytes_freed": freed,
        }

    def state(self, run: Run) -> dict[str, Any]:
        return {} if self._froze is None else {"froze": list(self._froze)}

    def load_state(self, run: Run, state: Mapping[str, Any]) -> None:
        """Freeze what was frozen: the checkpoint has no optimizer state for it."""
        if self._froze is None:
            self._freeze(run)
        self._froze = state["froze"][0], state["froze"][1]
