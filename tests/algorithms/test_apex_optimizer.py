"""Apex's FusedAdam, tested with a stand-in (its signature, AdamW's arithmetic): Apex is not in a package index."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.optim import AdamW, Optimizer

from composer_speedups import ApexOptimizer, apply_apex_optimizer
from composer_speedups.core.errors import NotEngagedError, TechniqueError
from composer_speedups.core.requirements import Context
from composer_speedups.core.technique import screen
from tests.helpers.common import final_weights, grouped_adamw, make_trainer, plain_batches, tiny_bert, trained
from tests.reference.tolerance import assert_near


class FusedAdam(Optimizer):
    """A stand-in with Apex's constructor, step count per group, float32 state and limited zero_grad; no kernels."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        assert (adam_w_mode, set_grad_none, capturable, master_weights) == (True, True, False, False)
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})

    def zero_grad(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def step(self, closure: Any = None, grads: Any = None, output_params: Any = None, grad_scaler: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Any, group: dict[str, Any]) -> None:
        state, gradient, (beta1, beta2) = self.state[parameter], parameter.grad.float(), group["betas"]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].lerp_(gradient.square(), 1 - beta2)
        mean = state["exp_avg"] / (1 - beta1 ** group["step"])
        deviation = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt()
        update = mean / (deviation + group["eps"]) + group["weight_decay"] * parameter.data
        parameter.data.sub_(group["lr"] * update)


@pytest.fixture
def apex(monkeypatch: pytest.MonkeyPatch) -> Any:
    package, optimizers = ModuleType("apex"), ModuleType("apex.optimizers")
    package.__spec__ = ModuleSpec("apex", None, is_package=True)
    package.__path__ = []
    optimizers.__spec__ = ModuleSpec("apex.optimizers", None)
    optimizers.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", package)
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)
    return optimizers


class OnTheCPU(ApexOptimizer):
    """The technique without its requirement of a GPU, for the stand-in."""

    def requirements(self, context: Context) -> Any:
        return list(super().requirements(context))[:1]


def test_without_apex_the_error_says_how_to_install_it() -> None:
    if "apex" in sys.modules:
        pytest.skip("Apex is installed")
    said = r"apex_optimizer: NVIDIA Apex is not installed.*; build it from github\.com/NVIDIA/apex.*fused_optimizer"
    with pytest.raises(TechniqueError, match=said):
        make_trainer([ApexOptimizer()])
    with pytest.raises(ValueError, match="NVIDIA Apex is not installed"):
        apply_apex_optimizer(AdamW(tiny_bert().parameters()))


def test_another_package_named_apex_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("apex")
    package.__spec__ = ModuleSpec("apex", None)
    monkeypatch.setitem(sys.modules, "apex", package)
    with pytest.raises(TechniqueError, match="NVIDIA Apex is not installed"):
        screen([ApexOptimizer()], Context(torch.device("cpu")))


def test_with_apex_it_still_needs_a_gpu(apex: Any) -> None:
    with pytest.raises(TechniqueError, match=r"Apex's FusedAdam needs a CUDA GPU, and this run is on the cpu"):
        screen([ApexOptimizer()], Context(torch.device("cpu")))


def test_it_trains_like_adamw_with_groups_and_a_schedule(apex: Any) -> None:
    final, technique = [], OnTheCPU()
    for algorithms in ([], [technique]):
        model = tiny_bert()
        optimizer = grouped_adamw(model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
        settings = {"schedulers": schedule, "step_schedulers_every_batch": True}
        trainer = trained(algorithms, model=model, optimizer=optimizer, **settings)
        final.append(([g["lr"] for g in trainer.state.optimizers[0].param_groups], final_weights(trainer)))
    assert final[1][0] == final[0][0] == pytest.approx([2e-5, 1e-5])
    assert_near(final[1][1], final[0][1])
    assert technique.evidence["apex_steps"] == technique.evidence["optimizer_steps"] == 4


def test_resuming_keeps_its_groups_step_count(apex: Any, tmp_path: Any) -> None:
    def train(**kwargs: Any) -> Any:
        trainer = trained([OnTheCPU()], model=tiny_bert(dropout=0.1), batches=plain_batches(4), **kwargs)
        return final_weights(trainer)

    saving = {"save_interval": "2ba", "save_filename": "ba{batch}.pt", "save_latest_filename": None}
    whole = train(save_folder=str(tmp_path), **saving)
    torch.testing.assert_close(train(load_path=str(tmp_path / "ba2.pt")), whole, rtol=0, atol=0)


def test_another_fused_adam_is_detected(apex: Any) -> None:
    class Impostor(AdamW):
        def __init__(self, groups: Any, **_: Any) -> None:
            super().__init__(groups)

    apex.FusedAdam = Impostor
    with pytest.raises(NotEngagedError, match="FusedAdam counted no step"):
        trained([OnTheCPU()])


def test_apex_without_cuda_extensions_is_refused(apex: Any) -> None:
    class Unbuilt(FusedAdam):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("apex.optimizers.FusedAdam requires cuda extensions")

    apex.FusedAdam = Unbuilt
    with pytest.raises(ValueError, match=r"requires cuda extensions\); build it from"):
        apply_apex_optimizer(AdamW(tiny_bert().parameters()))
