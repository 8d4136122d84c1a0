"""Every optimizer technique in Composer's Trainer: schedules, clipping, resuming, evidence and refusals."""

from __future__ import annotations

import itertools
from collections import Counter
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
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, SequentialLR

from composer_speedups import KahanOptimizer, apply
from composer_speedups.algorithms.optimizers import TECHNIQUES
from composer_speedups.callbacks.precision import precision_in_force
from composer_speedups.core.engaging import check
from composer_speedups.core.errors import Refusal
from composer_speedups.core.registry import technique_class
from composer_speedups.core.run import FirstBatch, Run
from tests.algorithms.optimizers.cases import FusedAdam, technique, use_stand_in
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
every_swap = pytest.mark.parametrize("case", [c for c in every_case if c.values[0].name not in FLAGS])

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
        shapes = [[[p.shape for p in group["params"]] for group in each] for each in (groups, plain_groups)]
        assert shapes[0] == shapes[1]
    assert [approx(r) for r in expected.rates] == seen.rates
    shape = [1.0, 1.0, 0.0, 0.0] if kind == "composer" else SHAPE
    assert [r[0] for r in seen.rates] == pytest.approx([2e-3 * factor for factor in shape])
    if "weights" in case.entry.same:
        assert_near(seen.weights[-1], expected.weights[-1], case.entry.dtype, "weights")
    assert max((seen.weights[1][n] - w).abs().max() for n, w in seen.weights[0].items()) > 1e-4
    low = case.entry.weight_dtype != torch.float32  # a pending Kahan compensation may change the last bit
    tolerance = {"rtol": 2**-7, "atol": 1e-6} if low else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(seen.weights[3], seen.weights[1], **tolerance)
    resumed, rest = run(case.build_all(), kind, load_path=str(tmp_path / "ba1.pt"))
    assert rest.rates == seen.rates[1:]
    torch.testing.assert_close(final_weights(resumed), final_weights(trainer), rtol=0, atol=0)


@every_optimizer
def test_gradients_are_clipped_before_the_optimizer_step(case: Case) -> None:
    clipped, free = (run([*clipping, *case.build_all()])[1].weights[-1] for clipping in ([CLIPPING], []))
    if "weights" in case.entry.same:
        assert_near(clipped, plain_run(clipped=True)[1].weights[-1], case.entry.dtype, "weights")
    assert any((free[n] != w).any() for n, w in clipped.items()), "clipping must change the weights"


@every_optimizer
def test_a_warm_up_from_zero_is_not_an_error_and_the_first_step_that_moves_is_observed(case: Case) -> None:
    built = case.build_all()
    run(built, schedulers=LinearWithWarmupScheduler("2ba"))
    moved, watched = map(int, built[-1].evidence["parameters_moved"].split(" of "))
    assert 0 < moved <= watched


@every_swap
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")  # torch's own check
@pytest.mark.parametrize("back", ["old", "another"])
def test_replacing_the_swapped_optimizer_is_an_error(case: Case, back: str) -> None:
    optimizer = grouped_adamw(model := tiny_bert())
    trainer = make_trainer(case.build_all(), model=model, optimizer=optimizer)
    trainer.state.optimizers = optimizer if back == "old" else grouped_adamw(model)
    assert_not_engaged(trainer, "took no step; leave state.optimizers as it is after INIT")


@every_swap
def test_an_optimizer_that_is_not_adamw_is_refused(case: Case) -> None:
    model = tiny_bert()
    with pytest.raises(Refusal, match=rf"{case.name}: torch\.optim\.sgd\.SGD is not AdamW.*; use t.*, or re"):
        make_trainer(case.build_all(), model=model, optimizer=SGD(model.parameters(), lr=1e-3))
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "the model was changed before the refusal"


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


@pytest.mark.parametrize("pair", itertools.combinations(TECHNIQUES, 2), ids="+".join)
def test_two_optimizer_techniques_conflict_by_name(pair: tuple[str, str]) -> None:
    techniques = [technique_class(n)(**(ENTRIES[n].variants or ENTRIES[n].gpu_variants)[0]) for n in pair]
    with pytest.raises(Refusal, match=r"each sets the optimizer; remove .* or ") as error:
        check(techniques, Run(CPU))
    assert all(name in str(error.value) for name in pair)


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


def clear_a_state(trainer: Trainer) -> None:
    optimizer = trainer.state.optimizers[0]
    optimizer.register_step_post_hook(lambda *_: next(iter(optimizer.state.values())).clear())


def freeze_norm(trainer: Trainer) -> None:
    trainer.state.model.model.bert.embeddings.word_embeddings.norm.requires_grad_(False)


