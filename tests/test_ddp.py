"""DDP as train.py has it: gradients are views of the buckets that ranks add up, and what one process computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from composer.core import Callback, State
from composer.distributed import dist_strategy
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from composer_speedups.models import FinetuneModel
from composer_speedups.out_of_memory import MicrobatchTrainer
from composer_speedups.state import model_of
from tests.common import make_trainer, tiny_bert
from tests.ranks import on_ranks
from tests.reference.composition import batches
from tests.reference.loop import gradients
from tests.reference.tolerance import assert_near


class LastGradients(Callback):
    """What the optimizer steps with, and how many pieces of memory hold it."""

    def after_train_batch(self, state: State, logger: Logger) -> None:
        parameters = list(model_of(state).parameters())
        self.found = gradients(model_of(state).model)
        self.pieces = len({p.grad.untyped_storage().data_ptr() for p in parameters if p.grad is not None})


def trained(microbatch: int) -> tuple[dict[str, Tensor], int]:
    model: Any = FinetuneModel(tiny_bert(), use_logits=True)
    model.model.config.problem_type = "single_label_classification"
    last = LastGradients()
    trainer = make_trainer(
        batches=batches(dist.get_world_size()),
        max_duration="4ba",
        model=model,
        callbacks=[last],
        cls=MicrobatchTrainer,
        device_train_microbatch_size=microbatch,
    )
    trainer.fit()
    trainer.close()
    return last.found, last.pieces


@pytest.mark.parametrize("microbatch", [2, 1])
def test_gradients_lie_in_the_buckets_and_are_those_of_one_process(microbatch: int) -> None:
    expected, pieces = trained(2 * microbatch)
    assert pieces == len(expected)
    for found, pieces in on_ranks(lambda: trained(microbatch)):
        assert_near(found, expected)
        assert pieces < 4, "tiny BERT's are a few hundred KiB, and a bucket 25 MiB"


@pytest.mark.parametrize("state", [False, True])
def test_buffers_are_sent_where_they_are_state(state: bool) -> None:
    def seen() -> list[Any]:
        model: Any = FinetuneModel(tiny_bert(), use_logits=True)
        model.model.register_buffer("mine", torch.tensor(1.0 + dist.get_global_rank()), persistent=state)
        trainer = make_trainer(model=model, batches=batches(2), max_duration="2ba", cls=MicrobatchTrainer)
        trainer.fit()
        trainer.close()
        return [trainer.state.model.broadcast_buffers, float(model.model.mine)]

    assert on_ranks(seen) == ([[True, 1.0], [True, 1.0]] if state else [[False, 1.0], [False, 2.0]])


def test_a_bucket_is_divided_as_a_whole() -> None:
    def hook() -> str:
        trainer = make_trainer(batches=batches(2), max_duration="1ba", cls=MicrobatchTrainer)
        trainer.fit()
        trainer.close()
        return str(trainer.state.model._get_ddp_logging_data()["comm_hook"])

    assert on_ranks(hook) == ["BuiltinCommHookType.ALLREDUCE"] * 2


def test_composers_own_trainer_is_left_alone() -> None:
    make_trainer(cls=MicrobatchTrainer).close()
    assert dist_strategy.DistributedDataParallel is DistributedDataParallel
