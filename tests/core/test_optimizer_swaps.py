"""Every optimizer technique preserves parameter groups and schedules, and refuses other optimizers and their states."""

from __future__ import annotations

import inspect
import itertools
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from composer import Trainer
from composer.algorithms import GradientClipping
from composer.core import Callback, Event, State
from composer.loggers import Logger
from composer.models import ComposerModel
from composer.optim import LinearWithWarmupScheduler
from torch.optim.lr_scheduler import LambdaLR, SequentialLR

import composer_speedups
from composer_speedups import MixedPrecision
from composer_speedups.core.errors import NotEngagedError, TechniqueError
from composer_speedups.core.optimizer_technique import OptimizerSwapTechnique
from composer_speedups.core.registry import technique_class
from composer_speedups.core.technique import Stage, conflicts_between, refuse_conflicts
from tests.helpers.common import SAVING, final_weights, grouped_adamw, make_trainer, plain_batches, tiny_bert, trained
from tests.helpers.settings import ENTRIES, Case, cases
from tests.reference.tolerance import assert_near

OPTIMIZERS = sorted(n for n in ENTRIES if technique_class(n).stage == Stage.OPTIMIZER)


def _is_swap(case: Any) -> bool:
    return issubclass(technique_class(case.values[0].name), OptimizerSwapTechnique)


of_optimizers = [c for c in cases() if c.values[0].name in OPTIMIZERS]
of_swaps = [c for c in of_optimizers if _is_swap(c)]
swaps_on_gpu = [c for c in cases(gpu=True) if _is_swap(c)]
every_optimizer = pytest.mark.parametrize("case", of_optimizers)
every_swap = pytest.mark.parametrize("case", of_swaps)

approx = partial(pytest.approx, rel=1e-6)  # torchao keeps learning rates in float32

CLIPPING = GradientClipping("norm", clipping_threshold=1e-3)
SHAPE = [1.0, 0.5, 0.0, 0.0]  # learning rate factors of torch's schedulers in the four batches


class Watch(Callback):
    """Records every batch's learning rates, and the weights after it."""

    def __init__(self) -> None:
        self.rates: list[list[float]] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.BATCH_START:
            self.rates.append([float(g["lr"]) for g in state.optimizers[0].param_groups])
        if event == Event.BATCH_END:
            self.weights.append({n: p.detach().clone() for n, p in state.model.named_parameters()})


