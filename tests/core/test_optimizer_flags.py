"""foreach_optimizer and fused_optimizer: the same AdamW with other kernels. See also test_optimizer_swaps.py."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.optim import DecoupledAdamW

from composer_speedups import (
    ForEachOptimizer,
    FusedOptimizer,
    apply_foreach_optimizer,
    apply_fused_optimizer,
)
from composer_speedups.core.errors import NotEngagedError, TechniqueError
from composer_speedups.core.operator_recorder import OperatorRecorder
from tests.core.test_optimizer_swaps import grouped_adamw
from tests.helpers.common import make_trainer, tiny_bert

both_techniques = pytest.mark.parametrize("technique", [ForEachOptimizer, FusedOptimizer])


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


@both_techniques
def test_the_flags_of_a_loaded_checkpoint_are_overridden(technique: Any, tmp_path: Path) -> None:
    optimizer = grouped_adamw(model := tiny_bert())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    plain_state = copy.deepcopy(optimizer.state_dict())
    instance = technique()
    trainer = make_trainer([instance], model=model, optimizer=optimizer)
    optimizer.load_state_dict(plain_state)
    assert not any(g[instance.implementation] for g in optimizer.param_groups), "loading must reset the flags"
    instance.after_load(trainer.state)
    assert all(g[instance.implementation] for g in optimizer.param_groups)
    trainer.fit()
    trainer.close()
    assert instance.evidence["operators_in_one_step"]


@both_techniques
def test_an_optimizer_without_the_implementation_is_refused(technique: Any) -> None:
    model = tiny_bert()
    with pytest.raises(TechniqueError, match=r"DecoupledAdamW has no .*; use torch\.optim\.AdamW"):
        make_trainer([technique()], model=model, optimizer=DecoupledAdamW(model.parameters(), lr=1e-3))


@both_techniques
@pytest.mark.pins
def test_flags_removed_after_init_are_an_error(technique: Any) -> None:
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
