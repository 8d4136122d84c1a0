"""Every optimizer technique in Composer's Trainer: schedules, clipping, resuming, evidence and refusals."""

from __future__ import annotations

import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from composer import Trainer
from composer.algorithms import GradientClipping
from composer.core import Callback, Event, State
from composer.loggers import Logger
from composer.optim import LinearWithWarmupScheduler
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR, SequentialLR

from composer_speedups import apply
from composer_speedups.algorithms.optimizers.optimizers import TECHNIQUES
from composer_speedups.callbacks.precision import precision_in_force
from composer_speedups.core.engaging import check
from composer_speedups.core.errors import Refusal
from composer_speedups.core.registry import technique_class
from composer_speedups.core.run import Run
from tests.algorithms.optimizers.cases import technique, use_stand_in
from tests.helpers.common import (
    SAVING,
    assert_not_engaged,
    final_weights,
    grouped_adamw,
    make_trainer,
    plain_batches,
    tiny_bert,
    trained,
)
from tests.helpers.settings import ENTRIES, Case, cases
from tests.reference.tolerance import assert_near

FLAGS = ("foreach_optimizer", "fused_optimizer")
every_case = [c for c in cases() if c.values[0].name in TECHNIQUES]
every_optimizer = pytest.mark.parametrize("case", every_case)

approx = partial(pytest.approx, rel=1e-6)  # torchao keeps learning rates in float32

CLIPPING = GradientClipping("norm", clipping_threshold=1e-3)
SHAPE = [1.0, 0.5, 0.0, 0.0]  # learning rate factors of torch's schedulers in the four batches

CPU, GPU = torch.device("cpu"), torch.device("cuda")


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
def plain_run(kind: str = "composer") -> tuple[Any, Watch]:
    """Train with the untouched optimizer. The result is cached: do not modify it."""
    return run([], kind)


def run(algorithms: list[Any], kind: str = "composer", **kwargs: Any) -> tuple[Any, Watch]:
    model, watch = tiny_bert(), Watch()
    optimizer = grouped_adamw(model)
    settings = schedule(kind, optimizer) | kwargs
    return trained([CLIPPING, *algorithms], model=model, optimizer=optimizer, callbacks=[watch], **settings), watch


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
        shapes = [[[p.shape for p in group["params"]] for group in each] for each in (groups, plain_groups)]
        assert shapes[0] == shapes[1]
    assert [approx(r) for r in expected.rates] == seen.rates
    shape = [1.0, 1.0, 0.0, 0.0] if kind == "composer" else SHAPE
    assert [r[0] for r in seen.rates] == pytest.approx([2e-3 * factor for factor in shape])
    if "weights" in case.entry.same:
        assert_near(seen.weights[-1], expected.weights[-1], case.entry.dtype, "weights")
    assert max((seen.weights[1][n] - w).abs().max() for n, w in seen.weights[0].items()) > 5e-5
    low = case.entry.weight_dtype != torch.float32  # a pending Kahan compensation may change the last bit
    tolerance = {"rtol": 2**-7, "atol": 1e-6} if low else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(seen.weights[3], seen.weights[1], **tolerance)
    resumed, rest = run(case.build_all(), kind, load_path=str(tmp_path / "ba1.pt"))
    assert rest.rates == seen.rates[1:]
    torch.testing.assert_close(final_weights(resumed), final_weights(trainer), rtol=0, atol=0)


@every_optimizer
def test_a_warm_up_from_zero_is_not_an_error_and_the_first_step_that_moves_is_observed(case: Case) -> None:
    built = case.build_all()
    run(built, schedulers=LinearWithWarmupScheduler("2ba"))
    moved, watched = map(int, built[-1].evidence["parameters_moved"].split(" of "))
    assert 0 < moved <= watched
    built = case.build_all()
    run(built, schedulers=LinearWithWarmupScheduler("99ba"), max_duration="1ba")
    assert built[-1].engaged is True
    assert "parameters_moved" not in built[-1].evidence, "the only step has a rate of 0"


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")  # torch's own check
def test_replacing_the_swapped_optimizer_is_an_error() -> None:
    optimizer = grouped_adamw(model := tiny_bert())
    trainer = make_trainer([technique("adafactor")], model=model, optimizer=optimizer)
    trainer.state.optimizers = optimizer
    assert_not_engaged(trainer, "took no step; leave state.optimizers as it is after INIT")


@pytest.mark.parametrize("name", FLAGS)
def test_the_flags_of_a_loaded_checkpoint_are_overridden(name: str, tmp_path: Path) -> None:
    trained([technique(name)], save_folder=str(tmp_path), **SAVING)
    checkpoint = torch.load(tmp_path / "ba2.pt", weights_only=False)
    (state,) = checkpoint["state"]["optimizers"].values()
    for group in state["param_groups"]:
        group.update(foreach=False, fused=False)
    torch.save(checkpoint, tmp_path / "other.pt")
    again = technique(name)
    trained([again], load_path=str(tmp_path / "other.pt"))
    assert again.evidence["operators_in_one_step"]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in cases(gpu=True) if c.values[0].name in TECHNIQUES])
