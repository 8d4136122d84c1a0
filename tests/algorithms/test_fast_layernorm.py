"""fast_layernorm: the low-precision, Liger's and Apex's LayerNorm, the function that computed them, and refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from composer_speedups import FastLayerNorm, MixedPrecision, TorchCompile, apply_fast_layernorm
from composer_speedups.algorithms.fast_layernorm import functional
from composer_speedups.algorithms.fast_layernorm.fast_layernorm import in_compiled_graphs
from composer_speedups.algorithms.fast_layernorm.layers import (
    LAYERS,
    ApexLayerNorm,
    LowPrecisionLayerNorm,
    TritonLayerNorm,
)
from composer_speedups.core.errors import NotEngagedError, TechniqueError
from composer_speedups.packing.derived_classes import swap_class
from composer_speedups.surgery.already_applied import NoEffectWarning
from tests.helpers.common import (
    assert_not_engaged,
    awkward_batches,
    batch,
    final_weights,
    fit_and_close,
    make_trainer,
    tiny_bert,
    trained,
)
from tests.helpers.forks import Fork
from tests.reference import apex
from tests.reference.layernorm import check_layer
from tests.reference.loop import train_plainly
from tests.reference.tolerance import assert_near


@pytest.mark.pins
def test_only_the_class_of_a_module_changes() -> None:
    model: Any = tiny_bert().double()
    model.train()
    norm = model.bert.embeddings.LayerNorm
    norm.eval()
    norm.weight.requires_grad_(False)
    model.bert.encoder.layer[0].output.LayerNorm = norm  # shared
    seen: list[int] = []
    norm.register_forward_hook(lambda *_: seen.append(1))
    before = {n: (id(p), p.dtype, p.device, p.requires_grad) for n, p in model.named_parameters()}
    modes = {n: m.training for n, m in model.named_modules()}
    names = apply_fast_layernorm(model)
    assert len(names) == len(set(names)) == 4  # five positions, two of which share a module
    assert {n: (id(p), p.dtype, p.device, p.requires_grad) for n, p in model.named_parameters()} == before
    assert {n: m.training for n, m in model.named_modules()} == modes
    assert model.bert.encoder.layer[0].output.LayerNorm is model.bert.embeddings.LayerNorm
    model(input_ids=torch.ones(1, 3, dtype=torch.long))
    assert seen
    assert apply_fast_layernorm(model) == []


def test_subclasses_are_left_alone_and_a_class_with_new_state_is_refused() -> None:
    class Other(nn.LayerNorm):
        pass

    model = nn.Sequential(Other(4), nn.LayerNorm(4))
    assert swap_class(model, nn.LayerNorm, LowPrecisionLayerNorm) == ["1"]
    assert type(model[0]) is Other
    with pytest.raises(ValueError, match="must be a subclass"):
        swap_class(model, nn.LayerNorm, nn.Linear)


def test_without_layernorms_the_function_warns_and_the_technique_raises() -> None:
    with pytest.warns(NoEffectWarning):
        apply_fast_layernorm(nn.Linear(2, 2))
    bare: Any = tiny_bert()
    for module in bare.modules():
        if type(module) is nn.LayerNorm:
            module.__class__ = type("MyNorm", (nn.LayerNorm,), {})
    with pytest.raises(TechniqueError, match=r"fast_layernorm: the model has no torch\.nn\.LayerNorm"):
        make_trainer([MixedPrecision(allow_cpu=True), FastLayerNorm()], model=bare)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the requirement of a GPU, and install the stand-in for Apex."""
    apex.install(monkeypatch)
    monkeypatch.setattr(functional, "requirements_of", lambda *_: ())


@pytest.mark.usefixtures("without_gpu")
def test_unsuitable_layernorms_are_kept_and_named() -> None:
    def model() -> nn.Module:
        return nn.ModuleDict(
            {
                "whole": nn.LayerNorm(4),
                "no_bias": nn.LayerNorm(4, bias=False),
                "no_weight": nn.LayerNorm(4, elementwise_affine=False),
                "two_dimensions": nn.LayerNorm((2, 4)),
            }
        )

    for implementation, expected in {"triton": ["whole"], "apex": ["whole", "two_dimensions"]}.items():
        changed: Any = model()
        with pytest.warns(NoEffectWarning, match=rf"not changed, because {implementation} needs.*: no_bias, no_weight"):
            assert apply_fast_layernorm(changed, implementation=implementation) == expected  # type: ignore
        assert type(changed["no_bias"]) is nn.LayerNorm
    assert len(apply_fast_layernorm(model())) == 4
    lowered = model()
    apply_fast_layernorm(lowered)
    with pytest.raises(ValueError, match="already has fast LayerNorms with implementation='low_precision'; to use"):
        apply_fast_layernorm(lowered, implementation="triton")


