"""LayerNorm with Liger's and Apex's kernels: results, gradients, and evidence of the function that computed them."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from composer_speedups import FastLayerNorm, MixedPrecision, TorchCompile
from composer_speedups.algorithms.fast_layernorm import functional, outputs
from composer_speedups.algorithms.fast_layernorm.layers import LAYERS, ApexLayerNorm, TritonLayerNorm
from composer_speedups.core.errors import NotEngagedError
from composer_speedups.packing.derived_classes import swap_class
from tests.helpers.common import awkward_batches, batch, final_weights, make_trainer, plain_batches, tiny_bert, trained
from tests.helpers.forks import Fork
from tests.reference import apex
from tests.reference.loop import train_plainly
from tests.reference.tolerance import assert_near


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the requirement of a GPU, and install the stand-in for Apex."""
    apex.install(monkeypatch)
    monkeypatch.setattr(functional, "requirements_of", lambda *_: ())


@pytest.mark.slow
def test_ligers_kernels_match_layernorm_in_tritons_interpreter() -> None:
    """At awkward shapes, in float32 and under autocast, as a module and in a Trainer; see liger_on_cpu.py."""

    def check() -> None:
        for name in [name for name in sys.modules if name.startswith("triton") and name[:9] != "triton._C"]:
            del sys.modules[name]  # imported before the fork
        from tests.reference import liger_on_cpu

        Path("found.json").write_text(json.dumps(liger_on_cpu.check_all()))

    done = Fork(check, TRITON_INTERPRET="1").wait(300)
    assert done.status == 0, done.stderr
    result = json.loads(Path("found.json").read_text())
    assert result["checked"] == 12
    for precision, dtype in [("fp32", "float32"), ("bf16", "bfloat16")]:
        assert result[precision]["function"] == "LigerLayerNormFunction"
        assert result[precision]["function_seen_in"] == "forward pass"
        assert result[precision]["output_dtype"] == dtype
        assert result[precision]["modules"] == 5


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("shape", [(1, 16), (3, 5, 16), (0, 16), (2, 3, 33)])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_apex_module_matches_layernorm(shape: tuple[int, ...], autocast: bool) -> None:
    _check_layer(ApexLayerNorm, shape, "cpu", torch.bfloat16 if autocast else None)
    assert apex.FusedLayerNormAffineFunction.calls == 1


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 16), (3, 5, 16), (0, 16), (2, 3, 33), (128, 768), (1000, 1024)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_liger_matches_layernorm_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    _check_layer(TritonLayerNorm, shape, "cuda", dtype)


