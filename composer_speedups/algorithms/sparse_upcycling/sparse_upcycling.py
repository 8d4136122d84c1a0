"""The sparse upcycling technique: feed-forward layers of a dense model are replaced by experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from composer.core import State
from pydantic import Field
from torch import Tensor, nn

from composer_speedups.algorithms.sparse_upcycling.experts import sparse_layers
from composer_speedups.algorithms.sparse_upcycling.functional import (
    MAX_EXPERTS,
    apply_sparse_upcycling,
    check_settings,
    load_balancing_loss,
)
from composer_speedups.core.technique import Conflict, Stage, Technique


class SparseUpcycling(Technique):
    """Replaces every n-th feed-forward layer by experts and a router, which adds parameters, not speed.

    Raises:
        TechniqueError: At INIT, if the model has no supported feed-forward layers.
    """

    name = "sparse_upcycling"
    stage = Stage.SURGERY
    exactness = "recipe"
    conflicts = (
        Conflict(
            "cuda_graphs",
            "sparse_upcycling copies the tokens per expert to the host, which is not allowed while a CUDA graph is "
            "captured",
        ),
    )
    trials = ()
    purpose = "adds capacity"

    experts: int = Field(4, ge=2, le=MAX_EXPERTS)
    """Experts per layer."""
    every: int = Field(2, ge=1)
    """Replace every n-th layer."""
    top_k: int = Field(2, ge=2)
    """Experts per token, at most all of them."""
    load_balancing: float = Field(0.01, ge=0)
    """Coefficient of the load-balancing loss, which is summed over layers; 0 disables it."""

    def check_settings(self) -> None:
        check_settings(self.experts, self.every, self.top_k)

    @staticmethod
    def required_on_load() -> bool:
        return True

    def reset(self) -> None:
        super().reset()
        self._rows: dict[str, list[int]] = {}  # by layer: output rows of each expert in the first batch
        self._reached = False  # whether the backward pass reached the load-balancing loss
        self._losses: list[Tensor] = []  # load-balancing losses of this batch's micro-batches
        self._balance = 0.0  # load-balancing loss of the last batch, summed over layers
        self._load: dict[str, Tensor] = {}  # by layer: shares of the real tokens' slots in the last micro-batch
        self._first: dict[str, Any] = {}

    def engage(self, state: State) -> dict[str, Any]:
        before = sum(p.numel() for p in state.model.parameters())
        with self.refusals():
            apply_sparse_upcycling(state.model, state.optimizers, self.experts, self.every, self.top_k)
        return {
            "layers": len(sparse_layers(state.model)),
            "experts": self.experts,
            "parameters_added": sum(p.numel() for p in state.model.parameters()) - before,
            "checkpoint": "has experts; load an exported model with load_sparse_upcycling",
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
            fix = "use gradient checkpointing without use_reentrant, or remove sparse_upcycling"
            self.unavailable(self.not_engaged(str(error), fix))
            return
        self._losses.append(balance.detach())
        self._load = dict(sparse_layers(state.model)[0].routing.load)  # evaluation clears it
        if not self.load_balancing:
            return
        if not self._verified:
            balance.register_hook(self._note_gradient)
        state.loss = add_to_loss(state.loss, self.load_balancing * balance)

    def _note_gradient(self, gradient: Tensor) -> None:
        self._reached = True

    def watch(self, state: State) -> None:
        """Count the output rows of each expert over the micro-batches."""
        for layer in sparse_layers(state.model):
            counts = self._rows.setdefault(layer.name, [0] * len(layer.experts))
            for index, expert in enumerate(layer.experts):
                self.watching.callback(expert.register_forward_hook(_count_into(counts, index)).remove)

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
        layers, fix = sparse_layers(state.model), "do not change the model and its loss after INIT, or remove it"
        for layer in layers:
            used = sum(rows > 0 for rows in self._rows.get(layer.name, []))
            if used < self.top_k:
                raise self.not_engaged(f"only {used} experts of {layer.name} ran in the first batch", fix)
        if self.load_balancing and not self._reached:
            raise self.not_engaged("the load-balancing loss was not part of the backward pass", fix)
        trained = {id(p) for optimizer in state.optimizers for g in optimizer.param_groups for p in g["params"]}
        ours = [p for layer in layers for p in layer.parameters()]
        if not state.fsdp_enabled and not trained.issuperset(map(id, ours)):  # FSDP has other parameters
            raise self.not_engaged("the optimizer does not train the experts and their router", fix)

    def _shares(self) -> str:
        """Return the smallest and largest share of a layer's real tokens per expert; an even load is 1/experts."""
        shares = torch.stack(list(self._load.values()))
        return f"{float(shares.min()):.3f}–{float(shares.max()):.3f}"


def _count_into(counts: list[int], index: int) -> Callable[..., None]:
    def count(module: nn.Module, args: Any, output: Tensor) -> None:
        counts[index] += len(output)

    return count


def add_to_loss(loss: Any, extra: Tensor) -> Any:
    """Add a term to a ComposerModel's loss and return it in the same form.

    Composer accepts a tensor, a list or tuple of tensors (which it sums), or a dict (of which it uses ``total``, or
    else the sum).
    """
    if isinstance(loss, dict):
        total = {"total": loss["total"] + extra} if "total" in loss else {}
        return {**loss, **total, "load_balancing": extra}
    if isinstance(loss, (list, tuple)):
        return [*loss, extra]
    return loss + extra
