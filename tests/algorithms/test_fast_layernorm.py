"""fast_layernorm: the low-precision, Liger's and Apex's LayerNorm match torch's, and refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from composer_speedups import FastLayerNorm, MixedPrecision, TorchCompile, apply
from composer_speedups.algorithms.fast_layernorm.modules import ApexLayerNorm, LowPrecisionLayerNorm, TritonLayerNorm
from composer_speedups.core.errors import Refusal
from tests.helpers.common import (
    assert_not_engaged,
    awkward_batches,
    batch,
    final_weights,
    make_trainer,
    tiny_bert,
    trained,
)
from tests.helpers.forks import Fork
from tests.reference import apex
from tests.reference.layernorm import check_layer
from tests.reference.loop import train_plainly
from tests.reference.tolerance import assert_near


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the requirement of a GPU, and install the stand-in for Apex."""
    apex.install(monkeypatch)
    monkeypatch.setattr(FastLayerNorm, "needs", lambda *_: ())


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("shape", [(1, 16), (3, 5, 16), (0, 16), (2, 3, 33)])
@pytest.mark.parametrize(
    ("cls", "autocast", "affine"),
    [
        (LowPrecisionLayerNorm, torch.bfloat16, True),
        (LowPrecisionLayerNorm, torch.bfloat16, False),
        (LowPrecisionLayerNorm, None, True),
        (ApexLayerNorm, torch.bfloat16, True),
        (ApexLayerNorm, None, True),
    ],
)
@pytest.mark.pins
def test_outputs_and_gradients_match_layernorm(cls: Any, autocast: Any, affine: bool, shape: tuple[int, ...]) -> None:
    check_layer(cls, shape, "cpu", autocast, affine=affine)
    assert apex.FusedLayerNormAffineFunction.calls == (cls is ApexLayerNorm)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_ligers_kernels_match_layernorm_in_tritons_interpreter() -> None:
    """At awkward shapes, in float32 and under autocast, as a module and in a Trainer; see liger_on_cpu.py."""

    def check() -> None:
        for name in [name for name in sys.modules if name.startswith("triton") and name[:9] != "triton._C"]:
            del sys.modules[name]  # imported before the fork
        from tests.reference import liger_on_cpu

        Path("found.json").write_text(json.dumps(liger_on_cpu.check_all()))

    done = Fork(check, TRITON_INTERPRET="1").wait()
    assert done.status == 0, done.stderr
    result = json.loads(Path("found.json").read_text())
    for precision, dtype in [("fp32", "float32"), ("bf16", "bfloat16")]:
        assert result[precision]["output_dtype"] == dtype
        assert result[precision]["modules"] == 5


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("autocast", [False, True])
def test_a_run_with_apex_trains_the_same_model(autocast: bool) -> None:
    """A module that Apex does not support is left alone."""
    model, technique = tiny_bert(), FastLayerNorm("apex")
    model.bert.embeddings.LayerNorm = nn.LayerNorm(32, bias=False)
    expected = train_plainly(model, awkward_batches())
    others = [MixedPrecision("bf16", allow_cpu=True)] if autocast else []
    trainer = trained([technique, *others], model=model, batches=awkward_batches())
    assert technique.evidence == {
        "modules": 4,
        "implementation": "apex",
        "output_dtype": "bfloat16" if autocast else "float32",
        "seen_in": "forward pass",
    }
    assert apex.FusedLayerNormAffineFunction.calls == 4 * len(awkward_batches())
    weights = {n.removeprefix("model."): w for n, w in final_weights(trainer).items()}
    assert_near(weights, expected.weights, torch.bfloat16 if autocast else torch.float32, "weights after training")


def test_modules_without_effect_are_detected() -> None:
    bf16 = MixedPrecision("bf16", allow_cpu=True)
    trainer = make_trainer([FastLayerNorm(), bf16])
    for module in trainer.state.model.modules():
        if isinstance(module, nn.LayerNorm):
            module.__class__ = nn.LayerNorm
    assert_not_engaged(trainer, "no LayerNorm ran")


@pytest.mark.parametrize("implementation", ["triton", "apex"])
def test_what_cannot_run_is_refused(implementation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(Refusal, match=r"^fast_layernorm: .*needs a CUDA GPU.*on_unavailable"):
            make_trainer([FastLayerNorm(implementation)])
    monkeypatch.setattr(FastLayerNorm, "needs", lambda *_: ())
    model = nn.ModuleDict({"no_bias": nn.LayerNorm(4, bias=False), "plain": nn.Linear(2, 2)})
    with pytest.raises(Refusal, match=rf"no torch.nn.LayerNorm that the {implementation} kernel supports; remove it"):
        apply(model, [FastLayerNorm(implementation)])


def test_without_apex_the_refusal_names_its_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer_speedups.algorithms.fast_layernorm.fast_layernorm.needs_cuda", lambda *_: ())
    with pytest.raises(Refusal, match=r"Apex is not installed with its CUDA extensions; build .* NVIDIA/apex"):
        make_trainer([FastLayerNorm("apex")])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 16), (3, 5, 16), (0, 16), (2, 3, 33), (128, 768), (1000, 1024)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_liger_matches_layernorm_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    check_layer(TritonLayerNorm, shape, "cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_liger_trains_the_same_weights_on_a_gpu(precision: str, compiled: bool) -> None:
    model, technique = tiny_bert(), FastLayerNorm("triton")
    batches = [batch([32, 17, 5, 32], seed=i) for i in range(3)] if compiled else awkward_batches()
    expected = train_plainly(model, batches)
    trainer = trained(
        [technique, *([TorchCompile()] if compiled else [])],
        model=model,
        batches=batches,
        gpu=True,
        precision=precision,
    )
    dtype = torch.bfloat16 if precision == "amp_bf16" else torch.float32
    weights = {n.removeprefix("model."): w for n, w in final_weights(trainer).items()}
    assert_near(weights, expected.weights, dtype, "weights after training")
    assert technique.evidence["seen_in"] == ("compiled code" if compiled else "forward pass")