@pytest.mark.usefixtures("without_gpu")
def test_unsuitable_layernorms_are_named_and_refused_if_there_are_no_others() -> None:
    model: Any = tiny_bert()
    model.bert.embeddings.LayerNorm = nn.LayerNorm(32, bias=False)
    technique = FastLayerNorm("apex")
    trained([technique], model=model)
    assert technique.evidence["left_alone"] == ["model.bert.embeddings.LayerNorm"]
    assert technique.evidence["modules"] == 4
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.__class__, module.bias = nn.LayerNorm, None
    with pytest.raises(TechniqueError, match=r"LayerNorm that is supported: apex needs a weight and a bias; remove it"):
        make_trainer([FastLayerNorm("apex")], model=model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests errors of machines without a GPU")
@pytest.mark.parametrize("implementation", ["triton", "apex"])
def test_without_a_gpu_it_is_refused(implementation: Any) -> None:
    with pytest.raises(TechniqueError, match=r"fast_layernorm: .*needs a CUDA GPU.*on_unavailable"):
        make_trainer([FastLayerNorm(implementation)])
    with pytest.raises(ValueError, match="needs a CUDA GPU"):
        apply_fast_layernorm(tiny_bert(), implementation=implementation)


def test_without_apex_the_error_names_its_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    met = (True, "", "")
    monkeypatch.setattr(functional, "needs_cuda", lambda *_: met)
    with pytest.raises(ValueError, match=r"Apex is not installed with its CUDA extensions; build .* NVIDIA/apex"):
        apply_fast_layernorm(tiny_bert(), implementation="apex")
    apex.install(monkeypatch)
    assert len(apply_fast_layernorm(tiny_bert(), implementation="apex")) == 5


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
        assert result[precision]["function"] == "LigerLayerNormFunction"
        assert result[precision]["function_seen_in"] == "forward pass"
        assert result[precision]["output_dtype"] == dtype
        assert result[precision]["modules"] == 5


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


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 16), (3, 5, 16), (0, 16), (2, 3, 33), (128, 768), (1000, 1024)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_liger_matches_layernorm_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    check_layer(TritonLayerNorm, shape, "cuda", dtype)


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
@pytest.mark.parametrize("implementation", ["low_precision", "apex"])
def test_the_residual_stream_is_16_bit_under_autocast(implementation: Any) -> None:
    dtypes: set[torch.dtype] = set()
    technique = FastLayerNorm(implementation)
    trainer = make_trainer([technique, MixedPrecision("bf16", allow_cpu=True)])
    layer: Any = trainer.state.model.model.bert.encoder.layer[1]
    layer.register_forward_pre_hook(lambda _m, inputs: dtypes.add(inputs[0].dtype))
    fit_and_close(trainer)
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
    assert_not_engaged(trainer, "1 of 5 modules have another class again")


@pytest.mark.usefixtures("without_gpu")
def test_a_forward_pass_that_raises_leaves_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer([FastLayerNorm("apex")])
    monkeypatch.setattr(type(trainer.state.model.model.bert.pooler), "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit_and_close(trainer)
    assert not any(m._forward_hooks for m in trainer.state.model.modules())


def test_kernels_in_compiled_graphs_are_found_in_dynamos_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    def _layer_norm_forward_kernel() -> None: ...

    monkeypatch.setattr(kernel_side_table, "id_to_kernel", {})
    assert not in_compiled_graphs()
    kernel_side_table.id_to_kernel[0] = _layer_norm_forward_kernel
    assert not in_compiled_graphs(), "a kernel of another library"
    _layer_norm_forward_kernel.__module__ = "liger_kernel.ops.layer_norm"
    assert in_compiled_graphs()


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
