"""The profile of a step: kinds of kernels, time without one, and the floor of the matrix products."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import profile
from benchmarks.micro import Product, gemm_floor, linear_products
from benchmarks.profile import Kernel, busy, by_name, kernels_of_trace
from benchmarks.tables import kind_of
from composer_speedups.algorithms.fused_layers.fusing import fuse
from composer_speedups.algorithms.fused_layers.modules import FusedLayer
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.core.errors import ConfigError
from composer_speedups.packing.layout import lay_out
from tests.conftest import ROOT
from tests.helpers.common import tiny_bert
from tests.helpers.jobs import SHORT
from tests.helpers.models import tiny_model


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_2x1_v_bz_coopA_bias_TNT", "GEMM"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>", "attention"),
        ("triton_per_fused__to_copy_add_native_dropout_native_layer_norm_3", "LayerNorm, dropout, residual"),
        ("triton_poi_fused_gelu_gelu_backward_7", "activation"),
        ("triton_poi_fused__scaled_mm__to_copy_clamp_gelu_mul_reciprocal_t_view_17", "scaling to float8"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "reductions"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", "copies and casts"),
        ("aten::addmm", "GEMM"),
        ("aten::_fused_adamw_", "optimizer"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_traces_kernels_and_the_time_with_one() -> None:
    trace = {
        "traceEvents": [
            {"cat": "kernel", "name": "gemm", "ts": 40, "dur": 10},
            {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 100},
            {"cat": "gpu_user_annotation", "name": "Optimizer.step#AdamW.step", "ts": 0, "dur": 90},
            {"cat": "kernel", "name": "gemm", "ts": 10, "dur": 10},
            {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 15, "dur": 10},
            {"ph": "M", "name": "process_name"},
        ]
    }
    kernels = kernels_of_trace(trace)
    assert [k.name for k in kernels] == ["gemm", "Memcpy DtoD", "gemm"]
    assert busy(kernels) == pytest.approx(25e-6), "10–25 and 40–50"
    assert busy([Kernel("long", 0.5, 1.0), Kernel("inside", 0.7, 0.3)]) == 1.0
    assert [(name, launches) for name, _, launches in by_name(kernels)] == [("gemm", 2), ("Memcpy DtoD", 1)]


def _profiled(*more: str) -> dict[str, Any]:
    arguments = ["-f", str(ROOT / "yamls" / "quickstart.yaml"), *SHORT, "data.train_samples=64", "profile.warmup=1"]
    arguments += more
    return profile.main([*arguments, "profile.timed=2", "profile.active=2"], Path("results"))


def test_the_floor_has_the_matrix_products_of_a_step() -> None:
    model = tiny_bert()
    every = linear_products(model, 7)
    assert sorted(set(every)) == [(32, 32, 7), (32, 64, 7), (64, 32, 7)]
    assert len(every) == 12  # six Linears in each of two layers; pooler and classifier are not among them
    # a last layer that computes two rows' first tokens: keys and values of all, else of these
    assert linear_products(model, 7, first_tokens=2) == [
        *every[:6], (32, 32, 2), (32, 32, 7), (32, 32, 7), (32, 32, 2), (32, 64, 2), (64, 32, 2)
    ]  # fmt: skip
    gated = linear_products(tiny_model("modernbert", layers=1), 7, first_tokens=2)
    assert gated == [(32, 32, 2), (32, 64, 7), (32, 32, 2), (32, 64, 2), (32, 32, 2)]


@pytest.mark.exhaustive
def test_the_floor_of_a_step_whose_last_layer_computes_first_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Product]] = []

    def recorded(products: list[Product], *_: Any) -> float:
        seen.append(products)
        return 1.0

    monkeypatch.setattr(profile, "gemm_floor", recorded)
    packed = ["algorithms.sdpa_attention=null", "algorithms.unpadding={}"]
    _profiled(*packed, "algorithms.fused_layers={}")
    _profiled(*packed, "algorithms.fused_layers={last_layer: all}", "run_name=all")
    (short, every), rows = seen, {product.rows for product in seen[1]}
    assert len(rows) == 1
    assert [product.rows == 8 for product in short[-6:]] == [True, False, False, True, True, True]
    assert [product[:2] for product in short] == [product[:2] for product in every]


class Multiplied(TorchDispatchMode):
    """Counts the multiplications of matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            left, right = args[-2:]
            self.count += left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


def test_the_floor_of_fused_layers_is_that_of_the_stock_model_and_its_products_are_the_floors() -> None:
    """Its layers are other classes with the same Linears, and they multiply what the floor multiplies."""
    model = tiny_bert()
    expected = linear_products(model, 64)
    unpad(model)
    fuse(model, "all")
    assert linear_products(model, 64) == expected
    (first, *_) = (module for module in model.modules() if isinstance(module, FusedLayer))
    x, plan = torch.randn(1, 64, 32, requires_grad=True), lay_out(torch.ones(4, 16), 64)
    with Multiplied() as fused:
        first(x, layout=plan).sum().backward()
    floor = sum(3 * product.rows * product.inputs * product.outputs for product in expected[: len(expected) // 2])
    assert fused.count == floor, "forward, input gradients and weight gradients"
    with Multiplied() as floors:
        assert gemm_floor(expected, torch.device("cpu"), torch.float32, repeats=1) > 0
    assert floors.count == 3 * 3 * 2 * floor, "three passes of a step after two others, of two layers"


def test_a_profile_of_the_quickstart() -> None:
    row = _profiled()
    assert [json.loads(line) for line in Path("results/cpu/profile.jsonl").read_text().splitlines()] == [row]
    ms = {kind_of(kernel["name"]) for kernel in row["kernels"] if kernel["ms"] > 0}
    assert ms >= {"GEMM", "attention", "optimizer"}
    assert sum(kernel["launches"] for kernel in row["kernels"] if kernel["name"] == "aten::_fused_adamw_") == 2
    assert row["step_over_floor"] == pytest.approx(row["step_ms"] / row["gemm_floor_ms"])  # above 1 unless disturbed
    assert 0 < row["tokens"] <= 8 * 48
    assert row["algorithms"]["fused_optimizer"]["engaged"]
    text = "\n".join(profile.markdown(row))
    assert re.search(r"^\| GEMM \| [\d.]+ \|$", text, re.MULTILINE)
    assert f"| **step** | {row['step_ms']:.1f} |" in text


def test_a_wrong_number_of_batches_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'profile\.steps'; known: warmup, timed, active"):
        profile.main(["profile.steps=3"])
