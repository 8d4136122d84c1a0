"""The sparse upcycling technique: feed-forward layers of a dense model are replaced by experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from composer_speedups.core.errors import Refusal
from composer_speedups.core.requirements import needs_composer
from composer_speedups.core.run import FirstBatch, Run
from composer_speedups.core.settings import Check
from composer_speedups.core.technique import Order, Technique

if TYPE_CHECKING:
    from torch import Tensor


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
        self._balance: list[Tensor] = []  # this batch's load-balancing losses, means over layers, of its micro-batches

    def needs(self, run: Run) -> Iterable[Refusal]:
        if self.load_balancing:
            yield from needs_composer(self.name, run, "the load-balancing loss")

    def engage(self, run: Run) -> dict[str, Any]:
        from composer_speedups.algorithms.sparse_upcycling.modules import sparse_layers, upcycle

        before = sum(p.numel() for p in run.model.parameters())
        upcycle(run.model, run.optimizers, experts=self.experts, every=self.every, top_k=self.top_k)
        return {
            "layers": len(sparse_layers(run.model)),
            "experts": self.experts,
            "parameters_added": sum(p.numel() for p in run.model.parameters()) - before,
        }

    def fit_start(self, run: Run) -> None:
        from composer_speedups.algorithms.sparse_upcycling.modules import sparse_layers

        self._routing = sparse_layers(run.model)[0].routing

    def before_forward(self, run: Run) -> None:
        self._routing.noted = {}

    def after_loss(self, run: Run) -> None:
        """Add the load-balancing loss, outside of activation checkpoints, whose recomputation then records nothing."""
        import torch

        assert run.state is not None
        if not (losses := self._routing.losses()):
            fix = "use gradient checkpointing without use_reentrant, or remove sparse_upcycling"
            raise self.no_effect("there was no forward pass in training mode with gradients", fix)
        balance = torch.stack(losses).sum()
        self._balance.append(balance.detach() / len(losses))
        if self.load_balancing:
            run.state.loss = run.state.loss + self.load_balancing * balance  # type: ignore[operator]

    def batch_end(self, run: Run) -> None:
        import torch

        self._mean = float(torch.stack(self._balance).mean())
        self._balance = []
        assert run.logger is not None
        run.logger.log_metrics({f"{self.name}/load_balancing_loss": self._mean})

    def proof(self, run: Run, seen: FirstBatch) -> Mapping[str, Any]:
        from composer_speedups.algorithms.sparse_upcycling.modules import sparse_layers

        layers = sparse_layers(run.model)
        ran = min(sum(f"{layer.name} expert {i}" in seen.ran for i in range(self.experts)) for layer in layers)
        if ran < self.top_k:
            fix = "do not change the model after INIT, or remove it"
            raise self.no_effect(f"only {ran} experts of a layer ran in the first batch", fix)
        return {"experts_that_ran": ran, **({} if run.state is None else {"load_balancing_loss": round(self._mean, 4)})}
