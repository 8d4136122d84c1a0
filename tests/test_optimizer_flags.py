"""foreach and fused: the same AdamW, other kernels; schedulers, groups and old checkpoints survive."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.optim import CosineAnnealingWithWarmupScheduler, DecoupledAdamW

from composer_speedups import (
    ForEachOptimizer,
    FusedOptimizer,
    apply_foreach_optimizer,
    apply_fused_optimizer,
)
from composer_speedups.algorithms.probe import OperatorRecorder
from composer_speedups.errors import NotEngagedError, TechniqueError
from tests.common import final_weights, make_trainer, tiny_bert
from tests.reference.loop import EPS

both = pytest.mark.parametrize("technique", [ForEachOptimizer, FusedOptimizer])


def grouped_adamw(model: Any) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    groups = [{"params": parameters[::2], "lr": 2e-3}, {"params": parameters[1::2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, eps=EPS, weight_decay=0.1, foreach=False)


@pytest.mark.parametrize(
    ("apply", "operator"), [(apply_foreach_optimizer, "_foreach_"), (apply_fused_optimizer, "_fused_adamw_")]
)
@pytest.mark.pins
def test_the_function_changes_kernels_and_not_values(apply: Any, operator: str) -> None:
    models = [tiny_bert(), tiny_bert()]
    optimizers = [grouped_adamw(model) for model in models]
    assert apply(optimizers[1])["before"] == ["for-loop"]
    recorder = OperatorRecorder()
    for step in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            with recorder if optimizer is optimizers[1] else torch.enable_grad():
                optimizer.step()
    assert any(name.startswith(operator) for name in recorder.counts)
    torch.testing.assert_close(dict(models[1].named_parameters()), dict(models[0].named_parameters()))


@both
def test_groups_and_the_composer_schedule_survive(technique: Any) -> None:
    rates = []
    for algorithms in ([], [technique()]):
        model = tiny_bert()
        trainer = make_trainer(
            algorithms,
            model=model,
            optimizer=grouped_adamw(model),
            schedulers=CosineAnnealingWithWarmupScheduler("1ba"),
        )
        trainer.fit()
        groups = trainer.state.optimizers[0].param_groups
        rates.append(([g["lr"] for g in groups], [g["weight_decay"] for g in groups], final_weights(trainer)))
        trainer.close()
    assert rates[1][:2] == rates[0][:2]
    assert rates[0][1] == [0.1, 0.0]
    torch.testing.assert_close(rates[1][2], rates[0][2])


@both
def test_a_torch_schedule_survives(technique: Any) -> None:
    final = []
    for algorithms in ([], [technique()]):
        model = tiny_bert()
        optimizer = grouped_adamw(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
        settings = {"schedulers": scheduler, "step_schedulers_every_batch": True}
        trainer = make_trainer(algorithms, model=model, optimizer=optimizer, **settings)
        trainer.fit()
        trainer.close()
        final.append([g["lr"] for g in trainer.state.optimizers[0].param_groups])
    assert final[1] == final[0]
    assert final[0] == pytest.approx([2e-5, 1e-5])


@both
def test_flags_of_an_older_checkpoint_do_not_come_back(technique: Any, tmp_path: Path) -> None:
    optimizer = grouped_adamw(model := tiny_bert())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    plain_state = copy.deepcopy(optimizer.state_dict())
    instance = technique()
    trainer = make_trainer([instance], model=model, optimizer=optimizer)
    optimizer.load_state_dict(plain_state)
    assert not any(g[instance.implementation] for g in optimizer.param_groups), "what this test is about"
    instance.reassert(trainer.state)
    assert all(g[instance.implementation] for g in optimizer.param_groups)
    trainer.fit()
    trainer.close()
    assert instance.evidence["operators_in_one_step"]


@both
def test_an_optimizer_without_the_implementation_is_refused(technique: Any) -> None:
    model = tiny_bert()
    with pytest.raises(TechniqueError, match=r"DecoupledAdamW has no .*; use torch\.optim\.AdamW"):
        make_trainer([technique()], model=model, optimizer=DecoupledAdamW(model.parameters(), lr=1e-3))


@both
@pytest.mark.pins
def test_flags_taken_away_after_init_are_noticed(technique: Any) -> None:
    instance = technique()
    trainer = make_trainer([instance])
    for group in trainer.state.optimizers[0].param_groups:
        group["foreach"] = group["fused"] = False
    with pytest.raises(NotEngagedError, match="did not take effect"):
        trainer.fit()
    trainer.close()


def test_fused_refuses_parameters_that_are_not_floating_point() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))], foreach=False)
    with pytest.raises(ValueError, match="complex64"):
        apply_fused_optimizer(optimizer)
