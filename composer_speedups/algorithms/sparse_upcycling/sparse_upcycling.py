"""The sparse upcycling technique: feed-forward layers of a dense model are replaced by experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from composer_speedups.core.errors import Refusal
from composer_speedups.core.settings import Check
from composer_speedups.core.technique import Order, Technique

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from composer_speedups.core.run import FirstBatch, Run


class SparseUpcycling(Technique):
    """Replaces every n-th feed-forward layer by experts and a router, which adds parameters, not speed.

    Raises:
        Refusal: At INIT, if the model has no supported feed-forward layers.

    Source: Sparse Upcycling, arXiv 2212.05055, without its capacity limit: no token is dropped.
    """

    name = "sparse_upcycling"
    order = Order.LAYERS
    effect = "recipe"
    not_with: ClassVar = {
        "cuda_graphs": "sparse_upcycling copies the tokens per expert to the host, which is not allowed while a CUDA "
        "graph is captured"
    }
    purpose = "adds capacity"

    experts: int = Field(4, ge=2, le=1024)
    """Experts per layer."""
    every: int = Field(2, ge=1)
    """Replace every n-th layer."""
    top_k: int = Field(2, ge=2)
    """Experts per token, at most all of them. With one expert, its weight would always be 1, and the router would get
    no gradient from the task."""
    load_balancing: float = Field(0.01, ge=0)
    """Coefficient of the load-balancing loss, which is summed over layers; 0 disables it."""

    def checks(self) -> Iterable[Check]:
        yield self.top_k > self.experts, "top_k", f"must be 2 to experts={self.experts}, not {self.top_k}"

    @staticmethod
    def required_on_load() -> bool:
        return True

    def reset(self) -> None:
        super().reset()
        self._reached = False  # whether the backward pass reached the load-balancing loss
        self._losses: list[Tensor] = []  # load-balancing losses of this batch's micro-batches
        self._balance = 0.0  # load-balancing loss of the last batch, summed over layers
        self._load: dict[str, Tensor] = {}  # by layer: shares of the real tokens' slots in the last micro-batch

    def needs(self, run: Run) -> Iterable[Refusal]:
        from composer_speedups.core.requirements import needs_composer

        if self.load_balancing:
            yield from needs_composer(self.name, run, "the load-balancing loss")

    def engage(self, run: Run) -> dict[str, Any]:
        from composer_speedups.algorithms.sparse_upcycling.modules import sparse_layers
        from composer_speedups.algorithms.sparse_upcycling.upcycle import upcycle

        before = sum(p.numel() for p in run.model.parameters())
        try:
            upcycle(run.model, run.optimizers, experts=self.experts, every=self.every, top_k=self.top_k)
        except ValueError as error:
            raise self.refusal(str(error), "remove it for this model") from error
        return {
            "layers": len(sparse_layers(run.model)),
            "experts": self.experts,
            "parameters_added": sum(p.numel() for p in run.model.parameters()) - before,
            "checkpoint": "has experts; load an exported model with load_sparse_upcycling",
        }

    def after_loss(self, run: Run) -> None:
        from composer_speedups.algorithms.sparse_upcycling.modules import (
            add_to_loss,
            load_balancing_loss,
            sparse_layers,
        )

        assert run.state is not None
        balance = load_balancing_loss(run.model)
        if balance is None:
            fix = "use gradient checkpointing without use_reentrant, or remove sparse_upcycling"
            raise self.no_effect("there was no forward pass in training mode with gradients", fix)
        self._losses.append(balance.detach())
        self._load = dict(sparse_layers(run.model)[0].routing.load)  # evaluation clears it
        if not self.load_balancing:
            return
        if not self._reached:
            balance.register_hook(self._note_gradient)
        run.state.loss = add_to_loss(run.state.loss, self.load_balancing * balance)

    def _note_gradient(self, gradient: Tensor) -> None:
        self._reached = True

    def batch_end(self, run: Run) -> None:
        import torch

        if self._losses:
            self._balance = float(torch.stack(self._losses).mean())
            self._losses = []
            assert run.logger is not None
            run.logger.log_metrics({f"{self.name}/load_balancing_loss": self._balance / len(self._load)})

    def proof(self, run: Run, seen: FirstBatch) -> Mapping[str, Any]:
        from composer_speedups.algorithms.sparse_upcycling.modules import sparse_layers

        layers, fix = sparse_layers(run.model), "do not change the model and its loss after INIT, or remove it"
        ran = {
            layer.name: sum(bool(seen.ran[f"{layer.name} expert {i}"]) for i in range(self.experts)) for layer in layers
        }
        for name, count in ran.items():
            if count < self.top_k:
                raise self.no_effect(f"only {count} experts of {name} ran in the first batch", fix)
        if run.state is not None and self.load_balancing and not self._reached:
            raise self.no_effect("the load-balancing loss was not part of the backward pass", fix)
        trained = {id(p) for optimizer in run.optimizers for g in optimizer.param_groups for p in g["params"]}
        ours = [p for layer in layers for p in layer.parameters()]
        if trained and not run.sharded and not trained.issuperset(map(id, ours)):  # FSDP has other parameters
            raise self.no_effect("the optimizer does not train the experts and their router", fix)
        return {
            "experts_that_ran": min(ran.values()),
            "load_balancing_loss": round(self._balance / len(layers), 4),
            "share_in_first_batch": self._shares(),
        }

    def summary(self, run: Run) -> dict[str, Any]:
        return {"share_in_last_batch": self._shares()}

    def _shares(self) -> str:
        """The smallest and largest share of a layer's real tokens per expert; an even load is 1/experts."""
        import torch

        if not self._load:
            return "not seen"
        shares = torch.stack(list(self._load.values()))
        return f"{float(shares.min()):.3f}–{float(shares.max()):.3f}"
