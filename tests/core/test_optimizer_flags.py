"""foreach_optimizer and fused_optimizer: the same AdamW with other kernels. See also test_optimizer_swaps.py."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.core import Precision
from composer.optim import DecoupledAdamW
from torch import Tensor

from composer_speedups import ForEachOptimizer, FusedOptimizer, apply_foreach_optimizer, apply_fused_optimizer
from composer_speedups.algorithms.fused_optimizer.triton_step import TritonStep, running_step, triton_step_of
from composer_speedups.core.errors import NotEngagedError, TechniqueError
from composer_speedups.core.operator_recorder import OperatorRecorder
from tests.helpers.common import batch, grouped_adamw, make_trainer, step_alike, tiny_bert, trained

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
    step_alike(models[:1], optimizers[:1])
    with recorder:
        step_alike(models[1:], optimizers[1:])
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


@both_techniques
def test_under_fp16_a_missing_step_is_noted_only_at_the_end_and_only_until_one_is_seen(technique: Any) -> None:
    optimizer = grouped_adamw(model := tiny_bert())
    state: Any = SimpleNamespace(optimizers=[optimizer], precision=Precision.AMP_FP16)
    instance = technique()
    instance.engage(state)
    assert instance.verify(state) == {}
    instance.ended = True
    instance.evidence.update(instance.verify(state))
    assert "fp16 skips steps" in instance.evidence["note"]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    instance.evidence.update(instance.verify(state))
    assert instance.evidence["operators_in_one_step"]
    assert "note" not in instance.evidence


def test_fused_refuses_parameters_that_are_not_floating_point() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))], foreach=False)
    with pytest.raises(ValueError, match="complex64"):
        apply_fused_optimizer(optimizer)


@pytest.mark.parametrize("positional", [False, True])
def test_only_the_update_is_recorded_and_not_the_closure(positional: bool) -> None:
    technique, model = FusedOptimizer(), tiny_bert()
    trainer = make_trainer([technique], model=model)
    optimizer = trainer.state.optimizers[0]

    def closure() -> Tensor:
        loss = model(**batch([3, 9, 5])).loss
        loss.backward()
        return loss

    if positional:
        optimizer.step(closure)  # type: ignore[arg-type]
    else:
        optimizer.step(closure=closure)  # type: ignore[arg-type]
    assert set(technique._recorder.counts) <= {"_fused_adamw_", "_foreach_add_", "zeros", "zeros_like", "detach"}
    trainer.close()


class CountingKernel:
    """In place of the Triton kernel, which needs a GPU: AdamW's formulas in PyTorch."""

    def __init__(self) -> None:
        self.tables = self.steps = 0

    def build(self, parameters: Any, averages: Any, squares: Any, steps: Any) -> Any:
        self.tables += 1
        tensors = [list(group) for group in (parameters, averages, squares, steps)]

        def fits(*now: Any) -> bool:
            return [[*map(id, group)] for group in tensors] == [[*map(id, group)] for group in now]

        return SimpleNamespace(tensors=tensors, fits=fits)

    def step(self, tables: Any, gradients: Any, *, lr: Any, betas: Any, eps: float, weight_decay: float) -> None:
        self.steps += 1
        for parameter, average, square, count, gradient in zip(*tables.tensors, gradients, strict=True):
            average.data.lerp_(gradient, 1 - betas[0])  # autograd does not see changes of data
            square.data.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
            corrected = (square / (1 - betas[1] ** float(count))).sqrt() + eps
            parameter.data.mul_(1 - lr * weight_decay)
            parameter.data.sub_(lr / (1 - betas[0] ** float(count)) * average / corrected)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> CountingKernel:
    adamw = pytest.importorskip("composer_speedups.kernels.adamw", reason="Triton comes with torch on Linux only")
    counting = CountingKernel()
    monkeypatch.setattr(adamw, "AdamWTables", counting.build)
    monkeypatch.setattr(adamw, "adamw_step", counting.step)
    return counting


