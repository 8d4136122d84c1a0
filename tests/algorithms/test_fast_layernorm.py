"""fast_layernorm: the low-precision, Liger's and Apex's LayerNorm match torch's, and refusals."""

from __future__ import annotations

import copy
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from composer_speedups import FastLayerNorm, MixedPrecision, apply
from composer_speedups.algorithms.fast_layernorm.modules import ApexLayerNorm, LowPrecisionLayerNorm, TritonLayerNorm
from composer_speedups.core.errors import Refusal
from tests.helpers.common import (
    assert_not_engaged,
    awkward_batches,
    final_weights,
    make_trainer,
    tiny_bert,
    trained,
)
from tests.reference.loop import train_plainly
from tests.reference.tolerance import assert_near


def fused_layer_norm_affine(input: Tensor, weight: Tensor, bias: Tensor, shape: Any, eps: float = 1e-6) -> Tensor:
    """In place of Apex's, which must be built from source: its signature, its refusal of mixed dtypes, and its result.

    Source: NVIDIA/apex, apex/normalization/fused_layer_norm.py at 014f30f.
    """
    assert input.dtype == weight.dtype == bias.dtype, "the kernel reads all three as one dtype"
    return F.layer_norm(input.float(), shape, weight.float(), bias.float(), eps).to(input.dtype)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the requirement of a GPU, and make ``import apex`` import the stand-in."""
    for name in ("apex", "apex.normalization", "apex.normalization.fused_layer_norm"):
        module: Any = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.fused_layer_norm_affine = fused_layer_norm_affine
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(FastLayerNorm, "needs", lambda *_: ())


def check_layer(
    cls: Any, shape: tuple[int, ...], device: str, autocast: torch.dtype | None, *, affine: bool = True
) -> None:
    """Compare outputs and all gradients with nn.LayerNorm in float32; ``autocast`` is its dtype, or None without it."""
    torch.manual_seed(0)
    dtype = autocast or torch.float32
    reference = nn.LayerNorm(shape[-1], elementwise_affine=affine)
    for parameter in reference.parameters():
        nn.init.normal_(parameter)
    changed = copy.deepcopy(reference).to(device)
    changed.__class__ = cls
    x = torch.randn(shape)
    y = x.detach().to(device).requires_grad_()
    x.requires_grad_()
    expected = reference(x)
    with torch.autocast(device, dtype, enabled=autocast is not None):
        actual = changed(y)
    assert actual.dtype == dtype
    upstream = torch.randn(shape)
    expected.backward(upstream)
    actual.backward(upstream.to(device, dtype))
    assert_near([actual.float().cpu(), y.grad.cpu()], [expected, x.grad], dtype, f"{shape}")
    rows = max(1, x.numel() // shape[-1])
    for one, other in zip(changed.parameters(), reference.parameters(), strict=True):
        assert one.grad.dtype == one.dtype
        # Sums over rows, scaled by their standard deviation.
        assert_near([one.grad.cpu() / rows**0.5], [other.grad / rows**0.5], dtype, f"{shape}, parameters' gradients")


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
    weights = {n.removeprefix("model."): w for n, w in final_weights(trainer).items()}
    assert_near(weights, expected.weights, torch.bfloat16 if autocast else torch.float32, "weights after training")


def test_modules_without_effect_are_detected() -> None:
    trainer = make_trainer([FastLayerNorm(), MixedPrecision("bf16", allow_cpu=True)])
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
    with pytest.raises(Refusal, match=r"Apex is not installed with its CUDA extensions; build .*NVIDIA/apex"):
        make_trainer([FastLayerNorm("apex")])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 16), (3, 5, 16), (0, 16), (2, 3, 33), (128, 768), (1000, 1024)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_liger_matches_layernorm_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    check_layer(TritonLayerNorm, shape, "cuda", dtype)
