"""Low-precision LayerNorm: it returns the autocast dtype, and the modules remain the same objects."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from composer_speedups import FastLayerNorm, MixedPrecision, apply_fast_layernorm
from composer_speedups.algorithms.fast_layernorm.layers import LowPrecisionLayerNorm
from composer_speedups.core.errors import TechniqueError
from composer_speedups.packing.derived_classes import swap_class
from composer_speedups.surgery.already_applied import NoEffectWarning
from tests.helpers.common import make_trainer, tiny_bert
from tests.reference.tolerance import assert_near


@pytest.mark.parametrize("shape", [(1, 16), (3, 5, 16), (1, 1, 16), (0, 16)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.pins
def test_outputs_and_gradients_match_layernorm(shape: tuple[int, ...], affine: bool) -> None:
    torch.manual_seed(0)
    reference = nn.LayerNorm(16, elementwise_affine=affine)
    if affine:
        nn.init.normal_(reference.weight)
        nn.init.normal_(reference.bias)
    changed = copy.deepcopy(reference)
    swap_class(changed, nn.LayerNorm, LowPrecisionLayerNorm)
    x, y = (torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    expected = reference(x)
    with torch.autocast("cpu", torch.bfloat16):
        actual = changed(y)
    assert actual.dtype == torch.bfloat16
    assert reference(x).dtype == torch.float32
    upstream = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    expected.backward(upstream)
    actual.backward(upstream.bfloat16())
    assert_near([actual.float(), y.grad], [expected, x.grad], torch.bfloat16)
    for one, other in zip(changed.parameters(), reference.parameters(), strict=True):
        assert_near([one.grad], [other.grad], torch.bfloat16)


def test_without_autocast_it_is_plain_layernorm() -> None:
    reference = nn.LayerNorm(8)
    changed = copy.deepcopy(reference)
    swap_class(changed, nn.LayerNorm, LowPrecisionLayerNorm)
    x = torch.randn(3, 8)
    torch.testing.assert_close(changed(x), reference(x), rtol=0, atol=0)


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


def test_the_residual_stream_of_a_run_is_bf16() -> None:
    dtypes: list[torch.dtype] = []
    trainer = make_trainer([FastLayerNorm(), MixedPrecision("bf16", allow_cpu=True)])
    layer = trainer.state.model.model.bert.encoder.layer[1]  # type: ignore[union-attr]
    layer.register_forward_pre_hook(lambda _m, inputs: dtypes.append(inputs[0].dtype))
    trainer.fit()
    trainer.close()
    assert set(dtypes) == {torch.bfloat16}
