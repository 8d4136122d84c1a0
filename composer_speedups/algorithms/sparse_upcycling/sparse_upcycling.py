"""Feed-forward layers of a dense model become experts (sparse upcycling)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from composer.core import State
from pydantic import Field
from torch import Tensor, nn

from composer_speedups.algorithms.sparse_upcycling.functional import (
    MOST_EXPERTS,
    apply_sparse_upcycling,
    check_settings,
)
from composer_speedups.algorithms.sparse_upcycling.loss import add_to_loss, load_balancing_loss, sparse_layers
from composer_speedups.core.technique import Conflict, Stage, Technique


class SparseUpcycling(Technique):
    """Every n-th feed-forward layer becomes experts behind a router: more parameters, not more speed.

    Raises:
        TechniqueError: At INIT, when the model has no feed-forward layers that experts are known for.
    """

    name = "sparse_upcycling"
    stage = Stage.SURGERY
    changes_structure = True
    exactness = "recipe"
    conflicts = (
        Conflict(
            "cuda_graphs", "each layer of experts reads on the host how many tokens go where, which a capture forbids"
        ),
    )
    trials = ()
    never_tried = "it adds parameters, and makes no step faster"

    experts: int = Field(4, ge=2, le=MOST_EXPERTS)
    """Experts a layer."""
    every: int = Field(2, ge=1)
    """Every how many layers."""
    top_k: int = Field(2, ge=2)
    """Experts a token goes to, at most all of them."""
    load_balancing: float = Field(0.01, ge=0)
    """Coefficient of the load-balancing loss, summed over layers; 0 leaves it out."""

    def check_settings(self) -> None:
        check_settings(self.experts, self.every, self.top_k)

    def reset(self) -> None:
        super().reset()
        self._rows: dict[str, list[int]] = {}  # by layer: rows that came out of each expert in the first batch
        self._hooks = ExitStack()
        self._reached = False  # whether the backward pass came to the load-balancing loss
        self._losses: list[Tensor] = []  # of this batch's microbatches
        self._balance = 0.0  # of the last batch, summed over layers
        self._load: dict[str, Tensor] = {}  # by layer: shares of the real tokens' slots in the last microbatch
        self._first: dict[str, Any] = {}

    def engage(self, state: State) -> dict[str, Any]:
        before = sum(p.numel() for p in state.model.parameters())
        with self.refusals():
            apply_sparse_upcycling(state.model, state.optimizers, self.experts, self.every, self.top_k)
        return {
            "layers": len(sparse_layers(state.model)),
            "experts": self.experts,
            "parameters_added": sum(p.numel() for p in state.model.parameters()) - before,
            "checkpoint": "its own; an exported model loads with load_sparse_upcycling",
        }

    def batch_end(self, state: State) -> None:
        if self._losses:
            self._balance = float(torch.stack(self._losses).mean())
            self._losses = []
            self.log_metrics({"load_balancing_loss": self._balance / len(sparse_layers(state.model))})

    def after_loss(self, state: State) -> None:
        try:
            balance = load_balancing_loss(state.model)
        except ValueError as error:
            self.unavailable(self.not_engaged(str(error), "use checkpointing without use_reentrant, or remove it"))
            return
        self._losses.append(balance.detach())
        self._load = dict(sparse_layers(state.model)[0].routing.load)  # evaluation will clear it
        if not self.load_balancing:
            return
        if not self._verified:
            balance.register_hook(self._note_gradient)
        state.loss = add_to_loss(state.loss, self.load_balancing * balance)

    def _note_gradient(self, gradient: Tensor) -> None:
        self._reached = True

    def watch(self, state: State) -> None:
        """Count the rows that come out of each expert, microbatch by microbatch."""
        for layer in sparse_layers(state.model):
            counts = self._rows.setdefault(layer.name, [0] * len(layer.experts))
            for index, expert in enumerate(layer.experts):
                self._hooks.callback(expert.register_forward_hook(_count_into(counts, index)).remove)

    def stop_watching(self, state: State) -> None:
        self.close()

    def verify(self, state: State) -> dict[str, Any]:
        layers = sparse_layers(state.model)
        if not self._first:
            self._check_effect(state)
            self._first = {
                "rows_per_expert": [sum(rows) for rows in zip(*self._rows.values(), strict=True)],
                "load_balancing_loss": round(self._balance / len(layers), 4),
                "share_in_first_batch": self._shares(),
            }
            return self._first
        return {"share_in_last_batch": self._shares()}

    def _check_effect(self, state: State) -> None:
        layers, fix = sparse_layers(state.model), "leave the model and its loss as they are after INIT, or remove it"
        for layer in layers:
            used = sum(rows > 0 for rows in self._rows.get(layer.name, []))
            if used < self.top_k:
                raise self.not_engaged(f"only {used} experts of {layer.name} ran in the first batch", fix)
        if self.load_balancing and not self._reached:
            raise self.not_engaged("the load-balancing loss took no part in the backward pass", fix)
        trained = {id(p) for optimizer in state.optimizers for g in optimizer.param_groups for p in g["params"]}
        ours = [p for layer in layers for p in layer.parameters()]
        if not state.fsdp_enabled and not trained.issuperset(map(id, ours)):  # FSDP's parameters are others
            raise self.not_engaged("the optimizer does not train the experts and their router", fix)

    def _shares(self) -> str:
        """Smallest and largest share of a layer's real tokens that one expert got; even would be 1/experts."""
        shares = torch.stack(list(self._load.values()))
        return f"{float(shares.min()):.3f}–{float(shares.max()):.3f}"

    def close(self) -> None:
        self._hooks.close()


def _count_into(counts: list[int], index: int) -> Callable[..., None]:
    def count(module: nn.Module, args: Any, output: Tensor) -> None:
        counts[index] += len(output)

    return count
