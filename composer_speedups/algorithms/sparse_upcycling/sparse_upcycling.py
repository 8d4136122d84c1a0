"""Feed-forward layers of a dense model become experts (sparse upcycling)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from composer.core import Event, State
from composer.loggers import Logger
from torch import Tensor, nn

from composer_speedups.algorithms.sparse_upcycling.functional import apply_sparse_upcycling, check_settings
from composer_speedups.algorithms.sparse_upcycling.loss import add_to_loss, load_balancing_loss, sparse_layers
from composer_speedups.core.errors import TechniqueError
from composer_speedups.core.technique import OnUnavailable, Stage, Technique

__all__ = ["SparseUpcycling"]


class SparseUpcycling(Technique):
    """Every n-th feed-forward layer becomes experts behind a router: more parameters, not more speed.

    Args:
        experts: Experts a layer. Default 4.
        every: Every how many layers. Default 2.
        top_k: Experts a token goes to, 2 (default) to ``experts``.
        load_balancing: Coefficient of the load-balancing loss, summed over layers. Default 0.01; 0 leaves it out.
        on_unavailable: See :class:`Technique`.

    Raises:
        ValueError: A setting out of range.
        TechniqueError: At INIT, when the model has no feed-forward layers that experts are known for.
    """

    name = "sparse_upcycling"
    stage = Stage.SURGERY
    changes_structure = True
    clashes: ClassVar[dict[str, str]] = {
        "cuda_graphs": "each layer of experts reads on the host how many tokens go where, which a capture forbids"
    }

    def __init__(
        self,
        experts: int = 4,
        every: int = 2,
        top_k: int = 2,
        load_balancing: float = 0.01,
        *,
        on_unavailable: OnUnavailable = "stop",
    ) -> None:
        super().__init__(on_unavailable=on_unavailable)
        check_settings(experts, every, top_k)
        if load_balancing < 0:
            raise ValueError(f"load_balancing must not be negative, not {load_balancing}")
        self.experts, self.every, self.top_k, self.load_balancing = experts, every, top_k, load_balancing
        self._rows: dict[str, list[int]] = {}  # by layer: rows that came out of each expert in the first batch
        self._hooks: list[Any] = []
        self._reached = False  # whether the backward pass came to the load-balancing loss
        self._losses: list[Tensor] = []  # of this batch's microbatches
        self._balance = 0.0  # of the last batch, summed over layers
        self._load: dict[str, Tensor] = {}  # by layer: shares of the real tokens' slots in the last microbatch
        self._first: dict[str, Any] = {}

    def engage(self, state: State) -> dict[str, Any]:
        before = sum(p.numel() for p in state.model.parameters())
        try:
            apply_sparse_upcycling(state.model, state.optimizers, self.experts, self.every, self.top_k)
        except ValueError as error:
            raise TechniqueError(self.name, str(error), "take it out for this model") from error
        return {
            "layers": len(sparse_layers(state.model)),
            "experts": self.experts,
            "parameters_added": sum(p.numel() for p in state.model.parameters()) - before,
            "checkpoint": "its own; an exported model loads with load_sparse_upcycling",
        }

    def match(self, event: Event, state: State) -> bool:
        return super().match(event, state) or (bool(self.engaged) and event in (Event.AFTER_LOSS, Event.BATCH_END))

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.AFTER_LOSS:
            self._add_to_loss(state)
        elif event == Event.BATCH_END and self._losses:
            self._balance = float(torch.stack(self._losses).mean())
            self._losses = []
            logger.log_metrics({f"{self.name}/load_balancing_loss": self._balance / len(sparse_layers(state.model))})
        if super().match(event, state):
            super().apply(event, state, logger)

    def _add_to_loss(self, state: State) -> None:
        try:
            balance = load_balancing_loss(state.model)
        except ValueError as error:
            self.unavailable(self.not_engaged(str(error), "use checkpointing without use_reentrant, or take it out"))
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

    def observe(self, event: Event, state: State) -> None:
        """Count the rows that come out of each expert, microbatch by microbatch."""
        if event == Event.AFTER_FORWARD:
            self.close()
            return
        for layer in sparse_layers(state.model):
            counts = self._rows.setdefault(layer.name, [0] * len(layer.experts))
            for index, expert in enumerate(layer.experts):
                self._hooks.append(expert.register_forward_hook(_count_into(counts, index)))

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
        layers, fix = sparse_layers(state.model), "leave the model and its loss as they are after INIT, or take it out"
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
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _count_into(counts: list[int], index: int) -> Callable[..., None]:
    def count(module: nn.Module, args: Any, output: Tensor) -> None:
        counts[index] += len(output)

    return count
