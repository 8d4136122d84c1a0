"""The optimizer of a config: weight decay and parameter groups."""

from __future__ import annotations

import pytest
import torch

from composer_speedups.core.errors import ConfigError
from composer_speedups.train.config.schema import OptimizerConfig
from composer_speedups.train.optimization import build_optimizer
from tests.helpers.common import tiny_bert
from tests.helpers.jobs import run


@pytest.mark.parametrize("vectors", [False, True])
def test_vectors_decay_only_with_decay_bias_and_norm(vectors: bool) -> None:
    """With gradients of 0, an AdamW step only decays the weights."""
    model = tiny_bert()
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    frozen = model.bert.pooler.dense.weight.requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.5, weight_decay=0.2, decay_bias_and_norm=vectors))
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters() if p is not frozen}
    assert len(grouped) == len({id(p) for p in grouped})
    optimizer.step()
    for name, parameter in model.named_parameters():
        decays = parameter is not frozen and (vectors or parameter.ndim > 1)
        torch.testing.assert_close(parameter.data, torch.full_like(parameter, 0.9 if decays else 1.0), msg=name)


def test_a_warm_up_of_epochs_is_compared_with_batches_once_the_data_are_read() -> None:
    """An epoch of the short job has six batches."""
    with pytest.raises(
        ConfigError, match=r"scheduler\.warmup is 1ep and trainer\.max_duration is 5ba, so the learning"
    ):
        run("scheduler.warmup=1ep", "trainer.max_duration=5ba")
    run("scheduler.warmup=6ba", "trainer.max_duration=1ep", "export=false")


@pytest.mark.parametrize("duration", ["2ep", "5ba", "40sp"])
def test_without_an_interval_a_run_is_evaluated_once_after_training(duration: str) -> None:
    """A baseline's warm-up has the unit of the run's duration."""
    job = ["scheduler.warmup=0.5dur", "trainer.eval_interval=null", "export=false"]
    report = run(*job, f"trainer.max_duration={duration}", "baseline={batches: 10, algorithms: {}}")
    assert [evaluation["batch"] for evaluation in report["evaluations"]] == [report["training"]["batches"]]
