"""Parameters that change after fusing: the changed layer runs its own forward on the packed tokens."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_speedups import apply_fused_layers, apply_unpadding
from composer_speedups.algorithms.fused_layers.functional import unfused_layers
from composer_speedups.algorithms.fused_layers.modules import FusedLayer
from composer_speedups.core.stock import Untouched
from tests.helpers.common import batch, tiny_bert
from tests.helpers.exhaustive import family_params
from tests.helpers.models import FUSED, Family, tiny_model
from tests.reference.tolerance import assert_near


def linears(layer: nn.Module) -> list[nn.Linear]:
    return [module for module in layer.modules() if isinstance(module, nn.Linear)]


def remove_a_bias(layer: nn.Module) -> None:
    first = next(each for each in linears(layer) if each.bias is not None)
    first.bias = None  # type: ignore[assignment]


def add_a_bias(layer: nn.Module) -> None:
    first = next(each for each in linears(layer) if each.bias is None)
    first.bias = nn.Parameter(torch.full((first.out_features,), 0.5))


def quantize(layer: nn.Module) -> None:
    quantization: Any = pytest.importorskip("torchao.quantization", reason="torchao quantizes the layer")
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())


def change_the_type(layer: nn.Module) -> None:
    class Subclass(nn.Parameter):
        pass

    first = linears(layer)[0]
    first.weight = Subclass(first.weight.detach() * 2)


CHANGES = [remove_a_bias, quantize, change_the_type]


@pytest.mark.filterwarnings(
    "ignore:.*Deprecation.*torchao:UserWarning", "ignore:Config Deprecation:UserWarning"
)  # torchao's own
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", family_params(FUSED))
def test_a_layer_whose_parameters_change_runs_its_own_forward(
    family: Family, change: Callable[[nn.Module], None]
) -> None:
    if family == "modernbert" and change is remove_a_bias:
        change = add_a_bias  # its layers have none
    model = tiny_model(family).eval()
    ours = copy.deepcopy(model)
    apply_unpadding(ours)
    apply_fused_layers(ours, "all")
    for each in (model, ours):
        layers = [m for m in each.modules() if type(m) is type(layer_of(each))]
        change(layers[0])
    fused = [module for module in ours.modules() if isinstance(module, FusedLayer)]
    inputs = batch([6, 9, 3])
    del inputs["labels"]
    with torch.no_grad():
        assert_near([ours(**inputs).logits], [model(**inputs).logits])
    assert [layer.ran for layer in fused] == ["unfused", "torch"]
    (reason,) = unfused_layers(ours).values()
    assert not reason.endswith("was changed"), "it says what was"


def layer_of(model: nn.Module) -> nn.Module:
    """The first block of the model's encoder."""
    return next(m[0] for m in model.modules() if isinstance(m, nn.ModuleList))


@pytest.mark.parametrize("family", family_params(FUSED))
def test_what_training_does_to_parameters_is_no_change(family: Family) -> None:
    model = tiny_model(family)
    apply_unpadding(model)
    apply_fused_layers(model)
    fused = [module for module in model.modules() if isinstance(module, FusedLayer)]
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    for layer in fused:
        for parameter in layer.parameters():
            parameter.requires_grad_(False)
    model.double().float()
    assert all(layer.untouched.still() for layer in fused)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        again = [module for module in copied.modules() if isinstance(module, FusedLayer)]
        assert all(layer.untouched.still() for layer in again)
        linears(again[0])[0].weight = None
        assert [layer.untouched.still() for layer in (again[0], fused[0])] == [False, True], "a copy looks at itself"


def test_shards_of_fsdp_are_no_change() -> None:
    """Outside of the forward pass FSDP's parameters are DTensors, whose class replaces nn.Parameter."""
    layer = nn.Sequential(nn.Linear(2, 2))
    untouched = Untouched.inside(layer)
    untouched._types = [DTensor, DTensor]  # as if the snapshot had been taken of the shards
    assert untouched.still()
    untouched._types = [DTensor]
    assert not untouched.still()


def test_an_embedding_without_its_norms_bias_runs_the_stock_code() -> None:
    model = tiny_bert()
    apply_unpadding(model)
    apply_fused_layers(model)
    embeddings: Any = model.bert.embeddings
    assert embeddings.untouched.still()
    embeddings.LayerNorm.bias = None
    assert not embeddings.untouched.still()
