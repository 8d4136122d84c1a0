"""Peak memory and its breakdown."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from composer.core import Callback, State
from composer.loggers import Logger

from composer_speedups.callbacks.checkpoints import SavedCallback
from composer_speedups.core.optimizer_state import state_tensors
from composer_speedups.core.trainer_state import device_of, local_shard
from composer_speedups.distributed.composer_loop import reads_no_gradients

GIB = 2**30


class MemoryAnatomy(SavedCallback):
    """Logs this rank's peak training memory and its breakdown, in GiB.

    ``memory/peak_gib`` is the allocator's peak on a GPU, and the process's peak resident set since it started on a CPU.
    ``memory/weights_gib`` (parameters and buffers), ``memory/gradients_gib`` and ``memory/optimizer_gib`` are the bytes
    of the tensors. ``memory/activations_gib``, on a GPU only, is the growth of allocated memory during the forward pass
    of one micro-batch, which keeps it for the backward pass. The sizes need not add up to the peak, since gradients are
    created while activations are freed.

    All are measured in the second batch of each ``fit``, since the first one may compile; the peak and the sizes of
    weights and optimizer also at the end of each epoch and at the end.
    """

    saved: ClassVar[tuple[str, ...]] = ("parts",)

    def reset(self) -> None:
        self.parts: dict[str, float] = {}
        self._peak_before = 0.0  # in earlier processes of a resumed run, in bytes

    def fit_start(self, state: State, logger: Logger) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        state.callbacks.append(_SecondBatch(self))

    def epoch_end(self, state: State, logger: Logger) -> None:
        self._put("weights", _bytes([*state.model.parameters(), *state.model.buffers()]))
        tensors = (tensor for optimizer in state.optimizers for _, tensor in state_tensors(optimizer))
        self._put("optimizer", _bytes(t for t in tensors if t.device.type == device_of(state).type))
        self._put("peak", max(_peak(device_of(state)), self._peak_before))
        logger.log_metrics({f"memory/{k}": v for k, v in self.parts.items()})

    fit_end = epoch_end

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._peak_before = self.parts.get("peak_gib", 0.0) * GIB

    def _put(self, part: str, size: float) -> None:
        self.parts[f"{part}_gib"] = size / GIB

    def summary(self) -> dict[str, float | None]:
        """The ``memory`` section of report.json, in GiB; None for values that were not measured."""
        parts = ("peak", "weights", "gradients", "optimizer", "activations")
        return {f"{part}_gib": self.parts.get(f"{part}_gib") for part in parts}


class _SecondBatch(Callback):
    """Measures gradients and activations in the second batch, after which it is no callback any more."""

    def __init__(self, anatomy: MemoryAnatomy) -> None:
        self._anatomy, self._due, self._before_forward = anatomy, False, 0

    def before_forward(self, state: State, logger: Logger) -> None:
        if self._due and device_of(state).type == "cuda":
            self._before_forward = torch.cuda.memory_allocated(device_of(state))

    def before_backward(self, state: State, logger: Logger) -> None:
        if self._due and device_of(state).type == "cuda":
            self._anatomy._put("activations", torch.cuda.memory_allocated(device_of(state)) - self._before_forward)

    @reads_no_gradients
    def after_train_batch(self, state: State, logger: Logger) -> None:
        if self._due:
            self._anatomy._put("gradients", _bytes(p.grad for p in state.model.parameters() if p.grad is not None))

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._due:
            self._anatomy.epoch_end(state, logger)
            state.callbacks.remove(self)
        self._due = True

    def fit_end(self, state: State, logger: Logger) -> None:
        state.callbacks.remove(self)  # there was one batch


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages of some tensors; tied weights count once."""
    storages = {}
    for tensor in tensors:
        storage = local_shard(tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
