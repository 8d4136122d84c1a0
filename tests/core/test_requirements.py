"""Requirements on the run: each technique sees what the other requested techniques set, in any order of the list."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from composer_speedups import FastLayerNorm, Float8Linear, FusedLayers, FusedOptimizer, MixedPrecision, Unpadding
from composer_speedups.core.errors import TechniqueError
from composer_speedups.core.requirements import Context
from composer_speedups.core.technique import Technique, screen
from composer_speedups.recommendation import recommended

PRECISIONS = ("fp32", "amp_fp16", "amp_bf16")  # of a Trainer on a GPU; amp_fp16 is Composer's default


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton comes with torch on Linux only")
    simulate_gpu(monkeypatch, (9, 0))


def simulate_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a simulated GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)


def on_gpu(precision: str) -> Context:
    return Context(torch.device("cuda"), precision)


def in_float8(dtype: Any) -> list[Technique]:
    return [MixedPrecision(dtype), Unpadding(), FusedLayers(precision="fp8")]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("order", itertools.permutations(range(3)), ids=str)
def test_mixed_precision_sets_the_precision_that_others_require(
    hopper: None, precision: str, order: tuple[int, ...]
) -> None:
    bf16 = in_float8("bf16")
    screen([bf16[i] for i in order], on_gpu(precision))
    fp16 = in_float8("fp16")
    with pytest.raises(TechniqueError, match="fused_layers: precision: fp8 needs bf16, and this run is fp16"):
        screen([fp16[i] for i in order], on_gpu(precision))


def test_the_default_precision_is_refused_with_a_fix_that_works(hopper: None) -> None:
    eight_bits = [Unpadding(), FusedLayers(precision="fp8")]
    with pytest.raises(TechniqueError, match="this run is fp16; add mixed_precision with dtype bf16, or set the prec"):
        screen(eight_bits, on_gpu("amp_fp16"))
    screen([*eight_bits, MixedPrecision("bf16")], on_gpu("amp_fp16"))
    screen(eight_bits, on_gpu("amp_bf16"))


def test_the_recommended_set_accepts_eight_bits(hopper: None) -> None:
    eight_bits = [t for t in recommended() if t.name != "fused_layers"] + [FusedLayers(precision="fp8")]
    screen(eight_bits, on_gpu("amp_fp16"))


@pytest.mark.parametrize(
    ("technique", "said"),
    [
        (lambda: FusedOptimizer(kernel="triton"), "kernel: triton does not support loss scaling"),
        (Float8Linear, "float8_linear needs bf16, and this run is fp16"),
    ],
    ids=["fused_optimizer", "float8_linear"],
)
def test_fp16_is_refused_before_the_model_is_built(hopper: None, technique: Any, said: str) -> None:
    for refused in ([technique(), MixedPrecision("fp16")], [MixedPrecision("fp16"), technique()]):
        with pytest.raises(TechniqueError, match=said):
            screen(refused, on_gpu("fp32"))
    screen([technique(), MixedPrecision("bf16")], on_gpu("amp_fp16"))


def test_a_refused_technique_sets_nothing(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_gpu(monkeypatch, (7, 5))  # without bf16
    refused = MixedPrecision("bf16", on_unavailable="warn")
    with (
        pytest.warns(UserWarning, match="continuing without mixed_precision"),
        pytest.raises(TechniqueError, match="fused_optimizer: kernel: triton does not support loss scaling"),
    ):
        screen([FusedOptimizer(kernel="triton"), refused], on_gpu("amp_fp16"))
    refused = MixedPrecision("bf16", on_unavailable="warn")
    with (
        pytest.warns(UserWarning, match="continuing without mixed_precision"),
        pytest.raises(TechniqueError, match="this run is fp32"),
    ):
        screen([FastLayerNorm(), refused], on_gpu("fp32"))


def test_autocast_on_a_cpu_is_not_composers_precision() -> None:
    screen([MixedPrecision("bf16", allow_cpu=True), FastLayerNorm()], Context(torch.device("cpu")))