def on_the_cpu(optimizer: torch.optim.Optimizer) -> TritonStep:
    """``apply_fused_optimizer(optimizer, "triton")`` without its requirement of a GPU."""
    apply_fused_optimizer(optimizer)
    step = TritonStep(devices=("cpu",))
    step.install(optimizer)
    return step


@pytest.mark.parametrize("closure", ["none", "keyword", "positional"])
def test_the_triton_step_computes_every_group_and_only_the_update(closure: str, kernel: CountingKernel) -> None:
    models = [tiny_bert(), tiny_bert()]
    optimizers = [grouped_adamw(model) for model in models]
    installed = on_the_cpu(optimizers[1])
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)) for optimizer in optimizers]
    for count in range(3):
        for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):

            def losses(model: Any = model, seed: int = count) -> Tensor:
                assert running_step() is None, "the closure is not part of the update"
                model.zero_grad()
                loss = model(**batch([3, 9, 5], seed=seed)).loss
                loss.backward()
                return loss

            if closure == "none":
                losses()
                optimizer.step()
            elif closure == "keyword":
                optimizer.step(closure=losses)
            else:
                optimizer.step(losses)
            scheduler.step()
        assert running_step() is None
    groups = len(optimizers[1].param_groups)
    assert (installed.updates, installed.left_to_torch) == (3 * groups, 0) == (kernel.steps, 0)
    assert kernel.tables == groups, "tables are kept while tensors are"
    torch.testing.assert_close(dict(models[1].named_parameters()), dict(models[0].named_parameters()))
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    torch.testing.assert_close(states[1], states[0])


@pytest.mark.usefixtures("kernel")
def test_after_the_triton_step_a_backward_pass_through_old_parameters_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    on_the_cpu(optimizer)
    loss = model(torch.ones(2, 4)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert all(moment._version for moment in moments)


def test_updates_that_the_triton_step_does_not_support_run_in_torch(kernel: CountingKernel) -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 6))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    installed = on_the_cpu(optimizer)
    parameter.grad = torch.ones(6, 4).t()
    optimizer.step()
    assert (installed.updates, installed.left_to_torch, kernel.steps) == (0, 1, 0)
    assert not torch.equal(parameter, torch.ones(4, 6))
    optimizer.param_groups[0]["maximize"] = True
    parameter.grad = torch.ones(4, 6)
    optimizer.step()
    assert (installed.updates, installed.left_to_torch) == (0, 2)


def test_another_optimizer_and_another_thread_step_with_torch(kernel: CountingKernel) -> None:
    ours, other = (torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))], lr=0.1, fused=True) for _ in range(2))
    installed = on_the_cpu(ours)
    for optimizer in (ours, other):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(4)
    with ThreadPoolExecutor(1) as threads:

        def closure() -> float:
            threads.submit(other.step).result()
            return 0.0

        ours.register_step_pre_hook(lambda *_: threads.submit(other.step).result())  # while ours is running
        ours.step(closure)
    other.step()
    assert (installed.updates, kernel.steps) == (1, 1)
    assert float(other.state[other.param_groups[0]["params"][0]]["step"]) == 3


