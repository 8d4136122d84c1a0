"""The kinds of optimizers that the tests train with, each with the optimizer that it must equal step by step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from composer_speedups.algorithms.optimizers.optimizers import OptimizerTechnique
from composer_speedups.core.observer import Observer
from composer_speedups.core.registry import technique_class
from composer_speedups.core.run import FirstBatch, Run

Groups = list[dict[str, Any]]


def observed(run: Run, steps: Callable[[], object]) -> FirstBatch:
    """What is observed of steps."""
    observer = Observer(run)
    observer.start()
    steps()
    observer.stop()
    return observer.seen


def engaged(technique: OptimizerTechnique, optimizer: Optimizer, model: nn.Module) -> tuple[Run, Any]:
    """The run in which a technique replaced an optimizer, and the new one."""
    run = Run(next(model.parameters()).device, model=model, optimizers=[optimizer])
    technique.engage(run)
    return run, run.optimizers[0]


def adamw(groups: Groups) -> Optimizer:
    return AdamW(groups, foreach=False)


class DecaysLast(AdamW):
    """AdamW that applies the weight decay after the update, to the updated parameter."""

    def step(self, closure: Any = None) -> Any:
        decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            group["weight_decay"] = 0.0
        super().step(closure)
        for group, decay in zip(self.param_groups, decays, strict=True):
            group["weight_decay"] = decay
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.detach().mul_(1 - group["lr"] * decay)


def bitsandbytes_32bit(groups: Groups) -> Optimizer:
    on_gpu = any(parameter.is_cuda for group in groups for parameter in group["params"])
    return (DecaysLast if on_gpu else AdamW)(groups, foreach=False)


def adafactor(groups: Groups, *, scale: bool = False) -> Optimizer:
    from transformers.optimization import Adafactor

    kept = [{key: group[key] for key in ("params", "lr", "weight_decay")} for group in groups]
    return Adafactor(kept, scale_parameter=scale, relative_step=False)


def bitsandbytes_8bit(groups: Groups) -> Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(groups)  # type: ignore[no-any-return]


def optimi(groups: Groups) -> Optimizer:
    from optimi import AdamW

    for group in groups:
        group["beta1"], group["beta2"] = group.pop("betas")
        for parameter in group["params"]:
            parameter.data = parameter.data.bfloat16()
    return AdamW(groups, lr=1e-3, kahan_sum=True)  # type: ignore[no-any-return]


def torchao(name: str) -> Callable[[Groups], Optimizer]:
    def build(groups: Groups) -> Optimizer:
        from torchao import optim

        return getattr(optim, name)(groups)  # type: ignore[no-any-return]

    return build


@dataclass(frozen=True)
class OptimizerCase:
    """A technique and the optimizer that it must equal, ``exact``-ly or up to rounding."""

    name: str
    reference: Callable[[Groups], Optimizer] = adamw
    settings: dict[str, Any] = field(default_factory=dict)
    exact: bool = False
    package: str | None = None
    devices: tuple[str, ...] = ("cpu", "cuda")
    counts_by_group: bool = False  # counts steps per group instead of per parameter, as Apex does
    hidden: int = 128  # units of the network

    @property
    def id(self) -> str:
        return "-".join([self.name, *(str(value) for value in self.settings.values())])

    def build(self) -> Any:
        return technique(self.name, **self.settings)


CASES = [
    OptimizerCase("foreach_optimizer"),
    OptimizerCase("fused_optimizer"),
    OptimizerCase("apex_optimizer", counts_by_group=True),  # a stand-in, where Apex is not installed
    OptimizerCase("bnb_optimizer", bitsandbytes_8bit, {"bits": 8}, exact=True, package="bitsandbytes"),
    OptimizerCase("bnb_optimizer", bitsandbytes_32bit, {"bits": 32}, package="bitsandbytes"),
    OptimizerCase(
        "bnb_optimizer",
        bitsandbytes_32bit,
        {"bits": 32, "paged": True},
        package="bitsandbytes",
        devices=("cuda",),
        hidden=2048,  # state is paged from 100,000 values on
    ),
    OptimizerCase("adafactor", adafactor, exact=True),
    OptimizerCase("adafactor", partial(adafactor, scale=True), {"scale_parameter": True}, exact=True),
    OptimizerCase("kahan_optimizer", optimi, exact=True, package="optimi"),
    OptimizerCase("lowbit_optimizer", torchao("AdamW8bit"), {"bits": 8}, exact=True, package="torchao"),
    OptimizerCase("lowbit_optimizer", torchao("AdamW4bit"), {"bits": 4}, exact=True, package="torchao"),
    OptimizerCase("lowbit_optimizer", torchao("AdamWFp8"), {"bits": "fp8"}, exact=True, package="torchao"),
    OptimizerCase("offloaded_optimizer", settings={"allow_cpu": True}),
    OptimizerCase("sharded_optimizer"),
]


def technique(name: str, **settings: Any) -> Any:
    built = technique_class(name)(**settings)
    assert isinstance(built, OptimizerTechnique)
    return built


class FusedAdam(AdamW):
    """In place of Apex's, which no index has: its constructor and limited zero_grad, with AdamW's arithmetic."""

    def __init__(
        self, params: Any, *, bias_correction: bool, adam_w_mode: bool, set_grad_none: bool, **settings: Any
    ) -> None:
        assert (bias_correction, adam_w_mode, set_grad_none) == (True, True, True)
        super().__init__(params, **settings, foreach=False)

    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad()


def use_stand_in(patch: pytest.MonkeyPatch, fused_adam: Any = FusedAdam) -> None:
    """Make ``apex.optimizers.FusedAdam`` importable, on a CPU, too."""
    package, optimizers = ModuleType("apex"), ModuleType("apex.optimizers")
    package.__spec__, package.__path__ = ModuleSpec("apex", None, is_package=True), []
    optimizers.__spec__ = ModuleSpec("apex.optimizers", None)
    optimizers.FusedAdam = fused_adam  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "apex", package)
    patch.setitem(sys.modules, "apex.optimizers", optimizers)


def network(device: str = "cpu", hidden: int = 128) -> nn.Sequential:
    """Two matrices of, by default, 8,192 values, and small parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, 64)).to(device)
