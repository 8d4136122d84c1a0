"""Measure a loop other than Composer's with the suite's own callbacks, and write a report.json of the same format."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from composer.core import Callback, Event, Precision, State
from composer.devices import Device
from composer.loggers import Logger

from composer_speedups.callbacks.config import MemoryConfig, ThroughputConfig
from composer_speedups.callbacks.memory import MemoryAnatomy
from composer_speedups.callbacks.run_report import numerics_of
from composer_speedups.callbacks.throughput import ThroughputMonitor
from composer_speedups.core.files import write_json
from composer_speedups.core.processes import process_age
from composer_speedups.families.flops import batch_lengths
from composer_speedups.tasks.models import FinetuneModel
from composer_speedups.train.config.schema import Config
from composer_speedups.train.report import build_report, summary_table
from composer_speedups.train.run_folder import RunFolder


class Meter:
    """Sends :class:`ThroughputMonitor` and :class:`MemoryAnatomy` the events that Composer would send.

    The same code therefore measures the peer and the suite. A loop calls :meth:`begin` after everything is built; then
    for each batch :meth:`waiting`, :meth:`loaded` and, after the optimizer's step, :meth:`end_batch`. ``precision`` is
    Composer's name of the precision of matmuls: ``fp32``, ``amp_bf16``, ``amp_fp16``.
    """

    def __init__(self, config: Config, model: FinetuneModel, device: Device, precision: str = "fp32") -> None:
        self.config = config
        self.state = State(
            model=model, rank_zero_seed=config.seed, run_name=config.run_name, device=device, callbacks=monitors(config)
        )
        self.state.precision = Precision(precision)
        self.losses: list[torch.Tensor] | None = [] if config.loggers.file is not None else None
        self.metrics: dict[str, float] = {}
        self.evaluations: list[dict[str, float]] = []
        self._batches = 0
        self._logger = Logger(self.state)

    def _tell(self, event: Event) -> None:
        for callback in self.state.callbacks:
            callback.run_event(event, self.state, self._logger)

    def begin(self, optimizer: torch.optim.Optimizer, batches: int) -> None:
        """Start training for a number of batches."""
        self.state.optimizers, self._batches = optimizer, batches
        self._tell(Event.FIT_START)

    def between_epochs(self) -> None:
        """Mark time that does not belong to a step, for example while workers start."""
        self._tell(Event.EPOCH_START)

    def waiting(self) -> None:
        """Start waiting for a batch."""
        self._tell(Event.BEFORE_DATALOADER)

    def loaded(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Start the step. ``batch`` is on the host, so that counting its tokens does not synchronize."""
        self.state.batch = batch
        self._tell(Event.AFTER_DATALOADER)
        self._tell(Event.BATCH_START)

    def end_batch(self, loss: torch.Tensor) -> None:
        """End the step. ``loss`` is copied if it is kept, because a CUDA graph would overwrite it."""
        batch, state = self.state.batch, self.state
        lengths = batch_lengths(batch)
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_batch(
            samples=len(batch["input_ids"]), tokens=0 if lengths is None else int(lengths.sum())
        )
        if self.losses is not None:
            self.losses.append(loss.detach().clone())
        if state.timestamp.batch.value == self._batches:
            # Waits for the GPU. HF Trainer waits before it returns, where the clock has stopped.
            self.metrics["train_loss"] = float(loss.detach())
        self._tell(Event.BATCH_END)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Surround an evaluation."""
        self._tell(Event.EVAL_BEFORE_ALL)
        yield
        self._tell(Event.EVAL_AFTER_ALL)

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Note the metrics of an evaluation that has just ended."""
        self.metrics.update(metrics)
        batch = self.state.timestamp.batch.value
        self.evaluations.append({"batch": batch, "seconds": process_age(), **metrics})

    def end(self) -> None:
        """End training."""
        self._tell(Event.FIT_END)

    def write(self, folder: RunFolder, peer: str, evidence: Mapping[str, Any]) -> None:
        """Write report.json and print the summary."""
        metrics = {k: v if math.isfinite(v) else None for k, v in self.metrics.items()}
        more: dict[str, Any] = {"metrics": metrics, "evaluations": self.evaluations}
        if self.losses is not None:
            more["losses"] = [float(loss) for loss in self.losses]
        report = build_report(self.state, self.config) | more
        report["numerics"] = numerics_of(self.state)
        optimizer = type(self.state.optimizers[0])
        evidence = {**evidence, "optimizer": f"{optimizer.__module__}.{optimizer.__qualname__}"}
        report["algorithms"] = {peer: {"engaged": True, "settings": peer, "evidence": evidence}}
        write_json(folder / "report.json", report)
        print(summary_table(report, str(folder.path)), flush=True)


def monitors(config: Config) -> list[Callback]:
    """The suite's callbacks with the config's settings; they measure even if the config disables them."""
    return [
        ThroughputMonitor(**(config.callbacks.throughput or ThroughputConfig()).model_dump()),
        MemoryAnatomy(**(config.callbacks.memory or MemoryConfig()).model_dump()),
    ]