LOST: dict[str, tuple[str, dict[str, Any], Any, str]] = {
    "foreach": ("foreach_optimizer", {}, partial(set_groups, foreach=False), r"ran no _foreach_add\* operator"),
    "fused": ("fused_optimizer", {}, partial(set_groups, fused=False), r"ran no _fused_\* operator"),
    "adafactor": (
        "adafactor",
        {},
        lambda trainer: setattr(trainer.state.optimizers[0], "_get_options", lambda *_: (False, False)),
        "no matrix has factored second moments",
    ),
    "kahan": ("kahan_optimizer", {}, partial(set_groups, kahan_sum=False), "no step kept a compensation"),
    "weights": ("kahan_optimizer", {}, lambda trainer: trainer.state.model.float(), "the weights are float32"),
    "shard": ("sharded_optimizer", {}, clear_a_state, "the ranks hold 40 states of 41 parameters"),
    "embedding": (
        "bnb_optimizer",
        {"min_8bit_size": 1024, "stable_embedding": True},
        freeze_norm,
        "no stable embedding was trained",
    ),
}


@pytest.mark.parametrize("lost", LOST)
def test_a_lost_effect_is_detected(lost: str) -> None:
    name, settings, sabotage, said = LOST[lost]
    if (package := ENTRIES[name].package) is not None:
        pytest.importorskip(package)
    trainer = make_trainer([technique(name, **settings)])
    sabotage(trainer)
    assert_not_engaged(trainer, said)


class StillAdamW(AdamW):
    """Its steps move no parameter."""

    def __init__(self, groups: Any, **_: Any) -> None:
        super().__init__(groups)

    def step(self, closure: Any = None) -> Any:
        return None if closure is None else closure()


class OnTheCPU:
    """ApexOptimizer without its requirement of a GPU, for the stand-in."""

    def __new__(cls) -> Any:
        built = technique("apex_optimizer")
        built.needs = lambda run: []
        return built