@pytest.mark.parametrize("precision", ["amp_bf16", "amp_fp16"])
def test_mixed_precision_trains_and_resumes_exactly(case: Case, precision: str, tmp_path: Path) -> None:
    if "mixed_precision" in technique_class(case.name).not_with:
        pytest.skip("conflicts with mixed precision")

    def train(**kwargs: Any) -> Any:
        return trained(case.build_all(), gpu=True, precision=precision, batches=plain_batches(24), **kwargs)

    whole = train(save_folder=str(tmp_path), **{**SAVING, "save_interval": "20ba"})
    (built,) = [a for a in whole.state.algorithms if a.name == case.name]
    assert "parameters_moved" in built.evidence, "fp16's loss scale must be low enough for steps by now"
    resumed = train(load_path=str(tmp_path / "ba20.pt"))
    torch.testing.assert_close(final_weights(resumed), final_weights(whole), rtol=0, atol=0)


# A step that does not do what it should


def set_groups(trainer: Trainer, **settings: Any) -> None:
    for group in trainer.state.optimizers[0].param_groups:
        group.update(settings)


@pytest.mark.parametrize(
    ("name", "sabotage", "said"),
    [
        ("foreach_optimizer", partial(set_groups, foreach=False), r"ran no _foreach_add\* operator"),
        ("fused_optimizer", partial(set_groups, fused=False), r"ran no _fused_\* operator"),
        ("kahan_optimizer", lambda trainer: trainer.state.model.float(), "the optimizer's state has no kahan_comp"),
    ],
)
def test_a_lost_effect_is_detected(name: str, sabotage: Any, said: str) -> None:
    if (package := ENTRIES[name].package) is not None:
        pytest.importorskip(package)
    trainer = make_trainer([CLIPPING, technique(name)])  # clipping has _foreach_* operators of its own
    sabotage(trainer)
    assert_not_engaged(trainer, said)


class StillAdamW(AdamW):
    """Its steps move no parameter."""

    def __init__(self, groups: Any, **_: Any) -> None:
        super().__init__(groups)

    def step(self, closure: Any = None) -> Any:
        return None if closure is None else closure()


def test_an_optimizer_that_moves_nothing_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_in(monkeypatch, StillAdamW)
    built = technique("apex_optimizer")
    built.needs = lambda run: []  # it needs a GPU
    with pytest.raises(Refusal, match="a step moved no parameter"):
        run([built])


# What is refused before training


def test_several_optimizers_and_none_are_refused() -> None:
    two = [grouped_adamw(tiny_bert()), grouped_adamw(tiny_bert())]
    with pytest.raises(Refusal, match="adafactor: there are 2 optimizers; pass one to the Trainer"):
        check([technique("adafactor")], Run(CPU, model=tiny_bert(), optimizers=two))
    with pytest.raises(Refusal, match="adafactor: there are 0 optimizers"):
        apply(tiny_bert(), [technique("adafactor")])


@pytest.mark.parametrize(
    ("build", "context", "capability", "said"),
    [
        (lambda: technique("bnb_optimizer", paged=True), Run(CPU), None, "paged optimizer state needs a CUDA GPU"),
        (lambda: technique("offloaded_optimizer"), Run(CPU), None, "offloading the optimizer needs a CUDA GPU"),
        (lambda: technique("apex_optimizer"), Run(CPU), None, "Apex's FusedAdam needs a CUDA GPU"),
        (
            lambda: technique("kahan_optimizer"),
            Run(CPU, "amp_bf16"),
            None,
            r"autocast \(amp_bf16\); set the Trainer's precision",
        ),
        (lambda: technique("kahan_optimizer"), Run(GPU), (7, 5), r"bfloat16 needs .* 8\.0 or newer, and this GPU is 7"),
        (lambda: technique("lowbit_optimizer", bits="fp8"), Run(GPU), (8, 0), r"fp8 state needs .* 8\.9 or newer"),
        (lambda: technique("adafactor"), Run(CPU, sharded=True), None, "cannot replace the optimizer of sharded"),
        (lambda: technique("sharded_optimizer"), Run(CPU, sharded=True), None, "FSDP already shards the optimizer"),
    ],
)
def test_what_cannot_engage_is_refused_by_name(
    build: Any, context: Run, capability: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_stand_in(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "this GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    built = build()
    with pytest.raises(Refusal, match=rf"^{built.name}: .*{said}"):
        check([built], context)
    if capability is not None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        check([built], context)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("bnb_optimizer", r"pip install '\.\[bnb\]'"),
        ("kahan_optimizer", r"pip install '\.\[optimi\]'"),
        ("lowbit_optimizer", r"pip install '\.\[torchao\]'"),
        ("apex_optimizer", r"build it from github\.com/NVIDIA/apex"),
    ],
)
def test_missing_packages_are_refused_with_their_extra(name: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Refusal, match=rf"^{name}: .* is not installed.*; {fix}"):
        check([technique(name)], Run(CPU))


def test_kahans_precision_is_that_of_its_weights() -> None:
    pytest.importorskip("optimi")
    trainer = trained([built := technique("kahan_optimizer")])
    assert built.evidence["state_dtypes"] == {k: ["bfloat16"] for k in ("exp_avg", "exp_avg_sq", "kahan_comp")}
    assert precision_in_force(trainer.state) == "bf16", "throughput/mfu uses its peak rate"


def test_the_check_of_lowbit_optimizer_lets_a_checkpoint_with_its_state_be_loaded() -> None:
    """In a process that has not imported torchao, as one that resumes."""
    code = """
import sys, types, torch
from composer_speedups import LowBitOptimizer
run = types.SimpleNamespace(device=torch.device("cpu"), model=None, optimizers=[], precision="fp32", techniques={})
assert "torchao.optim" not in sys.modules
assert not list(LowBitOptimizer().needs(run))
assert "OptimState8bit" in {getattr(kind, "__name__", "") for kind in torch.serialization.get_safe_globals()}
"""
    subprocess.run([sys.executable, "-c", code], check=True)