def test_after_a_step_that_raised_the_next_one_works(kernel: CountingKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    installed = on_the_cpu(optimizer)
    parameter.grad = torch.ones(4)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_add_", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    other = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))], lr=0.1, fused=True)
    other.param_groups[0]["params"][0].grad = torch.ones(4)
    other.step()
    assert (installed.updates, installed.left_to_torch, kernel.steps) == (0, 0, 0), "another optimizer steps with torch"
    optimizer.step()
    installed.remove()
    assert running_step() is None
    optimizer.step()
    assert installed.updates == 1


def test_the_triton_kernel_is_refused_where_it_cannot_run() -> None:
    model = tiny_bert()
    for optimizer, reason in [
        (torch.optim.AdamW(model.parameters()), "needs parameters on a CUDA GPU, and these are on the cpu"),
        (torch.optim.Adam(model.parameters()), "computes torch.optim.AdamW, not Adam"),
        (torch.optim.AdamW(model.parameters(), amsgrad=True), "does not support amsgrad"),
        (torch.optim.AdamW(model.parameters(), betas=(0.0, 0.999)), "does not support a beta of 0"),
        (torch.optim.AdamW([torch.nn.Parameter(torch.ones(2).half())]), "needs contiguous float32 parameters"),
    ]:
        with pytest.raises(ValueError, match=f"kernel='triton' {reason}"):
            apply_fused_optimizer(optimizer, "triton")
        assert not optimizer.param_groups[0]["fused"], "a refusal changes nothing"
    with pytest.raises(TechniqueError, match=r"kernel: triton needs a CUDA GPU.*; set kernel: torch"):
        make_trainer([FusedOptimizer(kernel="triton")])


@pytest.mark.gpu
def test_on_a_gpu_the_triton_kernel_trains_like_torchs() -> None:
    models = [tiny_bert().cuda(), tiny_bert().cuda()]  # type: ignore[call-arg]
    optimizers = [grouped_adamw(model) for model in models]
    apply_fused_optimizer(optimizers[1], "triton")
    apply_fused_optimizer(optimizers[1], "triton")
    step_alike(models, optimizers)
    installed = triton_step_of(optimizers[1])
    assert installed is not None
    assert (installed.updates, installed.left_to_torch) == (5 * len(optimizers[1].param_groups), 0)
    torch.testing.assert_close(dict(models[1].named_parameters()), dict(models[0].named_parameters()))
    apply_fused_optimizer(optimizers[1], "torch")
    assert triton_step_of(optimizers[1]) is None


def adamw(**settings: Any) -> torch.optim.AdamW:
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    return torch.optim.AdamW([{"params": [parameter]}], **settings)


TENSOR_RATE = r"AdamW refuses foreach=True \(lr as a Tensor is not supported for capturable=False and foreach=True\)"


def test_what_torch_refuses_with_the_flag_is_refused() -> None:
    with pytest.raises(ValueError, match="lr as a Tensor is not supported"):
        adamw(lr=torch.tensor(1e-3), foreach=True)
    optimizer = adamw(lr=torch.tensor(1e-3))
    with pytest.raises(ValueError, match=f"{TENSOR_RATE}; give numbers instead of tensors$"):
        apply_foreach_optimizer(optimizer)
    assert optimizer.param_groups[0]["foreach"] is None, "a refusal changes nothing"
    optimizer.step()
    optimizer = adamw(lr=1e-3)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": torch.tensor(1e-4)})
    with pytest.raises(ValueError, match=TENSOR_RATE):
        apply_foreach_optimizer(optimizer)  # torch checks only the defaults of all groups
    apply_foreach_optimizer(adamw(lr=torch.tensor(1e-3), capturable=True))
    for apply in (apply_foreach_optimizer, apply_fused_optimizer):
        with pytest.raises(ValueError, match=r"AdamW has differentiable=True, which .* does not support; set diff"):
            apply(adamw(lr=1e-3, differentiable=True))


def test_a_tensor_rate_is_refused_by_name_or_works() -> None:
    model = tiny_bert()

    def optimizer() -> torch.optim.AdamW:
        return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))

    with pytest.raises(TechniqueError, match=f"^foreach_optimizer: {TENSOR_RATE}; give numbers .*, or remove it$"):
        make_trainer([ForEachOptimizer()], model=model, optimizer=optimizer())
    technique = ForEachOptimizer(on_unavailable="warn")
    with pytest.warns(UserWarning, match="continuing without foreach_optimizer"):
        trainer = make_trainer([technique], model=model, optimizer=optimizer())
    trainer.fit()
    trainer.close()
    fused = FusedOptimizer()
    trained([fused], model=model, optimizer=optimizer())
    assert fused.engaged is True
