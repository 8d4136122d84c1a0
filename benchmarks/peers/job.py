"""The job of a config, as in train.py, for loops other than Composer's: data, model, learning rates, evaluations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from composer.core import State, Time, Timestamp, TimeUnit
from composer.devices import DeviceCPU
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader

from composer_speedups.core.command_line import read_settings
from composer_speedups.core.errors import ConfigError, first_line
from composer_speedups.core.settings import Settings
from composer_speedups.tasks.models import FinetuneModel
from composer_speedups.train.cli import read_command_line
from composer_speedups.train.config.schema import Config
from composer_speedups.train.trainer import build_data_and_model, build_scheduler

PREFIX = "peer."


class Job(NamedTuple):
    train: DataLoader[Any]
    eval: DataLoader[Any] | None
    model: FinetuneModel  # on the CPU, with eager attention and train.py's initial weights


class Plan(NamedTuple):
    """Training duration, learning rates, and when to evaluate; batches count from 0 over all epochs."""

    batches: int
    batches_an_epoch: int
    rates: list[float]  # of each batch, relative to the peak
    evaluate_after: frozenset[int]  # numbers of trained batches

    @property
    def epochs(self) -> int:
        return math.ceil(self.batches / self.batches_an_epoch)

    def rate(self, batch: int) -> float:
        """The learning rate of a batch; schedulers also request the one after the last batch."""
        return self.rates[min(batch, len(self.rates) - 1)]


def read_arguments(
    arguments: Sequence[str], flags: type[Settings] = Settings, *, several_ranks: bool = False
) -> tuple[Config, Any]:
    """Read train.py's arguments, and a peer's own flags ``peer.NAME=VALUE``; refuse what peers do not support."""
    given, rest = read_settings(flags, arguments, PREFIX)
    config = read_command_line(rest)
    _refuse_the_rest(config)
    if dist.get_world_size() > 1 and not several_ranks:
        raise ConfigError("this peer trains in one process; start it without composer -n")
    return config, given


def _refuse_the_rest(config: Config) -> None:
    trainer, warmup = config.trainer, config.scheduler.warmup
    lengths = {"trainer.max_duration": trainer.max_duration, "scheduler.warmup": warmup}
    for key, value in lengths.items():
        if not value.endswith(("ep", "ba", "dur")):
            raise ConfigError(f"{key}: peers support epochs and batches, not {value}; use ep or ba")
    refused = {
        "trainer.eval_batches": trainer.eval_batches is not None,
        "trainer.microbatch_size": trainer.microbatch_size is not None,
        "trainer.microbatch_tokens": trainer.microbatch_tokens is not None,
        "checkpoint": config.checkpoint.load is not None or config.checkpoint.interval is not None,
    }
    for key, given in refused.items():
        if given:
            raise ConfigError(f"{key}: the peers do not support it; remove it")


def build_job(config: Config, *, on_gpu: bool) -> Job:
    """Build the samples in train.py's order, and the model with train.py's initial weights."""
    data, model = build_data_and_model(config, on_gpu=on_gpu)
    train, evaluation = data.train.dataloader, data.eval and data.eval.dataloader
    assert isinstance(train, DataLoader)
    assert evaluation is None or isinstance(evaluation, DataLoader)
    return Job(train, evaluation, model)


def set_attention(model: FinetuneModel, attention: str) -> None:
    """Change the attention implementation of a job's model."""
    try:
        model.model.set_attn_implementation(attention)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"peer.attention: {attention!r} cannot be used ({first_line(error)})") from error


def plan_of(config: Config, batches_an_epoch: int) -> Plan:
    """Compute the config's Composer schedule, batch by batch.

    Composer computes the next batch's learning rate before it advances its clock, so each batch except the first has
    the rate of its predecessor.
    """
    duration = Time.from_timestring(config.trainer.max_duration)
    batches = int(duration) * (batches_an_epoch if duration.unit == TimeUnit.EPOCH else 1)
    state = State(
        model=nn.Identity(),
        rank_zero_seed=0,
        run_name="plan",
        device=DeviceCPU(),
        max_duration=duration,
        dataloader=[None] * batches_an_epoch,
        dataloader_len=batches_an_epoch,
        dataloader_label="train",
    )
    scheduler, rates = build_scheduler(config.scheduler), []
    for batch in (0, *range(batches)):
        state.timestamp = Timestamp(epoch=batch // batches_an_epoch, batch=batch)
        rates.append(scheduler(state))
    return Plan(batches, batches_an_epoch, rates, _evaluations(config, batches, batches_an_epoch))


def _evaluations(config: Config, batches: int, batches_an_epoch: int) -> frozenset[int]:
    """As in Composer: at every interval, and at the end."""
    interval = Time.from_timestring(config.trainer.eval_interval or config.trainer.max_duration)
    every = int(interval) * (batches_an_epoch if interval.unit == TimeUnit.EPOCH else 1)
    return frozenset({*range(every, batches + 1, every), batches})