def _check_layer(cls: type[nn.LayerNorm], shape: tuple[int, ...], device: str, autocast: torch.dtype | None) -> None:
    """Compare outputs and all gradients with nn.LayerNorm in float32."""
    torch.manual_seed(0)
    dtype = autocast or torch.float32
    reference = nn.LayerNorm(shape[-1])
    nn.init.normal_(reference.weight)
    nn.init.normal_(reference.bias)
    changed = copy.deepcopy(reference).to(device)
    swap_class(changed, nn.LayerNorm, cls)
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
    assert y.grad is not None
    assert_near([actual.float().cpu(), y.grad.cpu()], [expected, x.grad], dtype)
    rows = max(1, x.numel() // shape[-1])
    for one, other in zip(changed.parameters(), reference.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.dtype == one.dtype
        # Sums over rows, scaled by their standard deviation.
        assert_near([one.grad.cpu() / rows**0.5], [other.grad / rows**0.5], dtype, "gradients of the parameters")


@pytest.mark.usefixtures("without_gpu")
def test_a_run_with_apex_engages_and_trains_the_same_model() -> None:
    model, technique = tiny_bert(), FastLayerNorm("apex")
    expected = train_plainly(model, awkward_batches())
    trainer = trained([technique], model=model, batches=awkward_batches())
    assert technique.evidence == {
        "modules": 5,
        "implementation": "apex",
        "output_dtype": "float32",
        "function": "FusedLayerNormAffineFunction",
        "function_seen_in": "forward pass",
    }
    assert apex.FusedLayerNormAffineFunction.calls == 5 * len(awkward_batches())
    weights = {n.removeprefix("model."): w for n, w in final_weights(trainer).items()}
    assert_near(weights, expected.weights, what="weights after training")


@pytest.mark.usefixtures("without_gpu")
def test_the_residual_stream_is_16_bit_under_autocast() -> None:
    dtypes: set[torch.dtype] = set()
    technique = FastLayerNorm("apex")
    trainer = make_trainer([technique, MixedPrecision("bf16", allow_cpu=True)])
    layer: Any = trainer.state.model.model.bert.encoder.layer[1]
    layer.register_forward_pre_hook(lambda _m, inputs: dtypes.add(inputs[0].dtype))
    trainer.fit()
    trainer.close()
    assert dtypes == {torch.bfloat16}
    assert technique.evidence["output_dtype"] == "bfloat16"


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("implementation", ["triton", "apex"])
def test_a_kernel_that_does_not_run_is_detected(implementation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module's class is Liger's or Apex's, but torch's LayerNorm runs."""

    def fallback(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    monkeypatch.setattr(LAYERS[implementation], "forward", fallback)
    with pytest.raises(NotEngagedError, match="its outputs came from NativeLayerNorm"):
        trained([FastLayerNorm(implementation)])


@pytest.mark.usefixtures("without_gpu")
def test_compiled_code_is_probed_and_a_fallback_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    technique = FastLayerNorm("apex")
    trained([technique, TorchCompile("blocks", backend="eager")])
    assert technique.evidence["function"] == "FusedLayerNormAffineFunction"
    assert technique.evidence["function_seen_in"] == "probe"
    monkeypatch.setattr(ApexLayerNorm, "forward", nn.LayerNorm.forward)
    with pytest.raises(NotEngagedError, match="NativeLayerNorm"):
        trained([FastLayerNorm("apex"), TorchCompile("blocks", backend="eager")])


def test_modules_restored_after_init_are_detected() -> None:
    trainer = make_trainer([FastLayerNorm(), MixedPrecision("bf16", allow_cpu=True)])
    trainer.state.model.model.bert.embeddings.LayerNorm.__class__ = nn.LayerNorm
    with pytest.raises(NotEngagedError, match="1 of 5 modules have another class again"):
        trainer.fit()
    trainer.close()


@pytest.mark.usefixtures("without_gpu")
def test_a_forward_pass_that_raises_leaves_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer([FastLayerNorm("apex")])
    monkeypatch.setattr(type(trainer.state.model.model.bert.pooler), "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    trainer.close()
    assert not any(m._forward_hooks for m in trainer.state.model.modules())


def test_kernels_in_compiled_graphs_are_found_in_dynamos_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    def _layer_norm_forward_kernel() -> None: ...

    monkeypatch.setattr(kernel_side_table, "id_to_kernel", {})
    assert not outputs.in_compiled_graphs()
    kernel_side_table.id_to_kernel[0] = _layer_norm_forward_kernel
    assert not outputs.in_compiled_graphs(), "a kernel of another library"
    _layer_norm_forward_kernel.__module__ = "liger_kernel.ops.layer_norm"
    assert outputs.in_compiled_graphs()


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
    assert technique.evidence["function"] == "LigerLayerNormFunction"
    assert technique.evidence["function_seen_in"] == ("compiled graph" if compiled else "forward pass")
    assert technique.evidence["output_dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.gpu
def test_modules_restored_after_init_are_detected_on_a_gpu() -> None:
    trainer = make_trainer([FastLayerNorm("triton")], batches=plain_batches(1), gpu=True)
    trainer.state.model.model.bert.embeddings.LayerNorm.__class__ = nn.LayerNorm
    with pytest.raises(NotEngagedError, match="another class again"):
        trainer.fit()
    trainer.close()
