"""Check the dropout of the fused layer and embeddings; run like :mod:`tests.reference.fused_kernels`.

Every dropout mask is read from the forward pass. Result and gradients are then compared with a layer in plain PyTorch
under the same masks, so a backward pass with other masks fails.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from composer_speedups.algorithms.fused_layers.layer import fused_layer
from composer_speedups.families.family import DropoutRates, LayerModules
from composer_speedups.kernels.embeddings import embed
from composer_speedups.packing.layout import Layout
from tests.reference.fused_kernels import DEVICE, agree, random
from tests.reference.masked_layer import (
    HIDDEN,
    LENGTHS,
    check_rates,
    masked_layer,
    masks_of,
    modules_on,
    only,
    plan_on,
    slope_over_norm,
)

SEED = 11
# On a GPU, Triton computes float32 matmuls in TF32, whose noise needs longer steps.
STEP, BOUND = (1e-3, 0.01) if DEVICE == "cpu" else (1e-2, 0.05)


def check_layer(rates: DropoutRates) -> None:
    """Compare the layer with one in plain PyTorch under the same masks."""
    plan, modules, x = plan_on(DEVICE), modules_on(DEVICE), random(sum(LENGTHS), HIDDEN).requires_grad_()

    def layer(x_TH: Tensor, modules: LayerModules, rates: DropoutRates, plan: Layout) -> Tensor:
        return fused_layer(x_TH, modules, rates, plan.cu_seqlens, plan.longest)

    masks = masks_of(layer, rates, DEVICE, SEED)
    check_rates(masks, rates)
    torch.manual_seed(SEED)
    ours, theirs = layer(x, modules, rates, plan), masked_layer(x, modules, rates, masks)
    agree(f"layer that drops {tuple(rates)}", ours, theirs, [x, *modules.parameters()])


def check_embeddings(rate: float) -> None:
    rows, width = 4, 20
    ids = torch.randint(0, 30, (rows, width), device=DEVICE)
    positions, types = torch.arange(width, device=DEVICE)[None], torch.zeros(1, width, dtype=torch.long, device=DEVICE)
    tables: list[Any] = [random(n, HIDDEN).requires_grad_() for n in (30, width, 2)]
    norm: list[Any] = [random(HIDDEN).requires_grad_() for _ in range(2)]

    def embedded() -> Tensor:
        word, position, kind, weight, bias = (*tables, *norm)
        return embed(ids, positions, types, word, position, kind, weight, bias, 1e-5, rate, torch.float32, (-1, -1))

    torch.manual_seed(SEED)
    first, second = embedded(), embedded()
    torch.manual_seed(SEED)
    assert torch.equal(embedded(), first)
    assert not torch.equal(first, second)
    assert abs(float((first == 0).float().mean()) - rate) < 0.02
    grad = random(*first.shape)
    found = slope_over_norm(lambda: (embedded() * grad).double().sum(), [*tables, *norm], SEED, STEP)
    assert abs(found - 1) < BOUND, f"embeddings at {rate}: the slope is {found} of the gradient's norm"
    print(f"embeddings that drop {rate}: the slope is {found:.4f} of the gradient's norm")


if __name__ == "__main__":
    torch.manual_seed(0)
    # In the interpreter, which is slow, one setting is enough: masks_of reads one site at a time anyway.
    given = [DropoutRates(0.3, 0.2, 0.4)]
    if DEVICE == "cuda":
        given += [only(site, 0.5) for site in DropoutRates._fields]
    for rates in given:
        check_layer(rates)
    check_embeddings(0.3)
    sys.exit(0)
