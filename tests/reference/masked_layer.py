"""An encoder layer with given dropout masks: the reference for a fused layer once its masks are known.

A fused layer's masks are read from its output, under weights that make one dropout site visible at a time.

Shapes: T packed tokens of all rows, H hidden units, A heads, L tokens of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from composer_speedups.families.family import DropoutRates, LayerModules
from composer_speedups.packing.layout import Layout, lay_out

LENGTHS = [4, 0, 11, 1]  # below 16: see masks_of
HEADS, HIDDEN, INNER = 2, 64, 64
SIZE = HIDDEN // HEADS
SITES = ("attention_weights", "attention", "output")  # the fields of DropoutRates
Layer = Callable[[Tensor, LayerModules, DropoutRates, Layout], Tensor]


class Masks(NamedTuple):
    """Dropout masks, 1 for kept numbers: each row's attention weights (A, L, L), and two outputs (T, H)."""

    attention_weights: list[Tensor]
    attention: Tensor
    output: Tensor


def plan_on(device: str) -> Layout:
    lengths = torch.tensor(LENGTHS, device=device)
    return lay_out(torch.arange(max(LENGTHS), device=device) < lengths[:, None], sum(LENGTHS), 1)


def modules_on(device: str) -> LayerModules:
    """Return modules with random parameters."""
    sizes = [(HIDDEN, HIDDEN)] * 4 + [(HIDDEN, INNER), (INNER, HIDDEN)]
    query, key, value, out, up, down = (nn.Linear(*size, device=device) for size in sizes)
    norms = [nn.LayerNorm(HIDDEN, device=device) for _ in range(2)]
    modules = LayerModules(query, key, value, out, norms[0], up, down, norms[1], HEADS)
    for parameter in modules.parameters():
        nn.init.normal_(parameter, std=0.3)
    return modules


def only(site: str, rate: float) -> DropoutRates:
    return DropoutRates(**{**dict.fromkeys(SITES, 0.0), site: rate})


def masks_of(layer: Layer, rates: DropoutRates, device: str, number: int) -> Masks:
    """Return the masks that the layer draws after ``torch.manual_seed(number)``, reading one site at a time.

    A site with a rate of 0 has a mask of ones.
    """
    plan, tokens = plan_on(device), sum(LENGTHS)
    modules = modules_on(device)
    with torch.no_grad():
        for parameter in modules.parameters():
            parameter.zero_()
        modules.attention_norm.weight.fill_(1)
        modules.output_norm.weight.fill_(1)

    def visible(site: str, x_TH: Tensor) -> Tensor:
        torch.manual_seed(number)
        return layer(x_TH, modules, only(site, getattr(rates, site)), plan).detach()

    # Attention is uniform, and each key's value is 1 in a unit of its own. The input is in the units from SIZE / 2 on,
    # so the residual does not reach these units. LayerNorm keeps the order of a token's units; the last unit's value
    # is 0.
    x_TH = torch.zeros(tokens, HIDDEN, device=device)
    starts = [sum(LENGTHS[:row]) for row in range(len(LENGTHS))]
    for start, length in zip(starts, LENGTHS, strict=True):
        x_TH[start + torch.arange(length), SIZE // 2 + torch.arange(length)] = 1
    units = torch.arange(SIZE // 2 - 1)
    with torch.no_grad():
        for head in range(HEADS):
            modules.value.weight[head * SIZE + units, SIZE // 2 + units] = 1
        modules.out.weight.copy_(torch.eye(HIDDEN))
    kept = visible("attention_weights", x_TH)
    kept = (kept > kept[:, -1:] + 1e-3).float().unflatten(1, (HEADS, SIZE)).transpose(0, 1)
    weights = [kept[:, s : s + n, :n] for s, n in zip(starts, LENGTHS, strict=True)]
    # The input of dropout is ones. After LayerNorm, kept numbers are above 0 and dropped ones below; if a token has
    # no dropped number, all are 0.
    x_TH.zero_()
    with torch.no_grad():
        modules.out.weight.zero_()
        modules.out.bias.fill_(1)
    attention = (visible("attention", x_TH) >= 0).float()
    with torch.no_grad():
        modules.out.bias.zero_()
        modules.down.bias.fill_(1)
    return Masks(weights, attention, (visible("output", x_TH) >= 0).float())


def masked_layer(x_TH: Tensor, modules: LayerModules, rates: DropoutRates, masks: Masks) -> Tensor:
    """Compute the layer under the masks: (T, H) → (T, H)."""
    rows, start = [], 0
    for length, mask in zip(LENGTHS, masks.attention_weights, strict=True):
        x = x_TH[start : start + length]
        start += length
        q, k, v = (m(x).view(length, HEADS, SIZE).transpose(0, 1) for m in (modules.query, modules.key, modules.value))
        weights = (q @ k.transpose(1, 2) * SIZE**-0.5).softmax(-1) * mask / (1 - rates.attention_weights)
        rows.append((weights @ v).transpose(0, 1).reshape(length, HIDDEN))
    projected = modules.out(torch.cat(rows)) * masks.attention / (1 - rates.attention)
    hidden = modules.attention_norm(projected + x_TH)
    down = modules.down(F.gelu(modules.up(hidden))) * masks.output / (1 - rates.output)
    return modules.output_norm(down + hidden)


def check_rates(masks: Masks, rates: DropoutRates) -> None:
    """Check that each site drops the fraction of its rate, within four standard deviations."""
    flat = [torch.cat([mask.flatten() for mask in masks.attention_weights]), masks.attention, masks.output]
    for site, mask, rate in zip(SITES, flat, rates, strict=True):
        dropped = 1 - float(mask.mean())
        assert abs(dropped - rate) <= 4 * (rate * (1 - rate) / mask.numel()) ** 0.5, f"{dropped} of {site}, not {rate}"


def slope_over_norm(loss: Callable[[], Tensor], leaves: Sequence[Tensor], number: int, step: float) -> float:
    """Return the loss's numerical derivative along its gradient, over the gradient's norm: 1 if the gradient is right.

    ``number`` is the seed of each call, and ``step`` the norm of the step to either side, over all leaves together.
    """

    def at(distance: float, direction: Sequence[Tensor]) -> float:
        with torch.no_grad():
            for leaf, before, along in zip(leaves, befores, direction, strict=True):
                leaf.copy_(before + distance * along)
            torch.manual_seed(number)
            value = float(loss())
            for leaf, before in zip(leaves, befores, strict=True):
                leaf.copy_(before)
        return value

    befores = [leaf.detach().clone() for leaf in leaves]
    torch.manual_seed(number)
    gradients = torch.autograd.grad(loss(), list(leaves), allow_unused=True)
    known = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(gradients, leaves, strict=True)]
    norm = float(torch.stack([g.double().square().sum() for g in known]).sum().sqrt())
    along = [g / norm for g in known]
    return (at(step, along) - at(-step, along)) / (2 * step) / norm
