"""Combinations of techniques: their order does not matter, and every pair trains or is refused by name."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from composer.algorithms import GradientClipping
from composer.core import Event

from composer_speedups import FastLayerNorm, ForEachOptimizer, FusedOptimizer, MixedPrecision, SDPAAttention, TF32Matmul
from composer_speedups.core.errors import NotEngagedError, TechniqueError
from composer_speedups.core.registry import technique_class
from composer_speedups.core.requirements import Context
from composer_speedups.core.technique import (
    Stage,
    Technique,
    conflicts_between,
    refuse_conflicts,
    screen,
    sort_techniques,
    techniques_of,
)
from tests.helpers.common import final_weights, make_trainer, plain_batches, tiny_bert, trained
from tests.helpers.exhaustive import others_exhaustive
from tests.helpers.settings import ENTRIES

CPU = Context(torch.device("cpu"))


def build(name: str) -> Technique:
    entry = ENTRIES[name]
    return technique_class(name)(**(entry.variants or entry.gpu_variants)[0])


def build_pair(pair: tuple[str, str], *, gpu: bool = False) -> list[Technique]:
    """Build both techniques and those that they require."""
    techniques: dict[str, Technique] = {}
    for name in pair:
        entry = (ENTRIES[name].gpu or ENTRIES[name]) if gpu else ENTRIES[name]
        variants = (entry.gpu_variants if gpu else []) or entry.variants or entry.gpu_variants
        techniques[name] = technique_class(name)(**variants[0])
        for needed, arguments in entry.needs.items():
            techniques.setdefault(needed, technique_class(needed)(**arguments))
    return list(techniques.values())


# The tiny model's adapters are below the minimum size for 8-bit state.
TOO_SMALL = {("bnb_optimizer", "lora"), ("lora", "lowbit_optimizer")}
PAIRS = list(itertools.combinations(sorted(ENTRIES), 2))


def is_quick(pair: tuple[str, str]) -> bool:
    """Whether nothing is compiled; two pairs with torch_compile are enough for the default run."""
    return "torch_compile" not in pair or not {"sdpa_attention", "unpadding"}.isdisjoint(pair)


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["cpu", "gpu"])
@pytest.mark.parametrize("pair", others_exhaustive(map(pytest.param, PAIRS), is_quick), ids="+".join)
def test_every_pair_trains_or_is_refused_by_name(pair: tuple[str, str], gpu: bool) -> None:
    techniques = build_pair(pair, gpu=gpu)
    names = {t.name for t in techniques}
    refusal = _refusal(techniques, Context(torch.device("cuda")) if gpu else CPU)
    if refusal is not None:
        assert refusal.technique in names
        assert str(refusal).startswith(f"{refusal.technique}: ")
        assert refusal.fix
        with pytest.raises(TechniqueError, match=refusal.technique):
            make_trainer(build_pair(pair, gpu=gpu), gpu=gpu)
        return
    settings: dict[str, Any] = {"batches": plain_batches(2), "gpu": gpu}
    if pair in TOO_SMALL:
        with pytest.raises(NotEngagedError, match="no parameter has 8-bit state; lower min_"):
            trained(techniques, **settings)
        return
    trainer = trained(techniques, **settings)
    assert all(t.engaged for t in techniques)
    assert all(w.isfinite().all() for w in final_weights(trainer).values())


def _refusal(techniques: list[Technique], context: Context) -> TechniqueError | None:
    try:
        screen(techniques, context)
    except TechniqueError as refusal:
        return refusal
    return None


@pytest.mark.pins
def test_the_order_of_techniques_does_not_change_the_weights() -> None:
    names = ["sdpa_attention", "mixed_precision", "torch_compile", "fused_optimizer", "fast_layernorm"]
    results = []
    for order, kwargs in [
        (names, {}),
        (names[::-1], {}),
        (names[2:] + names[:2], {"algorithm_passes": [refuse_conflicts, sort_techniques]}),
    ]:
        techniques = [build(name) for name in order]
        results.append(final_weights(trained(techniques, model=tiny_bert(dropout=0.1), **kwargs)))
        assert all(t.engaged for t in techniques)
        torch._dynamo.reset()
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


def test_techniques_engage_in_the_stated_order_without_passes() -> None:
    engaged: list[str] = []

    def note(technique: Technique) -> Technique:
        original = technique.engage
        technique.engage = lambda state: engaged.append(technique.name) or original(state)  # type: ignore
        return technique

    names = ["torch_compile", "fused_optimizer", "fast_layernorm", "sdpa_attention", "mixed_precision"]
    make_trainer([note(build(name)) for name in names]).close()
    assert engaged == [
        "mixed_precision",
        "fast_layernorm",
        "sdpa_attention",
        "fused_optimizer",
        "torch_compile",
    ]


def test_techniques_close_in_reverse_order_even_if_one_raises() -> None:
    closed: list[str] = []

    def note(technique: Technique) -> Technique:
        def close(*, original: Any = technique.close) -> None:
            closed.append(technique.name)
            original()
            if technique.name == "sdpa_attention":
                raise RuntimeError("cannot close")

        technique.close = close  # type: ignore[method-assign]
        return technique

    trainer = make_trainer([note(build(n)) for n in ("fused_optimizer", "sdpa_attention", "mixed_precision")])
    (closer,) = (c for c in trainer.state.callbacks if type(c).__name__ == "_TechniqueKeeper")
    with pytest.raises(RuntimeError, match="cannot close"):
        closer.close(trainer.state, trainer.logger)
    assert closed == ["fused_optimizer", "sdpa_attention", "mixed_precision"]
    trainer.state.callbacks.remove(closer)
    trainer.close()


def test_a_second_trainer_first_closes_the_techniques_in_reverse_order() -> None:
    closed: list[str] = []
    names = ("fused_optimizer", "sdpa_attention", "mixed_precision")
    techniques = [build(name) for name in names]
    earlier = make_trainer(techniques)
    for technique in techniques:
        original = technique.close
        technique.close = lambda n=technique.name, o=original: closed.append(n) or o()  # type: ignore
    later = make_trainer(techniques)
    assert closed == list(names)
    later.close()
    earlier.close()


def test_sort_techniques_leaves_other_algorithms_in_place() -> None:
    clipping = GradientClipping("norm", clipping_threshold=1.0)
    fused, sdpa = FusedOptimizer(), SDPAAttention()
    for event in (Event.INIT, Event.AFTER_LOAD, Event.BEFORE_FORWARD):
        assert list(sort_techniques([fused, clipping, sdpa], event)) == [sdpa, clipping, fused]
    assert list(sort_techniques([fused, clipping, sdpa], Event.AFTER_FORWARD)) == [fused, clipping, sdpa]
    assert [t.stage for t in techniques_of([fused, clipping, sdpa])] == [Stage.SURGERY, Stage.OPTIMIZER]


@pytest.mark.pins
def test_a_conflict_names_both_techniques_and_the_fix() -> None:
    with pytest.raises(TechniqueError) as error:
        screen([FusedOptimizer(), ForEachOptimizer()], CPU)
    message = str(error.value)
    assert "foreach_optimizer" in message
    assert "fused_optimizer" in message
    assert "remove" in message
    with pytest.raises(TechniqueError, match="twice"):
        screen([FusedOptimizer(), FusedOptimizer()], CPU)


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_a_conflict_is_declared_once_and_refused_in_either_order(pair: tuple[str, str]) -> None:
    named = [c for _, _, c in conflicts_between(*map(technique_class, pair)) if c.slot is None]
    assert len(named) <= 1, f"declared twice: {named}"
    for reason in (conflict.why for conflict in named if conflict.when is None):
        for techniques in ([build(pair[0]), build(pair[1])], [build(pair[1]), build(pair[0])]):
            with pytest.raises(TechniqueError) as error:
                refuse_conflicts(techniques)
            assert all(name in str(error.value) for name in (*pair, reason))


@pytest.mark.parametrize("technique", [FastLayerNorm, TF32Matmul])
def test_on_unavailable_warn_is_suggested_only_if_it_is_not_set(technique: Any) -> None:
    with pytest.raises(
        TechniqueError, match=r'remove the technique, or set on_unavailable="warn" to continue without it$'
    ):
        screen([technique()], CPU)
    warning = technique(on_unavailable="warn")
    said = r"continuing without (\w+): .*: .*remove the technique, with train\.py by algorithms\.\1=null\)$"
    with pytest.warns(UserWarning, match=said):
        screen([warning], CPU)
    assert warning.evidence["fix"].endswith("remove the technique")


def test_only_a_technique_that_engages_meets_a_requirement() -> None:
    with pytest.raises(TechniqueError, match=r"fast_layernorm: .*needs mixed precision.*add mixed_precision"):
        screen([FastLayerNorm()], CPU)
    screen([FastLayerNorm(), MixedPrecision("bf16", allow_cpu=True)], CPU)
    unavailable = MixedPrecision("fp16", on_unavailable="warn")
    with (
        pytest.warns(UserWarning, match="continuing without mixed_precision"),
        pytest.raises(TechniqueError, match="fast_layernorm"),
    ):
        screen([FastLayerNorm(), unavailable], CPU)


@pytest.mark.pins
def test_warn_trains_without_the_technique_and_says_so() -> None:
    technique = build("tf32_matmul")
    technique.on_unavailable = "warn"
    with pytest.warns(UserWarning, match=r"continuing without tf32_matmul: .*CUDA GPU") as warned:
        trainer = make_trainer([technique])
    trainer.fit()
    trainer.close()
    assert technique.engaged is False
    assert "CUDA GPU" in technique.evidence["unavailable"]
    assert len([w for w in warned if "tf32" in str(w.message)]) == 1


def test_on_unavailable_is_stop_by_default_and_other_values_are_refused() -> None:
    with pytest.raises(TechniqueError, match=r"tf32_matmul: .*CUDA GPU.*; remove the technique"):
        make_trainer([build("tf32_matmul")])
    wrong: Any = "ignore"
    with pytest.raises(ValueError, match="on_unavailable"):
        FusedOptimizer(on_unavailable=wrong)
