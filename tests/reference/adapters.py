"""Compare fused layers with LoRA adapters with PEFT's own modules; run like :mod:`tests.reference.fused_kernels`.

The dropout masks of adapters are read from the kernel that draws them, and PEFT's modules then use the same masks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional as F

from composer_speedups.algorithms.fused_layers.float8_layer import OPERANDS, float8_layer
from composer_speedups.algorithms.fused_layers.layer import fused_layer
from composer_speedups.core.adapters import adapter_of
from composer_speedups.families.family import DropoutRates, LayerModules
from composer_speedups.kernels.dropout import draw_seeds, dropped
from composer_speedups.kernels.float8 import new_scales
from tests.reference.fused_kernels import DEVICE, near, plain_attention, random, seed
from tests.reference.masked_layer import HEADS, LENGTHS, modules_on

TOKENS, SEED = sum(LENGTHS), 5
LINEARS = ("query", "key", "value", "out", "up", "down")
NONE = DropoutRates(0.0, 0.0, 0.0)
Adapters = dict[str, tuple[int, float]]  # Linear → rank and dropout


class Masked(nn.Module):
    """Stands for an adapter's dropout, with a known mask."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


def modules_with(adapters: Adapters, train: Sequence[str] = ()) -> LayerModules:
    """Return a layer's modules with frozen parameters, except for the adapters and for names that end in ``train``."""
    modules = modules_on(DEVICE)
    for module in modules[:-1]:
        for name, parameter in module.named_parameters():  # type: ignore[union-attr]
            parameter.requires_grad_(name in train)
    adapted: Any = {}
    for name, (rank, dropout) in adapters.items():
        config = LoraConfig(r=rank, lora_alpha=3 * rank, lora_dropout=dropout, init_lora_weights=False)
        adapted[name] = LoraLinear(getattr(modules, name), "default", config=config, r=rank, lora_alpha=3 * rank).to(
            DEVICE
        )
        nn.init.normal_(adapted[name].lora_B["default"].weight, std=0.2)
    return modules._replace(**adapted)


def trained(modules: LayerModules) -> list[Tensor]:
    return [p for module in modules[:-1] for p in module.parameters() if p.requires_grad]  # type: ignore[union-attr]


def of_peft(x_TH: Tensor, modules: LayerModules) -> Tensor:
    """Compute the layer by calling its modules."""
    qkv = torch.cat([modules.query(x_TH), modules.key(x_TH), modules.value(x_TH)], 1)
    hidden = modules.attention_norm(modules.out(plain_attention(qkv, LENGTHS, HEADS)) + x_TH)
    return modules.output_norm(modules.down(F.gelu(modules.up(hidden))) + hidden)


def use_masks(modules: LayerModules) -> None:
    """Replace each adapter's dropout by the mask that the fused layer draws after ``torch.manual_seed(SEED)``."""
    torch.manual_seed(SEED)
    seeds = draw_seeds(9, torch.device(DEVICE), dropout=True)[3:]
    for linear, own in zip(modules.linears(), seeds, strict=True):
        adapter = adapter_of(linear)
        if adapter is not None and adapter.dropout > 0:
            ones = torch.ones(TOKENS, adapter.a.shape[1], device=DEVICE)
            mask = dropped(ones, adapter.dropout, own)
            assert abs(float((mask == 0).float().mean()) - adapter.dropout) < 0.1
            linear.lora_dropout["default"] = Masked(mask)  # type: ignore[index, operator]


def tokens() -> tuple[Tensor, int]:
    return torch.tensor([0, *LENGTHS], device=DEVICE).cumsum(0).to(torch.int32), 16


def compare(adapters: Adapters, *, train: Sequence[str] = (), input_gradient: bool = True) -> None:
    modules = modules_with(adapters, train)
    x, grad = random(TOKENS, modules.query.in_features), random(TOKENS, modules.query.in_features)
    results: list[list[Tensor]] = []
    for function in (lambda x: fused_layer(x, modules, NONE, *tokens()), lambda x: of_peft(x, modules)):
        leaf = x.clone().requires_grad_(input_gradient)
        if results:
            use_masks(modules)
        torch.manual_seed(SEED)
        result = function(leaf)
        wanted = [*([leaf] if input_gradient else []), *trained(modules)]
        results.append([result, *torch.autograd.grad(result, wanted, grad)])
    for i, (ours, theirs) in enumerate(zip(*results, strict=True)):
        near(f"layer with adapters, {'its result' if i == 0 else f'gradient {i}'}", ours, theirs)


def compare_float8() -> None:
    """Check that errors are within 8-bit rounding; the adapters' own products and gradients are in 16 bits."""
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    for dropout in (0.0, 0.2):
        modules = modules_with(dict.fromkeys(LINEARS, (4, dropout)))
        rows = new_scales(len(OPERANDS), torch.device(DEVICE))
        x, grad = 0.5 * random(TOKENS, 64), random(TOKENS, 64)
        results = []
        for float8 in (True, False):
            if not float8:
                use_masks(modules)
            torch.manual_seed(SEED)
            leaf = x.to(dtype if float8 else torch.float32).requires_grad_()
            if float8:
                result = float8_layer(leaf, modules, NONE, *tokens(), rows, learn=True)
            else:
                result = of_peft(leaf, modules)
            gradients = torch.autograd.grad(result, [leaf, *trained(modules)], grad.to(result.dtype))
            results.append([result, *gradients])
        for i, (ours, theirs) in enumerate(zip(*results, strict=True)):
            what = f"8-bit layer with adapters, {'its result' if i == 0 else f'gradient {i}'}"
            distance = float((ours.float() - theirs).norm() / theirs.norm())
            assert 0 < distance < 0.35, (what, distance)
            print(what, "agrees")


def compare_dropout() -> None:
    """Check the kernel: rates, values, sums in place, the same mask again, and another mask for another seed."""
    x = random(37, 300)
    for rate in (0.1, 0.5):
        result = dropped(x, rate, seed())
        mask = dropped(torch.ones_like(x), rate, seed())
        assert abs(float((mask == 0).float().mean()) - rate) < 0.02
        near(f"dropout of {rate}", result, x * mask)
        assert set(mask.unique().tolist()) == {0.0, mask.max().item()}
        near("its scale", mask.max(), torch.tensor(1 / (1 - rate), device=DEVICE))
        total = random(37, 300)
        expected = total + result
        near("its sum in place", dropped(x, rate, seed(), add_to=total), expected)
        near("which is the tensor", total, expected)
        assert not torch.equal(dropped(x, rate, seed(6)), result)


if __name__ == "__main__":
    torch.manual_seed(0)
    compare_dropout()
    compare(dict.fromkeys(LINEARS, (4, 0.0)))
    compare({"query": (3, 0.0), "value": (8, 0.0), "down": (1, 0.0)}, train=["bias"], input_gradient=False)
    compare(dict.fromkeys(LINEARS, (4, 0.3)), train=["weight"])
    compare({"key": (2, 0.4), "value": (5, 0.0), "out": (4, 0.2)})
    compare({})
    compare({}, train=["bias"])
    compare_float8()
    sys.exit(0)
