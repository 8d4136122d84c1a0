"""The layer freezing technique: a model's first layers stop training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import torch
from composer.core import State, TimeUnit
from composer.core.time import Time
from composer.utils import dist
from pydantic import Field
from torch import Tensor, nn

from composer_speedups.algorithms.layer_freezing.functional import (
    apply_layer_freezing,
    check_freezing,
    check_layers,
    gradient_norms_of_blocks,
    settled_blocks,
)
from composer_speedups.core.errors import TechniqueError
from composer_speedups.core.optimizer_evidence import state_bytes
from composer_speedups.core.requirements import Context, Requirement, needs_bf16
from composer_speedups.core.settings import ComposerTime, refuse_if
from composer_speedups.core.technique import FSDP, Conflict, Stage, Technique
from composer_speedups.core.trainer_state import is_compiled, model_of
from composer_speedups.families.blocks import blocks_of
from composer_speedups.families.first_layers import first_layers, only_encoder

_UNITS = ("ba", "ep", "dur")
_INTERVAL, _PERCENTILE = "0.05dur", 50.0


class LayerFreezing(Technique):
    """Stops training the embeddings and first blocks, so that their backward pass is not computed.

    Raises:
        TechniqueError: At INIT, for a model that :func:`apply_layer_freezing` refuses, and with ``layers="auto"`` in
            fp16 or for a model with a single block.
    """

    name = "layer_freezing"
    stage = Stage.ADAPTERS
    exactness = "recipe"
    conflicts = (
        Conflict(FSDP, "FSDP has already grouped the parameters, and gathers and reduces frozen ones, too"),
        Conflict("lora", "LoRA already freezes the layers, and layer_freezing would freeze their adapters"),
        Conflict(
            "sparse_upcycling", "the experts of a frozen layer would remain equal, and its router would not learn"
        ),
        Conflict(
            "bnb_optimizer",
            "a stable embedding (stable_embedding: true) adds a norm to the embeddings, which must be trained",
            when=lambda self, other: other.stable_embedding,
        ),
    )
    gain = 1.05  # of the default settings: tune measures time, and more frozen blocks always take less

    layers: Literal["embeddings", "auto"] | int = Field("embeddings")
    """embeddings; a number of blocks, with the embeddings; auto freezes blocks whose gradients have settled."""
    start: Annotated[str, ComposerTime((*_UNITS,))] = Field("0ba")
    """When they stop training, or with auto, when the first interval begins: in ba, ep or dur."""
    interval: Annotated[str, ComposerTime((*_UNITS,), gt=0)] = Field(_INTERVAL)
    """With auto: the time over which gradient norms are averaged, before they are compared with the last ones."""
    percentile: float = Field(_PERCENTILE, gt=0, le=100)
    """With auto: blocks in front of the first one whose rate of change reaches this percentile are frozen."""

    def check_settings(self) -> None:
        if self.layers != "auto":
            refuse_if(
                not isinstance(self.layers, str) and self.layers < 1, "layers", f"must be at least 1, not {self.layers}"
            )
            refuse_if(self.interval != _INTERVAL, "interval", f"is only for layers=auto, not {self.layers}")
            refuse_if(self.percentile != _PERCENTILE, "percentile", f"is only for layers=auto, not {self.layers}")

    def reset(self) -> None:
        super().reset()
        self._frozen: int | None = None  # number of blocks that are frozen with the embeddings; None before
        self._froze: list[list[int]] = []  # at each change: trained batches, blocks, bytes of optimizer state freed
        self._weights: dict[str, Tensor] = {}  # sums of the frozen weights, when training began or they were frozen
        self._output_trains = False  # whether the embeddings' output required gradients in the first batch
        self._began_at: float | None = None  # with auto: when the first interval began
        self._interval_number = self._batches = self._comparisons = 0
        self._norms: Tensor | None = None  # sums over the batches of this interval, (blocks,)
        self._norms_before: list[float] = []  # means of the last interval
        self._until: Time[Any] | None = None  # max_duration, which a callback that stops training early replaces

    def requirements(self, context: Context) -> Iterable[Requirement]:
        if self.layers == "auto":
            yield needs_bf16(context, "layers=auto compares gradients, which fp16 scales by a changing factor;")

    def engage(self, state: State) -> dict[str, Any]:
        with self.refusals():
            check_freezing(state.model, 1 if self.layers == "auto" else check_layers(self.layers))
            if self._frozen is None and self.layers != "auto" and _number(self.start) == 0:
                self._freeze(state, check_layers(self.layers))
        blocks = len(blocks_of(only_encoder(state.model)))
        if self.layers == "auto" and blocks == 1:
            reason = "layers=auto never freezes the last block, and the model has one"
            raise TechniqueError(self.name, reason, "set layers=1")
        return {"layers": self.layers, "blocks": blocks, "start": self.start}

    def _freeze(self, state: State, blocks: int) -> None:
        before = sum(map(state_bytes, state.optimizers))
        apply_layer_freezing(state.model, state.optimizers, blocks or "embeddings")
        freed = before - sum(map(state_bytes, state.optimizers))
        self._frozen = blocks
        self._froze.append([state.timestamp.batch.value, blocks, freed])

    def _parameters(self, state: State) -> dict[str, nn.Parameter]:
        """The parameters that must be frozen, by name."""
        if self._frozen is None:
            return {}
        modules = first_layers(model_of(state), self._frozen).items()
        return {f"{path}.{name}": p for path, module in modules for name, p in module.named_parameters()}

    # Events

    def fit_start(self, state: State) -> None:
        self._until = state.max_duration
        self._weights = _sums(self._parameters(state))  # after a checkpoint was loaded
        if self.layers == "auto" and self._began_at is None and self._is_due(state):
            self._began_at = _elapsed(self.interval, state)
        if self._began_at is not None:
            self._interval_number = self._intervals(state)  # a later max_duration makes intervals in dur longer

    def _intervals(self, state: State) -> int:
        """The number of intervals that are over."""
        assert self._began_at is not None
        return int((_elapsed(self.interval, state) - self._began_at) / _number(self.interval) + 1e-6)

    def watch(self, state: State) -> None:
        if self._frozen is not None and not is_compiled(state.model):  # a hook would become part of the compiled code
            embeddings = next(iter(first_layers(model_of(state), 0).values()))
            self.watching.callback(embeddings.register_forward_hook(self._see).remove)

    def _see(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self._output_trains = self._output_trains or output.requires_grad

    def batch_end(self, state: State) -> None:
        if self._began_at is not None:
            norms = gradient_norms_of_blocks(model_of(state))
            self._norms = norms if self._norms is None else self._norms + norms
            self._batches += 1
        self._advance(state)

    def epoch_end(self, state: State) -> None:
        self._advance(state)

    def _advance(self, state: State) -> None:
        """Freeze layers, or compare gradients, if that is due after this batch or epoch."""
        if self.layers != "auto":
            if self._frozen is None and self._is_due(state):
                self._freeze_in_training(state, check_layers(self.layers))
        elif self._began_at is None:
            if self._is_due(state):
                self._began_at = _elapsed(self.interval, state)
        elif self._norms is not None and (passed := self._intervals(state)) > self._interval_number:
            self._interval_number = passed
            self._compare(state)

    def _compare(self, state: State) -> None:
        assert self._norms is not None
        now, before = (self._norms / self._batches).tolist(), self._norms_before
        self._norms_before, self._norms, self._batches = now, None, 0
        if not before:
            return
        frozen = self._frozen or 0
        (blocks,) = dist.all_gather_object(settled_blocks(before, now, frozen, self.percentile))[:1]  # rank 0's
        self._comparisons += 1
        if blocks > frozen:
            self._freeze_in_training(state, blocks)
        self.log_metrics({"frozen_blocks": blocks})

    def _freeze_in_training(self, state: State, blocks: int) -> None:
        with self.refusals():
            self._freeze(state, blocks)
        parameters = self._parameters(state)
        self._weights |= _sums({name: p for name, p in parameters.items() if name not in self._weights})

    def _is_due(self, state: State) -> bool:
        return _elapsed(self.start, state) >= _number(self.start)

    # Evidence

    def verify(self, state: State) -> dict[str, Any]:
        parameters = self._parameters(state)
        if not parameters:
            return self._nothing_frozen(state) if self.ended else {}
        self._check_effect(parameters)
        self.evidence.pop("note", None)  # of an earlier fit, in which nothing was frozen
        trained = sum(p.numel() for p in state.model.parameters() if p.requires_grad)
        return {
            "frozen": _described(self._frozen or 0),
            "froze_after_batches": {_described(blocks): batches for batches, blocks, _ in self._froze},
            "frozen_parameters": sum(p.numel() for p in set(parameters.values())),
            "trained_parameters": trained,
            "optimizer_bytes": sum(map(state_bytes, state.optimizers)),
            "optimizer_bytes_freed": sum(freed for *_, freed in self._froze),
            **({"comparisons": self._comparisons} if self.layers == "auto" else {}),
        }

    def _nothing_frozen(self, state: State) -> dict[str, Any]:
        if self.layers == "auto" and self._comparisons:
            note = "no block's gradients settled before those of the blocks behind it"
            return {"frozen": "nothing", "comparisons": self._comparisons, "note": note}
        due, fix = f"start={self.start}", "set an earlier start"
        if self.layers == "auto":
            due, fix = f"two intervals of {self.interval} were over", "set a shorter interval"
        if state.max_duration is not self._until:  # early stopping may come before
            return {"frozen": "nothing", "note": f"training was stopped before {due}"}
        raise self.not_engaged(f"training ended before {due}", fix)

    def _check_effect(self, parameters: dict[str, nn.Parameter]) -> None:
        fix = "do not change requires_grad and the frozen weights after INIT"
        training = next((n for n, p in parameters.items() if p.requires_grad or p.grad is not None), None)
        if training is not None:
            raise self.not_engaged(f"{training} requires gradients or has one, although it is frozen", fix)
        now = _sums({name: p for name, p in parameters.items() if name in self._weights})
        changed = next((name for name, value in now.items() if not torch.equal(value, self._weights[name])), None)
        if changed is not None:
            raise self.not_engaged(f"{changed} changed, although it is frozen", fix)
        if self._output_trains:
            raise self.not_engaged(
                "the embeddings' output requires gradients, so the backward pass of the frozen layers is computed",
                "do not call enable_input_require_grads, and do not hook the embeddings",
            )

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "frozen": self._frozen,
            "froze": [list(change) for change in self._froze],
            "began_at": self._began_at,
            "interval_number": self._interval_number,
            "batches": self._batches,
            "norms": [] if self._norms is None else self._norms.tolist(),
            "norms_before": list(self._norms_before),
            "comparisons": self._comparisons,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore, and freeze what was frozen. Composer loads the optimizer's state after that, as it has none for
        frozen parameters."""
        super().load_state_dict(state)
        trainer_state = self._state() if self._state is not None else None
        if trainer_state is None or not self.in_force:
            return
        self._froze, self._began_at = [list(change) for change in state["froze"]], state["began_at"]
        self._interval_number, self._batches = state["interval_number"], state["batches"]
        self._norms_before, self._comparisons = list(state["norms_before"]), state["comparisons"]
        model = trainer_state.model
        device = next(model.parameters()).device
        self._norms = torch.tensor(state["norms"], device=device) if state["norms"] else None
        with self.refusals("load the weights only"):
            blocks = len(blocks_of(only_encoder(model)))
            if any(len(norms) not in (0, blocks) for norms in (state["norms"], state["norms_before"])):
                raise ValueError(f"the checkpoint's gradient norms are not those of {blocks} blocks")
            if state["frozen"] is not None:
                apply_layer_freezing(model, trainer_state.optimizers, state["frozen"] or "embeddings")
                self._frozen = state["frozen"]


def _described(blocks: int) -> str:
    return "embeddings" if not blocks else f"embeddings and {blocks} block{'s' if blocks > 1 else ''}"


@torch.no_grad()
def _sums(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Sums in float64, which any update changes."""
    return {name: p.sum(dtype=torch.float64) for name, p in parameters.items()}


def _number(time: str) -> float:
    return float(Time.from_timestring(time).value)


def _elapsed(like: str, state: State) -> float:
    """The elapsed training in the unit of a time: batches, epochs, or the share of ``max_duration``."""
    unit, now, whole = Time.from_timestring(like).unit, state.timestamp, state.max_duration
    if unit != TimeUnit.DURATION:
        return float(now.get(unit).value)
    assert whole is not None, "fit() has a duration"
    if whole.unit == TimeUnit.EPOCH and state.dataloader_len is not None:  # batch by batch
        return now.batch.value / (whole.value * state.dataloader_len.value)
    return now.get(whole.unit).value / whole.value