def test_apex_trains_like_adamw_and_what_it_does_not_do_is_detected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_stand_in(monkeypatch)
    built = OnTheCPU()
    trainer, _ = run([built], save_folder=str(tmp_path), **SAVING)
    assert_near(final_weights(trainer), plain_run()[1].weights[-1])
    assert built.evidence["apex_steps"] == 1
    resumed, _ = run([OnTheCPU()], load_path=str(tmp_path / "ba2.pt"))
    torch.testing.assert_close(final_weights(resumed), final_weights(trainer), rtol=0, atol=0)

    class Impostor(AdamW):
        def __init__(self, groups: Any, **_: Any) -> None:
            super().__init__(groups)

    class Unbuilt(FusedAdam):
        def __init__(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("apex.optimizers.FusedAdam requires cuda extensions")

    for fused_adam, error, said in (
        (Impostor, Refusal, "FusedAdam counted no step"),
        (StillAdamW, Refusal, "a step of Apex FusedAdam moved no parameter"),
        (Unbuilt, Refusal, r"requires cuda extensions\); build it from"),
    ):
        use_stand_in(monkeypatch, fused_adam)
        with pytest.raises(error, match=said):
            run([OnTheCPU()])


def test_a_step_without_the_flags_operators_is_detected() -> None:
    built, run = technique("foreach_optimizer"), Run(CPU, model=tiny_bert())
    run.optimizers = [grouped_adamw(run.model)]
    built.engage(run)
    clipping = FirstBatch(Counter({"_foreach_norm": 1, "_foreach_mul_": 1, "addcdiv_": 40}), steps=1, moved=40)
    with pytest.raises(Refusal, match=r"ran no _foreach_add\* operator"):
        built.proof(run, clipping)


class StepsAtRateZero(Callback):
    """Takes a step at learning rate 0, as torch's distributed state dicts do before loading or saving."""

    def after_load(self, state: State, logger: Logger) -> None:
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


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")  # torch's own check
def test_a_step_before_training_proves_nothing() -> None:
    trainer = make_trainer([technique("fused_optimizer")], callbacks=[StepsAtRateZero()])
    trainer.state.optimizers = grouped_adamw(trainer.state.model)
    assert_not_engaged(trainer, "took no step")


def test_a_second_fit_keeps_the_evidence() -> None:
    built = technique("fused_optimizer")
    trainer = make_trainer([built], max_duration="2ba")
    trainer.fit()
    trainer.fit(duration="2ba")
    trainer.close()
    assert built.evidence["operators_in_one_step"]


# What is refused before training


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
        optimizer = AdamW([{"params": list(model.parameters())}], lr=1e-3)
    said = "there are 0 optimizers" if optimizer is None else "the optimizer has no trainable parameter"
    built = case.build()
    for action in ("stop", "warn"):
        built.on_unavailable = action
        context: Any = (
            pytest.raises(Refusal, match=rf"^{case.name}: {said}; .* remove the technique$")
            if action == "stop"
            else pytest.warns(UserWarning, match=f"continuing without {case.name}: {said}")
        )
        with context:
            Trainer(model=model, optimizers=optimizer, algorithms=[built], device="cpu", progress_bar=False).close()


def test_several_optimizers_and_none_are_refused() -> None:
    run = Run(CPU, model=tiny_bert(), optimizers=[grouped_adamw(tiny_bert()), grouped_adamw(tiny_bert())])
    with pytest.raises(Refusal, match="there are 2 optimizers; give the Trainer one"):
        technique("adafactor").engage(run)
    with pytest.raises(Refusal, match="adafactor: it needs the loop's optimizer; pass it to apply"):
        apply(tiny_bert(), [technique("adafactor")])


@pytest.mark.parametrize(
    ("build", "context", "capability", "said"),
    [
        (lambda: technique("bnb_optimizer", paged=True), Run(CPU), None, "paged optimizer state needs a CUDA GPU"),
        (lambda: technique("offloaded_optimizer"), Run(CPU), None, "offloading the optimizer needs a CUDA GPU"),
        (
            lambda: KahanOptimizer(),
            Run(CPU, "amp_bf16"),
            None,
            r"autocast \(amp_bf16\); set the Trainer's precision",
        ),
        (lambda: KahanOptimizer(), Run(GPU), (7, 5), r"bfloat16 needs .* 8\.0 or newer, and this GPU is 7\.5"),
        (lambda: technique("lowbit_optimizer", bits="fp8"), Run(GPU), (8, 0), r"fp8 state needs .* 8\.9 or newer"),
        (lambda: technique("adafactor"), Run(CPU, sharded=True), None, "cannot replace the optimizer of sharded"),
        (lambda: technique("sharded_optimizer"), Run(CPU, sharded=True), None, "FSDP already shards the optimizer"),
    ],
)
def test_what_cannot_engage_is_refused_by_name(
    build: Any, context: Run, capability: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "this GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    built = build()
    with pytest.raises(Refusal, match=rf"^{built.name}: .*{said}"):
        check([built], context)
    if capability is not None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        check([built], context)


def test_apex_is_nvidias_and_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    said = r"apex_optimizer: NVIDIA Apex is not installed.*; build it from github\.com/NVIDIA/apex.*fused_optimizer"
    use_stand_in(monkeypatch)
    with pytest.raises(Refusal, match=r"Apex's FusedAdam needs a CUDA GPU, and this run is on the cpu"):
        check([technique("apex_optimizer")], Run(CPU))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # in the index's package
    with pytest.raises(Refusal, match=said):
        check([technique("apex_optimizer")], Run(CPU))


def test_missing_packages_are_refused_with_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, extra in (("bnb_optimizer", "bnb"), ("kahan_optimizer", "optimi"), ("lowbit_optimizer", "torchao")):
        with pytest.raises(Refusal, match=rf"^{name}: .* is not installed; pip install '\.\[{extra}\]'"):
            check([technique(name)], Run(CPU))


def test_kahans_evidence_names_its_precision_and_whether_weight_decay_rounds_away() -> None:
    pytest.importorskip("optimi")
    for decay, said in ((0.01, "rounds away"), (50.0, "applied"), (0.0, "none")):
        model, built = tiny_bert(), technique("kahan_optimizer")
        trainer = trained([built], model=model, optimizer=AdamW(model.parameters(), 1e-3, weight_decay=decay))
        assert built.evidence["weight_decay"] == said
    assert built.evidence["state_dtypes"] == {k: ["bfloat16"] for k in ("exp_avg", "exp_avg_sq", "kahan_comp")}
    assert precision_in_force(trainer.state) == "bf16", "throughput/mfu uses its peak rate"


def test_adafactors_state_is_smaller_than_adamws() -> None:
    trained([built := technique("adafactor")])
    matrices = sum(p.ndim > 1 for p in tiny_bert().parameters())
    assert built.evidence["factored"] == f"{matrices} of {matrices}"
    assert built.evidence["adamw_state_bytes"] == 8 * sum(p.numel() for p in tiny_bert().parameters())
    assert built.evidence["state_bytes"] < built.evidence["adamw_state_bytes"] / 8
