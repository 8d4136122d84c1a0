"""On out of memory, reduce the micro-batch size while keeping the effective batch, and record the change."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch
from composer import Trainer
from composer.core import State
from composer.loggers import Logger
from composer.trainer.trainer import _clear_incomplete_train_states
from composer.utils import dist, ensure_tuple

from composer_speedups.callbacks.checkpoints import SavedCallback
from composer_speedups.core.errors import first_line
from composer_speedups.core.host import host_of
from composer_speedups.core.trainer_state import model_of
from composer_speedups.data.batching import TokenBatchSampler
from composer_speedups.distributed.composer_loop import reads_no_gradients
from composer_speedups.tasks.models import FinetuneModel
from composer_speedups.tasks.task import Task


class MicrobatchTrainer(Trainer):
    """A Composer Trainer that halves its micro-batch size when a batch does not fit, and trains that batch again, or
    names the size to set where that would change the run. The gradient is the mean over the whole batch at any size."""

    def __init__(self, on_out_of_memory: Literal["halve", "stop"] = "halve", **settings: Any) -> None:
        self.on_out_of_memory, self.history = on_out_of_memory, MicrobatchHistory()
        super().__init__(**settings | {"callbacks": [self.history, *ensure_tuple(settings.get("callbacks"))]})

    @reads_no_gradients
    def _train_microbatches(
        self, microbatches: Any, total_loss_dict: dict[str, torch.Tensor], ddp_sync: bool = True
    ) -> torch.Tensor:
        self.history.note(self.state)
        batch = self.state.batch  # Composer replaces the batch by each micro-batch
        while True:
            if len(microbatches) > 1 or dist.get_world_size() > 1:
                # Summing the weights waits for the GPU, so it is skipped for a single whole batch on one rank.
                task = _task_of(self.state)
                self.accumulate_train_batch_on_tokens = task is not None and task.weights_losses
            try:
                return super()._train_microbatches(microbatches, total_loss_dict, ddp_sync)
            except torch.OutOfMemoryError as error:
                if self.state.auto_microbatching:
                    raise
                assert self._train_data_spec is not None
                rows = max(int(self._train_data_spec.get_num_samples_in_batch(part)) for part in microbatches)
                size = _half_of(self.state, rows, self.on_out_of_memory, error)
            # Here, outside the handler, the traceback no longer keeps the failed pass's memory alive.
            self._shrink(rows, size)
            self.state.batch = batch
            for loss in total_loss_dict.values():
                loss.zero_()
            microbatches = self._train_data_spec.split_batch(batch, size)

    def _shrink(self, rows: int, size: int) -> None:
        state = self.state
        warnings.warn(
            f"trainer.microbatch_size: out of memory with {rows} samples per forward pass in batch "
            f"{state.timestamp.batch.value}; continuing with {size}, with the same effective batch",
            UserWarning,
            stacklevel=4,
        )
        state.device_train_microbatch_size = size
        self.history.note(state)
        _clear_incomplete_train_states(state)
        for metric in (state.train_metrics or {}).values():
            metric.reset()


class MicrobatchHistory(SavedCallback):
    """Records each change of the micro-batch size, also Composer's automatic ones; a resumed run keeps the last."""

    saved = ("changes",)

    def reset(self) -> None:
        self.changes: list[dict[str, Any]] = []  # in order; "batch" is the number of batches trained before
        self._size: Any = None

    def after_load(self, state: State, logger: Logger) -> None:
        if self.changes and not state.auto_microbatching:  # of the run that the checkpoint continues
            state.device_train_microbatch_size = self.changes[-1]["to"]

    def fit_start(self, state: State, logger: Logger) -> None:
        self._size = state.device_train_microbatch_size

    def note(self, state: State) -> None:
        """Record the present size if it has changed. Several changes in one batch are one."""
        size = state.device_train_microbatch_size
        if size != self._size:
            batch = state.timestamp.batch.value
            if self.changes and self.changes[-1]["batch"] == batch:
                self._size = self.changes.pop()["from"]
            self.changes.append({"batch": batch, "from": self._size, "to": size})
        self._size = size


def _task_of(state: State) -> Task | None:
    model = model_of(state)
    return model.task if isinstance(model, FinetuneModel) else None


def _half_of(state: State, rows: int, wanted: str, error: torch.OutOfMemoryError) -> int:
    """The micro-batch size to continue with, if the largest micro-batch had ``rows`` rows."""
    task, half, ranks = _task_of(state), max(1, rows // 2), dist.get_world_size()
    host = host_of(state)
    fixed = [] if host is None else [t.name for t in host.run.techniques.values() if t.fixed_shapes]
    fix, small = f"set trainer.microbatch_size={half}", "lower data.max_length, or use a smaller model"
    if task is not None and task.needs_whole_batch:
        cache = getattr(task, "gradient_cache", None) or state.batch["input_ids"][..., 0].numel()  # in texts
        reason = "micro-batches would split the batch, which its loss needs whole"
        fix = f"set model.gradient_cache={cache // 2}" if cache > 1 else small
    elif isinstance(sampler := getattr(state.train_dataloader, "sampler", None), TokenBatchSampler):
        reason, fix = "data.batch_tokens determines it", f"set trainer.microbatch_tokens={sampler.tokens // 2}"
    elif rows == 1:
        reason, fix = "1 is the minimum", small
    elif ranks > 1 or state.fsdp_config is not None:
        reason = "several ranks cannot repeat a batch that failed on one of them"
    elif fixed:
        reason = f"{fixed[0]} replays graphs of that size"
    elif wanted == "stop":
        reason = "trainer.on_out_of_memory is stop"
    else:
        return half
    raise torch.OutOfMemoryError(
        f"{first_line(error)}\ntrainer.microbatch_size: out of memory with a micro-batch of {rows}, and {reason}; {fix}"
    ) from error
