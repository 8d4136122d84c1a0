"""Combinations of techniques: their order does not matter, and every pair trains or is refused by name."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from composer_speedups.core.engaging import check
from composer_speedups.core.errors import Refusal
from composer_speedups.core.registry import technique_class
from composer_speedups.core.run import Run
from composer_speedups.core.technique import Technique
from tests.helpers.common import final_weights, make_trainer, plain_batches, tiny_bert, trained
from tests.helpers.exhaustive import others_exhaustive
from tests.helpers.settings import ENTRIES


def on(device: str) -> Run:
    return Run(torch.device(device))


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
    refusal = None
    try:
        check(techniques, on("cuda" if gpu else "cpu"))
    except Refusal as error:
        refusal = error
    if refusal is not None:
        assert refusal.who in names or all(name in refusal.reason for name in pair), "it names both"
        assert refusal.reason
        assert refusal.fix
        with pytest.raises(Refusal, match=refusal.who):
            make_trainer(build_pair(pair, gpu=gpu), gpu=gpu)
        return
    settings: dict[str, Any] = {"batches": plain_batches(2), "gpu": gpu}
    if pair in TOO_SMALL:
        with pytest.raises(Refusal, match="no parameter has 8-bit state; lower min_"):
            trained(techniques, **settings)
        return
    trainer = trained(techniques, **settings)
    assert all(t.engaged for t in techniques)
    assert all(w.isfinite().all() for w in final_weights(trainer).values())


@pytest.mark.pins
def test_the_order_of_techniques_does_not_change_the_weights() -> None:
    names = ["sdpa_attention", "mixed_precision", "torch_compile", "fused_optimizer", "fast_layernorm"]
    results = []
    for order in (names, names[::-1], names[2:] + names[:2]):
        techniques = [build(name) for name in order]
        results.append(final_weights(trained(techniques, model=tiny_bert(dropout=0.1))))
        assert all(t.engaged for t in techniques)
        torch._dynamo.reset()
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)
