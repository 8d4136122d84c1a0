"""Requirements on the run: every technique sees what the other requested techniques set, in any order of the list."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composer_speedups import (
    FastLayerNorm,
    Float8Linear,
    FusedLayers,
    FusedOptimizer,
    LowBitOptimizer,
    MixedPrecision,
    TorchCompile,
    Unpadding,
)
from composer_speedups.core.engaging import check
from composer_speedups.core.errors import Refusal
from composer_speedups.core.registry import build_techniques
from composer_speedups.core.run import Run
from composer_speedups.core.technique import Technique
from composer_speedups.core.trainer_state import world_size
from composer_speedups.packing.attention import has_16_bit_kernels
from composer_speedups.recommendation import RECOMMENDED

PRECISIONS = ("fp32", "amp_fp16", "amp_bf16")  # of a Trainer on a GPU; amp_fp16 is Composer's default


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton comes with torch on Linux only")
    simulate_gpu(monkeypatch, (9, 0))


def simulate_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a simulated GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)


def on_gpu(precision: str) -> Run:
    return Run(torch.device("cuda"), precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("reverse", [False, True])
def test_mixed_precision_sets_the_precision_that_others_require(hopper: None, precision: str, reverse: bool) -> None:
    for others in ([Unpadding(), FusedLayers(precision="fp8")], [Float8Linear()]):
        order = -1 if reverse else 1
        check([MixedPrecision("bf16"), *others][::order], on_gpu(precision))
        with pytest.raises(Refusal, match=r"^(fused_layers: precision: fp8|float8_linear: .*) needs bf16, and this"):
            check([MixedPrecision("fp16"), *others][::order], on_gpu(precision))


@pytest.mark.parametrize(("capability", "runs"), [((7, 5), False), ((8, 0), True)])
def test_kernels_for_16_bits_run_from_ampere_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], runs: bool
) -> None:
    simulate_gpu(monkeypatch, capability)
    assert has_16_bit_kernels(torch.device("cuda"), torch.bfloat16) == runs


def test_a_refusal_says_which_compute_capability_is_needed(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_gpu(monkeypatch, (8, 0))
    with pytest.raises(
        Refusal, match=r"needs a CUDA GPU of compute capability 8\.9 or newer, and a simulated GPU is 8\.0"
    ):
        check([MixedPrecision("bf16"), Unpadding(), FusedLayers(precision="fp8")], on_gpu("amp_bf16"))


def test_the_number_of_ranks_is_the_launchers_until_there_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for initialized, expected in ((False, 3), (True, 2)):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda value=initialized: value)
        assert world_size() == expected


def test_a_refused_technique_sets_nothing(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_gpu(monkeypatch, (7, 5))  # without bf16
    refused = MixedPrecision("bf16", on_unavailable="warn")
    with (
        pytest.warns(UserWarning, match="continuing without mixed_precision"),
        pytest.raises(Refusal, match="this run is fp32"),
    ):
        check([FastLayerNorm(), refused], on_gpu("fp32"))


def test_an_error_names_all_techniques_that_cannot_engage() -> None:
    """fused_layers has unpadding."""
    names = r"^early_loss: .*; these cannot engage either: mixed_precision, tf32_matmul, cuda_graphs$"
    fast = build_techniques(RECOMMENDED, "stop")
    for techniques in (fast, fast[::-1]):
        with pytest.raises(Refusal, match=names):
            check(techniques, Run(torch.device("cpu")))


WITH_TRITON: dict[str, Any] = {
    "fused_layers": lambda: [MixedPrecision("bf16"), Unpadding(), FusedLayers()],
    "fast_layernorm": lambda: [FastLayerNorm("triton")],
    "lowbit_optimizer": lambda: [LowBitOptimizer()],
    "torch_compile": lambda: [TorchCompile()],
}
PACKAGES = {"fast_layernorm": "liger_kernel", "lowbit_optimizer": "torchao"}


@pytest.fixture
def no_compiler(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda _: None)


@pytest.mark.parametrize("name", WITH_TRITON)
def test_a_triton_kernel_needs_a_c_compiler(name: str, no_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name], reason="the technique needs this package")
    with pytest.raises(
        Refusal,
        match=rf"^{name}: Triton needs a C compiler: neither gcc nor clang is installed; install gcc, or set CC",
    ):
        check(WITH_TRITON[name](), on_gpu("amp_bf16"))
    monkeypatch.setattr("shutil.which", lambda program: program if program == "clang" else None)
    check(WITH_TRITON[name](), on_gpu("amp_bf16"))


def test_torchs_kernels_need_no_c_compiler(no_compiler: None) -> None:
    check([FusedOptimizer(), FastLayerNorm()], on_gpu("amp_bf16"))
    cpu: list[Technique] = [FusedLayers(), Unpadding()]
    check(cpu, Run(torch.device("cpu")))
