"""Float8 Linears on a GPU with float8 support: the results of the kernels, eager and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composer_speedups import Float8Linear, MixedPrecision
from composer_speedups.algorithms.float8_linear.modules import Float8Recorder
from composer_speedups.core.errors import TechniqueError
from tests.algorithms.test_float8_linear import check_compiled, error, every_recipe, linear, run, sample
from tests.helpers.common import make_trainer


@pytest.mark.gpu
@every_recipe
@pytest.mark.parametrize("shape", [(16, 32), (1, 32), (7, 1, 32), (2, 15, 32), (17, 32), (5, 13, 32)])
def test_kernels_match_emulation(recipe: str, shape: tuple[int, ...]) -> None:
    plain, float8 = linear(recipe, emulate=False, device="cuda")
    _, emulated = linear(recipe, device="cuda")
    x = sample(*shape, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        with Float8Recorder() as recorder:
            actual = run(float8, x)
        expected, reference = run(emulated, x), run(plain, x)
    forward_and_backward = 2 if recipe == "rowwise_with_gw_hp" else 3
    assert recorder.counts["_scaled_mm"] == recorder.counts["float8_mm"] == forward_and_backward
    for a, b, c in zip(actual, expected, reference, strict=True):
        assert error(a, b) < 0.02, "the rounding is the same, the precision of the sums is not"
        assert error(a, c) < 0.09


@pytest.mark.gpu
@every_recipe
@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_inductor_matches_eager_on_a_gpu(recipe: Any, scope: Any) -> None:
    check_compiled(recipe, scope, "inductor", gpu=True)


@pytest.mark.gpu
@every_recipe
def test_compiled_code_launches_float8_kernels(recipe: Any) -> None:
    from torch.profiler import ProfilerActivity, profile

    _, float8 = linear(recipe, emulate=False, device="cuda")
    compiled: Any = torch.compile(float8)
    x = sample(2, 15, 32, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        run_compiled = lambda: compiled(x).sum().backward()  # noqa: E731
        run_compiled()
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            run_compiled()
    calls = {event.key: event.count for event in profiler.key_averages()}
    assert calls.get("aten::_scaled_mm", 0) >= 1, sorted(calls)


@pytest.mark.gpu
def test_fp16_is_refused_on_a_gpu() -> None:
    with pytest.raises(TechniqueError, match="needs bf16, and this run is fp16"):
        make_trainer([MixedPrecision("fp16"), Float8Linear()], gpu=True)
