"""fused_layers with dropout: each site drops at its rate, and the backward pass uses the same masks.

tests/kernels/test_kernels.py tests the Triton layer. These tests are of the layer in plain PyTorch and of models.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from composer_speedups.algorithms.fused_layers.fusing import fuse
from composer_speedups.algorithms.fused_layers.modules import FusedLayer, plain_layer
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.families.family import DropoutRates
from composer_speedups.kernels.dropout import draw_seeds
from tests.helpers.common import batch
from tests.helpers.exhaustive import family_params
from tests.helpers.models import FAMILIES, tiny_model
from tests.helpers.unpadded import observed
from tests.reference.masked_layer import (
    HIDDEN,
    LENGTHS,
    SITES,
    check_rates,
    masked_layer,
    masks_of,
    modules_on,
    only,
    plan_on,
    slope_over_norm,
    with_gradients,
)
from tests.reference.tolerance import assert_near

INPUTS = batch([12, 3, 9, 7])


def fused(model: Any, last_layer: Any = "needed") -> Any:
    model.config.problem_type = "single_label_classification"
    unpad(model)
    fuse(model, last_layer)
    return model.train()


def without_dropout(model: nn.Module) -> Any:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def set_dropout(site: str, layer: Any, rate: float) -> None:
    """Set the dropout rate of one site in a BERT layer."""
    modules = {"attention_weights": layer.attention.self.dropout, "attention": layer.attention.output.dropout}
    modules.get(site, layer.output.dropout).p = rate


def test_every_site_of_every_layer_draws_its_own_seed() -> None:
    """A constant seed would drop the same elements in every layer and step."""
    device = torch.device("cpu")
    drawn = [int(seed) for _ in range(4) for seed in draw_seeds(3, device, dropout=True)]
    assert len(set(drawn)) == 12
    state = torch.get_rng_state()
    assert [int(seed) for seed in draw_seeds(3, device, dropout=False)] == [0, 0, 0]
    torch.testing.assert_close(torch.get_rng_state(), state, rtol=0, atol=0)


@pytest.mark.parametrize("site", SITES)
def test_each_dropout_site_of_the_plain_layer_matches_the_reference(site: str) -> None:
    """Result and gradients equal those of the reference layer under the same masks."""
    torch.manual_seed(0)
    rates, plan, modules = only(site, 0.5), plan_on("cpu"), modules_on("cpu")
    masks = masks_of(plain_layer, rates, "cpu", 3)
    check_rates(masks, rates)
    x, grad = torch.randn(2, sum(LENGTHS), HIDDEN)
    torch.manual_seed(3)
    ours = with_gradients(lambda x, modules: plain_layer(x, modules, rates, plan), x, modules, grad)
    theirs = with_gradients(lambda x, modules: masked_layer(x, modules, rates, masks), x, modules, grad)
    assert_near(ours, theirs, what=site)


@pytest.mark.parametrize("last_layer", ["needed", "all"])
@pytest.mark.parametrize("site", [*SITES, "embeddings"])
def test_each_dropout_site_of_a_model_uses_the_same_mask_in_both_passes(site: str, last_layer: Any) -> None:
    """The site is in the last layer, which computes only first tokens if ``last_layer`` is "needed"."""
    model = fused(without_dropout(tiny_model("bert")), last_layer).double()
    layers = [module for module in model.modules() if isinstance(module, FusedLayer)]

    def loss() -> torch.Tensor:
        return model(**INPUTS).loss  # type: ignore[no-any-return]

    assert torch.equal(loss(), loss()), "no other site drops"
    if site == "embeddings":
        model.bert.embeddings.dropout.p = 0.5
    else:
        set_dropout(site, layers[-1], 0.5)
    values = {float(loss().detach()) for _ in range(4)}
    assert len(values) == 4
    assert observed(loss)["first_tokens"] == (last_layer == "needed")
    assert slope_over_norm(loss, list(model.parameters()), 5, 1e-5) == pytest.approx(1, abs=1e-4)
    model.eval()
    assert torch.equal(loss(), loss())


@pytest.mark.parametrize("family", family_params(FAMILIES))
def test_fused_layers_have_their_models_dropout_rates(family: Any) -> None:
    model = fused(tiny_model(family, dropout=0.25, attention_dropout=0.125))
    layers = [module for module in model.modules() if isinstance(module, FusedLayer)]
    # DistilBERT does not apply dropout to the attention output.
    expected = DropoutRates(0.125, 0.0 if family == "distilbert" else 0.25, 0.25)
    assert [layer.rates() for layer in layers] == [expected] * 2
    model.eval()
    assert [layer.rates() for layer in layers] == [DropoutRates(0.0, 0.0, 0.0)] * 2
    assert [layer.rates(in_training=True) for layer in layers] == [expected] * 2
