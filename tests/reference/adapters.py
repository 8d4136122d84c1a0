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

from composer_speedups.algorithms.fused_layers.layer import OPERANDS, fused_layer
from composer_speedups.core.stock import adapter_of
from composer_speedups.families.family import DropoutRates, LayerModules
from composer_speedups.kernels.dropout import draw_seeds, dropped
from composer_speedups.kernels.float8 import GRADIENT, Float8, new_scales
from composer_speedups.kernels.narrow import adapter_gradients, gelu_backward_narrow, gelu_narrow, narrow_gradient
from tests.reference.fused_kernels import (
    DEVICE,
    agree,
    check_cast,
    gated_layers,
    in_another_layout,
    near,
    offsets,
    plain_attention,
    random,
    seed,
)
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
    nn.init.normal_(modules.attention_norm.weight)
    modules.attention_norm.weight = nn.Parameter(in_another_layout(modules.attention_norm.weight.detach()))
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


def of_peft(x_TH: Tensor, modules: LayerModules, gelu: str = "none") -> Tensor:
    """Compute the layer by calling its modules."""
    qkv = torch.cat([modules.query(x_TH), modules.key(x_TH), modules.value(x_TH)], 1)
    hidden = modules.attention_norm(modules.out(plain_attention(qkv, LENGTHS, HEADS)) + x_TH)
    return modules.output_norm(modules.down(F.gelu(modules.up(hidden), approximate=gelu)) + hidden)


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
    return offsets(LENGTHS), 16


def compare(adapters: Adapters, *, train: Sequence[str] = (), input_gradient: bool = True, gelu: str = "none") -> None:
    modules = modules_with(adapters, train)
    x, grad = random(TOKENS, modules.query.in_features), random(TOKENS, modules.query.in_features)
    x.requires_grad_(input_gradient)
    torch.manual_seed(SEED)
    ours = fused_layer(x, modules, NONE, *tokens(), tanh=gelu == "tanh")
    use_masks(modules)
    torch.manual_seed(SEED)
    leaves = [*([x] if input_gradient else []), *trained(modules)]
    agree("layer with adapters", ours, of_peft(x, modules, gelu), leaves, grad)


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
                result = fused_layer(leaf, modules, NONE, *tokens(), scales=rows, learn=True)
            else:
                result = of_peft(leaf, modules)
            gradients = torch.autograd.grad(result, [leaf, *trained(modules)], grad.to(result.dtype))
            results.append([result, *gradients])
        for i, (ours, theirs) in enumerate(zip(*results, strict=True)):
            what = f"8-bit layer with adapters, {'its result' if i == 0 else f'gradient {i}'}"
            distance = float((ours.float() - theirs).norm() / theirs.norm())
            # Without the share of the adapters of Q, K and V, the input's gradient differs by 0.28.
            assert 0 < distance < (0.24 if i == 1 else 0.35), (what, distance)
            print(what, "agrees")


def of_adapters(dy: Tensor, each_b: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return both results of the kernel for Linears' adapters as one vector, and the same by matmuls."""
    ranks = [b.shape[1] for b in each_b]
    z = random(len(dy), sum(ranks)) / len(dy) ** 0.5
    product, gradient = adapter_gradients(dy, z, torch.cat([b.flatten() for b in each_b]), ranks)
    parts = list(zip(dy.chunk(len(ranks), 1), z.split(ranks, 1), each_b, strict=True))
    expected = [torch.cat([part @ b for part, _, b in parts], 1), *(part.t() @ own for part, own, _ in parts)]
    ours = [product.flatten(), gradient.sum(0)]
    return torch.cat([x.float() for x in ours]), torch.cat([x.float().flatten() for x in expected])


def compare_narrow() -> None:
    """Compare the narrow products with matmuls, with more than one strip of columns and group of tokens."""
    for tokens, columns, left_rank, right_rank in ((37, 300, 3, 8), (200, 128, 17, 64), (1, 16, 1, 1)):
        x, grad = 2 * random(tokens, columns), random(tokens, columns)
        left, other = (random(tokens, rank) / tokens**0.5 for rank in (left_rank, right_rank))
        right = random(columns, right_rank) / columns**0.5
        near("narrow gradient", narrow_gradient(x, left).sum(0), left.t() @ x)
        near("gradients of a Linear", *of_adapters(x, [right]))
        for ranks in ([3, 0, 16], [0, 2, 1], [5, 5, 5]):
            near(
                "gradients of three Linears",
                *of_adapters(random(tokens, 3 * columns), [random(columns, r) for r in ranks]),
            )
        result, of_gelu = gelu_narrow(x, right.t().contiguous().t())  # as a layer passes A, without a copy
        near("GELU with a narrow product", result, F.gelu(x))
        near("its product", of_gelu, F.gelu(x) @ right)
        assert gelu_narrow(x, right, write=False)[0] is None
        leaf = x.clone().requires_grad_()
        F.gelu(leaf).backward(grad)
        d_x = leaf.grad
        found = gelu_backward_narrow(grad.clone(), x, other, right, left)
        summed = (*found[:2], found[2].sum(0), found[3].sum(0))
        expected = (d_x, d_x @ right, d_x.t() @ other, left.t() @ F.gelu(x))
        for what, ours, theirs in zip(("gradient", "product", "gradient's", "result's"), summed, expected, strict=True):
            near(f"GELU's {what} with narrow products", ours, theirs)
        alone = gelu_backward_narrow(grad.clone(), x, result_left_TR=left)
        near("GELU's result alone", alone[3], found[3])
        assert alone[1:3] == (None, None)
        rows = new_scales(1, torch.device(DEVICE))
        operand = Float8.like(x, GRADIENT, rows[0])
        d_x = gelu_backward_narrow(1e-6 * grad, x, other, right, operand=operand)[0]
        check_cast("GELU's gradient with narrow products in 8 bits", operand, d_x)


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
    compare_narrow()
    compare(dict.fromkeys(LINEARS, (4, 0.0)))
    compare({"query": (3, 0.0), "value": (8, 0.0), "down": (1, 0.0)}, train=["bias"], input_gradient=False)
    compare(dict.fromkeys(LINEARS, (4, 0.3)), train=["weight"])
    compare({"key": (2, 0.4), "value": (5, 0.0), "out": (4, 0.2)})
    many_ranks = {"value": (40, 0.0), "key": (40, 0.0), "up": (70, 0.0), "down": (2, 0.0)}  # more than the kernels take
    compare(many_ranks)
    compare({"down": (4, 0.0)})
    compare({"up": (4, 0.0)})
    compare({})
    compare({}, train=["bias"])
    compare({}, train=["weight", "bias"], gelu="tanh")
    compare(dict.fromkeys(LINEARS, (4, 0.0)), gelu="tanh")
    compare(dict.fromkeys(LINEARS, (4, 0.3)), train=["bias"], gelu="tanh")
    compare({"up": (4, 0.3), "down": (4, 0.0)}, train=["weight"], gelu="tanh")
    gated_layers(7, first=False, dropouts=[], frozen=["qkv", "down", "attention_norm"])
    gated_layers(None, first=True, dropouts=[], frozen=["out", "up", "output_norm"])
    compare_float8()
    sys.exit(0)