def schedule(kind: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return Trainer arguments for a scheduler of this kind; the learning rate is 0 from the third batch on."""
    if kind == "composer":
        # Composer steps schedulers before it counts the batch, so the first factor applies to two batches
        return {"schedulers": lambda state: float(int(state.timestamp.batch) == 0)}
    scheduler: Any = LambdaLR(optimizer, lambda k: SHAPE[min(3, k)])
    if kind == "sequential":
        scheduler = SequentialLR(optimizer, [scheduler, LambdaLR(optimizer, lambda k: 0.0)], [2])
    return {"schedulers": scheduler, "step_schedulers_every_batch": True}


@cache
def plain_run(kind: str = "composer", *, clipped: bool = False) -> tuple[Any, Watch]:
    """Train with the untouched optimizer. The result is cached: do not modify it."""
    return run([CLIPPING] if clipped else [], kind)


def run(algorithms: list[Any], kind: str = "composer", **kwargs: Any) -> tuple[Any, Watch]:
    model, watch = tiny_bert(), Watch()
    optimizer = grouped_adamw(model)
    settings = schedule(kind, optimizer) | kwargs
    return trained(algorithms, model=model, optimizer=optimizer, callbacks=[watch], **settings), watch


@every_optimizer
@pytest.mark.parametrize("kind", ["composer", "torch", "sequential"])
def test_parameter_groups_and_schedules_are_preserved_and_resumed(case: Case, kind: str, tmp_path: Path) -> None:
    plain, expected = plain_run(kind)
    saving = {**SAVING, "save_interval": "1ba"}
    trainer, seen = run(case.build_all(), kind, save_folder=str(tmp_path), **saving)
    groups, plain_groups = (t.state.optimizers[0].param_groups for t in (trainer, plain))
    for key in ("lr", "initial_lr", "weight_decay"):
        assert [float(g[key]) for g in groups] == approx([g[key] for g in plain_groups]), key
    assert groups[1]["name"] == "my own key"
    if case.entry.stock_checkpoint:
        assert [[p.shape for p in g["params"]] for g in groups] == [
            [p.shape for p in g["params"]] for g in plain_groups
        ]
    assert [approx(r) for r in expected.rates] == seen.rates
    shape = [1.0, 1.0, 0.0, 0.0] if kind == "composer" else SHAPE
    assert [r[0] for r in seen.rates] == pytest.approx([2e-3 * factor for factor in shape])
    if "weights" in case.entry.same:
        assert_near(seen.weights[-1], expected.weights[-1], case.entry.dtype, "weights")
    _check_effect(seen, case)
    resumed, rest = run(case.build_all(), kind, load_path=str(tmp_path / "ba1.pt"))
    assert rest.rates == seen.rates[1:]
    torch.testing.assert_close(final_weights(resumed), final_weights(trainer), rtol=0, atol=0)


def _check_effect(seen: Watch, case: Case) -> None:
    """Check that updates use the learning rates: weights change at first, and no longer at a learning rate of 0."""
    moved = [(seen.weights[1][n] - w).abs().max() for n, w in seen.weights[0].items()]
    assert max(moved) > 1e-4
    low = case.entry.weight_dtype != torch.float32  # a pending Kahan compensation may change the last bit
    tolerance = {"rtol": 2**-7, "atol": 1e-6} if low else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(seen.weights[3], seen.weights[1], **tolerance)


@every_optimizer
def test_gradients_are_clipped_before_the_optimizer_step(case: Case) -> None:
    clipped, free = (run([*clipping, *case.build_all()])[1].weights[-1] for clipping in ([CLIPPING], []))
    if "weights" in case.entry.same:
        assert_near(clipped, plain_run(clipped=True)[1].weights[-1], case.entry.dtype, "weights")
    assert any((free[n] != w).any() for n, w in clipped.items()), "clipping must change the weights"


@every_swap
def test_a_warm_up_from_zero_is_not_an_error(case: Case) -> None:
    technique = case.build_all()[-1]
    run([*case.build_all()[:-1], technique], schedulers=LinearWithWarmupScheduler("2ba"))
    assert technique.evidence["optimizer_steps"] == 4
    moved, watched = map(int, technique.evidence["parameters_moved"].split(" of "))
    assert 0 < moved <= watched


@every_swap
def test_an_optimizer_that_is_not_adamw_is_refused(case: Case) -> None:
    model = tiny_bert()
    with pytest.raises(TechniqueError, match=rf"{case.name}: torch\.optim\.sgd\.SGD is not AdamW.*; use torch"):
        make_trainer(case.build_all(), model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "the model was changed before the refusal"


@every_swap
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")  # torch's own check
@pytest.mark.parametrize("back", ["old", "another"])
def test_replacing_the_swapped_optimizer_is_an_error(case: Case, back: str) -> None:
    optimizer = grouped_adamw(model := tiny_bert())
    trainer = make_trainer(case.build_all(), model=model, optimizer=optimizer)
    trainer.state.optimizers = optimizer if back == "old" else grouped_adamw(model)
    message = "replaced optimizer is still stepping" if back == "old" else "took no step"
    with pytest.raises(NotEngagedError, match=message):
        trainer.fit()
    trainer.close()


@every_swap
def test_the_state_of_another_optimizer_is_refused(case: Case, tmp_path: Path) -> None:
    """The checkpoint's class name and techniques match, so only the state itself shows that it is AdamW's."""
    if not case.entry.stock_checkpoint:
        pytest.skip("torch itself refuses a state that lacks parameters")
    if case.name == "sharded_optimizer":
        pytest.skip("its state is that of AdamW, so it loads this one")
    trained(case.build_all(), batches=plain_batches(2), save_folder=str(tmp_path), **SAVING)
    checkpoint = torch.load(tmp_path / "ba2.pt", weights_only=False)
    (name,) = checkpoint["state"]["optimizers"]
    (foreign,) = plain_run()[0].state.state_dict()["optimizers"].values()
    checkpoint["state"]["optimizers"] = {name: foreign}
    torch.save(checkpoint, tmp_path / "foreign.pt")
    with pytest.raises(ValueError, match=r"loaded state belongs to another optimizer.*; load a state") as error:
        make_trainer(case.build_all(), load_path=str(tmp_path / "foreign.pt"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("pair", itertools.combinations(OPTIMIZERS, 2), ids="+".join)
def test_two_optimizer_techniques_conflict_by_name(pair: tuple[str, str]) -> None:
    techniques = [technique_class(n)(**(ENTRIES[n].variants or ENTRIES[n].gpu_variants)[0]) for n in pair]
    with pytest.raises(TechniqueError, match=r"both set the optimizer implementation; remove .* or ") as error:
        refuse_conflicts(techniques)
    assert all(name in str(error.value) for name in pair)


@pytest.mark.gpu
@pytest.mark.parametrize("case", swaps_on_gpu)
@pytest.mark.parametrize("precision", ["amp_bf16", "amp_fp16"])
def test_mixed_precision_trains_and_resumes_exactly(case: Case, precision: str, tmp_path: Path) -> None:
    if any(conflicts_between(technique_class(case.name), MixedPrecision)):
        pytest.skip("conflicts with mixed precision")

    def train(**kwargs: Any) -> Any:
        return trained(case.build_all(), gpu=True, precision=precision, batches=plain_batches(24), **kwargs)

    whole = train(save_folder=str(tmp_path), **{**SAVING, "save_interval": "20ba"})
    (technique,) = [a for a in whole.state.algorithms if a.name == case.name]
    assert technique.evidence["optimizer_steps"] > 0, "fp16's loss scale must be low enough for steps by now"
    resumed = train(load_path=str(tmp_path / "ba20.pt"))
    torch.testing.assert_close(final_weights(resumed), final_weights(whole), rtol=0, atol=0)


class StepsAtRateZero(Callback):
    """Takes a step at learning rate 0, as torch's distributed state dicts do before loading or saving."""

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.AFTER_LOAD:
            (optimizer,) = state.optimizers
            rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            for parameter in state.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate


def test_steps_before_loading_are_not_counted_and_a_second_fit_continues_counting() -> None:
    technique = technique_class("kahan_optimizer")()
    trainer = make_trainer([technique], callbacks=[StepsAtRateZero()], max_duration="2ba")
    trainer.fit()
    assert technique.evidence["optimizer_steps"] == 2
    trainer.fit(duration="2ba")
    trainer.close()
    assert technique.evidence["optimizer_steps"] == 4


class Fixed(ComposerModel):
    """A model that trains nothing: without parameters, or with frozen ones."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2) if frozen else torch.nn.Identity()
        self.requires_grad_(False)

    def forward(self, batch: Any) -> torch.Tensor:
        return batch["input_ids"].float()

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        return torch.zeros((), requires_grad=True)


@every_optimizer
@pytest.mark.filterwarnings("ignore:No optimizer was specified:UserWarning")  # Composer's
@pytest.mark.parametrize("what", ["no parameter", "an empty group", "frozen parameters"])
def test_a_model_without_trainable_parameters_is_refused_by_name(case: Case, what: str) -> None:
    model = Fixed(frozen=what == "frozen parameters")
    optimizer: Any = None  # Composer then builds none
    if what != "no parameter":
        optimizer = torch.optim.AdamW([{"params": list(model.parameters())}], lr=1e-3)
    said = "there are 0 optimizers" if optimizer is None else "the optimizer has no trainable parameter"

    def build(technique: Any) -> Trainer:
        return Trainer(model=model, optimizers=optimizer, algorithms=[technique], device="cpu", progress_bar=False)

    with pytest.raises(TechniqueError, match=rf"^{case.name}: {said}; .* remove the technique$"):
        build(case.build())
    technique = case.build()
    technique.on_unavailable = "warn"
    with pytest.warns(UserWarning, match=f"continuing without {case.name}: {said}"):
        build(technique).close()
    assert "applied" not in technique.evidence


@every_optimizer
def test_a_function_accepts_groups_without_parameters(case: Case) -> None:
    optimizer = torch.optim.AdamW([{"params": []}, {"params": [torch.nn.Parameter(torch.ones(64, 64))]}], lr=1e-3)
    function: Any = getattr(composer_speedups, f"apply_{case.name}")
    settings = {k: v for k, v in case.arguments if k in inspect.signature(function).parameters}
    settings.pop("stable_embedding", None)  # needs an embedding
    given: Any = [torch.nn.Identity()] if "model" in inspect.signature(function).parameters else []
    changed = function(*given, optimizer, **settings)
    new = optimizer if isinstance(changed, dict) else changed
    (parameter,) = new.param_groups[1]["params"]
    parameter.grad = torch.ones_like(parameter)
    new.step()
    assert [len(group["params"]) for group in new.param_groups] == [0, 1]
