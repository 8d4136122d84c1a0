"""Compare the speed of the run's techniques with that of another set, in alternating turns on the same data."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from composer import Trainer
from composer.devices import Device
from composer.utils import dist

from composer_speedups.callbacks.checkpoints import callback_of
from composer_speedups.callbacks.throughput import Batch, ThroughputMonitor
from composer_speedups.core.registry import build_techniques
from composer_speedups.core.technique import Technique
from composer_speedups.core.trainer_state import torch_device
from composer_speedups.train.config.schema import CallbacksConfig, CheckpointConfig, Config, LoggersConfig
from composer_speedups.train.fit import fit
from composer_speedups.train.trainer import build_data_and_model, build_trainer

_TURNS = 5


def baseline_techniques(config: Config) -> list[Technique]:
    """The techniques of ``baseline.algorithms``; empty without a baseline."""
    return [] if config.baseline is None else build_techniques(config.baseline.algorithms, config.on_unavailable)


def measure_baseline(config: Config, device: Device) -> dict[str, Any] | None:
    """Train two temporary models in alternating turns, so that other load on the machine slows both equally."""
    if config.baseline is None:
        return None
    sets = [baseline_techniques(config), build_techniques(config.algorithms, config.on_unavailable)]
    if dist.get_global_rank() == 0 and config.trainer.progress_bar:
        print(f"comparing with the baseline, {config.baseline.batches} batches each", flush=True)
    batches = config.baseline.batches // _TURNS
    with contextlib.ExitStack() as stack:
        trainers = []
        for techniques in sets:
            trainers.append(_short_trainer(config, techniques, device))
            stack.callback(trainers[-1].close)
        for trainer in trainers * _TURNS:
            fit(trainer, f"{batches}ba")
        monitors = [callback_of(trainer.state, ThroughputMonitor) for trainer in trainers]
        theirs, ours = (monitor.batches for monitor in monitors if monitor is not None)
    return {
        "algorithms": [technique.name for technique in sets[0] if technique.engaged],
        "batches": batches * _TURNS,
        "samples_per_sec": dist.get_world_size() * steady_rate(theirs, batches),
        "run_samples_per_sec": dist.get_world_size() * steady_rate(ours, batches),
        "turn_ratios": turn_ratios(theirs, ours, batches),
    }


def _short_trainer(config: Config, techniques: list[Technique], device: Device) -> Trainer:
    assert config.baseline is not None
    duration = f"{config.baseline.batches}ba"  # as of each turn; other units could not be compared with the warm-up
    short = config.replaced(
        run_name=f"{config.run_name}-baseline",
        trainer=config.trainer.replaced(max_duration=duration, progress_bar=False, early_stopping=None),
        scheduler=config.scheduler.replaced(warmup="1ba"),  # a fraction of a turn could be zero batches
        checkpoint=CheckpointConfig(),
        callbacks=CallbacksConfig(memory=None),
        loggers=LoggersConfig(),
    )
    data, model = build_data_and_model(short, on_gpu=torch_device(device).type == "cuda")
    return build_trainer(short, model, data._replace(eval=None), techniques, device)


def steady_rate(batches: Sequence[Batch], turn: int) -> float:
    """Samples/s of one rank over steady batches, without the first of each turn, which skips data trained before."""
    return _rate([batch for i, batch in enumerate(batches) if batch.steady and i % turn] or batches)


def turn_ratios(before: Sequence[Batch], now: Sequence[Batch], turn: int) -> list[float]:
    """The ratio of the two rates in each turn with steady batches of both sets, not counting its first batch."""
    ratios = []
    for start in range(0, min(len(before), len(now)), turn):
        old, new = ([b for b in each[start + 1 : start + turn] if b.steady] for each in (before, now))
        if old and new:
            ratios.append(_rate(new) / _rate(old))
    return ratios


def _rate(batches: Sequence[Batch]) -> float:
    return sum(batch.samples for batch in batches) / sum(batch.seconds for batch in batches)
