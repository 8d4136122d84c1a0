"""Compare attention with a bias by distance, and the layers that use it or rotary positions, with plain PyTorch.

Like ``tests.reference.disentangled_kernels``, this program needs a process of its own, on the CPU under
TRITON_INTERPRET=1, or on a GPU.
"""

from __future__ import annotations

import copy
import sys
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from composer_speedups.algorithms.fused_layers.fusing import fuse
from composer_speedups.algorithms.fused_layers.layer import Positions, fused_layer
from composer_speedups.algorithms.fused_layers.modules import FusedLayer
from composer_speedups.algorithms.fused_layers.pre_norm_layers import pre_norm_layer
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.families.blocks import repeated_blocks
from composer_speedups.families.family import DropoutRates, family_named
from composer_speedups.kernels.attention import attention_backward, attention_forward, biased_attention
from composer_speedups.kernels.host import counting
from composer_speedups.packing import attention
from composer_speedups.packing.attention import PositionBias
from composer_speedups.packing.layout import lay_out
from tests.helpers.common import batch
from tests.helpers.models import tiny_model
from tests.reference.fused_kernels import DEVICE, check_slopes, kept_weights, near, random, seed

LENGTHS = [5, 0, 70, 1, 37, 130]
LONGEST = 192
CU = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device=DEVICE)


def plain(
    qkv: Tensor,
    bias: Tensor,
    masks: list[Tensor],
    dropout: float = 0.0,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute the same attention with torch's operators, row by row."""
    rows, heads = [], len(bias)
    for (start, end), mask in zip(pairwise(CU.tolist()), masks, strict=True):
        q, k, v = qkv[start:end].unflatten(1, (3, heads, -1)).permute(1, 2, 0, 3)  # (A, S, D)
        slots = torch.arange(end - start, device=DEVICE)
        distances = slots[:, None] - slots
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + bias[:, distances + LONGEST]
        if window is not None:
            scores = scores.masked_fill(distances.abs() > window, float("-inf"))
        weights = scores.softmax(-1) * mask / (1 - dropout)
        rows.append((weights @ v).transpose(0, 1).flatten(1))
    return torch.cat(rows)


def full_masks(heads: int) -> list[Tensor]:
    return [torch.ones(heads, length, length, device=DEVICE) for length in LENGTHS]


def attentions(dropout: float, heads: int, size: int, scale: float | None = None, window: int | None = None) -> None:
    masks = full_masks(heads)
    settings: dict[str, Any] = {"scale": scale, "window": window}
    bias = random(heads, 2 * LONGEST + 1)
    if dropout:
        unbiased = torch.zeros_like(bias)
        masks = kept_weights(
            LENGTHS, heads, lambda qkv: attention_forward(qkv, CU, LONGEST, heads, dropout, seed(), bias=unbiased)[0]
        )
    qkv = random(sum(LENGTHS), 3 * heads * size)
    leaves = [each.clone().requires_grad_() for each in (qkv, bias)]
    expected = plain(leaves[0], leaves[1], masks, dropout, **settings)
    out, logs = attention_forward(qkv, CU, LONGEST, heads, dropout, seed(), bias=bias, **settings)
    near(f"biased attention, dropout {dropout}, {heads} heads of {size}, {settings}", out, expected)
    grad = random(*out.shape)
    expected.backward(grad)
    given = (grad, qkv, out, logs, CU, LONGEST, dropout, seed())
    grad_bias, again = torch.full_like(bias, 7.0), torch.empty_like(bias)
    d_qkv, _ = attention_backward(*given, bias=bias, grad_bias=grad_bias, **settings)
    near("its gradient", d_qkv, leaves[0].grad)
    near("the gradient of its bias", grad_bias, leaves[1].grad)
    attention_backward(*given, bias=bias, grad_bias=again, **settings)
    assert torch.equal(again, grad_bias), "deterministic"


def operators() -> None:
    """Check the operator under autograd, and that dropout has the same mask in both passes.

    With dropout, the result is linear in the values, so values times their gradient must equal result times gradient.
    """
    heads, size = 2, 16
    qkv, bias = random(sum(LENGTHS), 3 * heads * size).requires_grad_(), random(heads, 2 * LONGEST + 1).requires_grad_()
    for scale in (None, 1.0):
        out = biased_attention(qkv, bias, CU, LONGEST, heads, 0.0, scale)
        grad = random(*out.shape)
        actual = torch.autograd.grad(out, [qkv, bias], grad)
        wanted = torch.autograd.grad(plain(qkv, bias, full_masks(heads), scale=scale), [qkv, bias], grad)
        for name, *both in zip(("queries, keys and values", "bias"), actual, wanted, strict=True):
            near(f"the operator's gradient of {name}", *both)
    dropped = biased_attention(qkv, bias, CU, LONGEST, heads, 0.5)
    of_values = torch.autograd.grad(dropped, qkv, grad)[0].chunk(3, 1)[2]
    near("dropout's mask in both passes", (of_values * qkv.chunk(3, 1)[2]).sum(), (dropped * grad).sum())


def layers(name: Any) -> None:
    """Compare a layer with transformers' layer on packed tokens, in float32 and hence with torch's attention."""
    model = tiny_model(name, "tokens").to(DEVICE).train()
    unpad(model, 1)
    family = family_named(name)
    assert family is not None
    assert family.layer_modules is not None
    layer: Any = next(iter(repeated_blocks(model).values()))
    with torch.no_grad():
        for parameter in layer.parameters():  # norms begin as the identity
            parameter.add_(0.2 * random(*parameter.shape))
    mask = torch.arange(max(LENGTHS), device=DEVICE) < torch.tensor(LENGTHS, device=DEVICE)[:, None]
    layout, rates = lay_out(mask, sum(LENGTHS), 1), DropoutRates(0.0, 0.0, 0.0)
    x, grad, results = random(sum(LENGTHS), 32), 0.02 * random(sum(LENGTHS), 32), []
    by_distance = random(2, 2 * layout.longest + 1).requires_grad_()
    angles = random(sum(LENGTHS), 8).repeat(1, 2)
    rotary = (angles.cos(), angles.sin())
    names = ["its input", *dict(layer.named_parameters()), *(["the bias"] if name == "mpnet" else [])]
    modules, rows = family.layer_modules(layer), (layout.cu_seqlens, layout.longest)
    for fused in (True, False):
        leaf = x.clone().requires_grad_()
        if fused and name == "esm":
            result = pre_norm_layer(leaf, modules, rates, rotary, *rows, leaf.dtype)
        elif fused:
            given = Positions(bias=by_distance) if name == "mpnet" else Positions(angles=rotary)
            result = fused_layer(leaf, modules, rates, *rows, given)
        elif name == "mpnet":
            result = layer(leaf.unsqueeze(0), position_bias=PositionBias(layout, by_distance))[0].squeeze(0)
        else:
            positions = tuple(angle.unsqueeze(0) for angle in rotary)
            result = layer(leaf.unsqueeze(0), position_embeddings=positions, layout=layout).squeeze(0)
        of = [leaf, *layer.parameters(), *([by_distance] if name == "mpnet" else [])]
        results.append([result, *torch.autograd.grad(result, of, grad)])
    for what, ours, theirs in zip(["its result", *names], *results, strict=True):
        near(f"{name} layer, {what}", ours, theirs)
    if name == "esm":
        leaf = x.clone().requires_grad_()

        def scalar() -> Tensor:
            torch.manual_seed(3)  # the same dropout masks at each call
            return (pre_norm_layer(leaf, modules, DropoutRates(0.2, 0.3, 0.1), rotary, *rows, x.dtype) * grad).sum()

        check_slopes(scalar, [leaf, modules.query.weight, modules.up.bias])


def frozen_weights() -> None:
    """Compare the pre-norm layer's wanted gradients with those of a layer that computes all, and count matmuls."""
    layer: Any = next(iter(repeated_blocks(tiny_model("esm", "tokens").to(DEVICE).train()).values()))
    family = family_named("esm")
    assert family is not None
    assert family.layer_modules is not None
    modules, tokens = family.layer_modules(layer), sum(LENGTHS)
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device=DEVICE)
    x, grad, angles = random(tokens, 32), 0.02 * random(tokens, 32), random(tokens, 8).repeat(1, 2)
    every = dict(layer.named_parameters())

    def gradients(trained: list[str], *, of_input: bool, rotary: bool) -> tuple[dict[str, Tensor | None], int]:
        """The gradients, and the number of matmuls of the backward pass."""
        for name, parameter in every.items():
            parameter.grad = None
            parameter.requires_grad_(name in trained)
        leaf = x.clone().requires_grad_(of_input)
        positions = (angles.cos(), angles.sin()) if rotary else None
        result = pre_norm_layer(leaf, modules, DropoutRates(0.0, 0.0, 0.0), positions, cu, LONGEST, x.dtype)
        with patch.object(torch, "mm", side_effect=torch.mm) as mm:
            result.backward(grad)
        found: dict[str, Tensor | None] = {name: p.grad for name, p in every.items()}
        return {"its input": leaf.grad, **found}, mm.call_count

    linears = [name for name, p in every.items() if p.dim() == 2]
    for rotary in (True, False):
        exact, all_matmuls = gradients(list(every), of_input=True, rotary=rotary)
        assert all_matmuls == 8, "two per matmul of the forward pass"
        choices = {  # what is trained, whether the input has a gradient, and the number of matmuls
            "all but weights": ([name for name in every if name not in linears], True, 4),
            "only norms": ([name for name in every if "LayerNorm" in name], False, 4),
            "only the value": ([name for name in every if ".value." in name], False, 5),
            "only the query's bias": ([name for name in every if name.endswith("query.bias")], False, 3),
            "output, up and down": ([n for n in linears if ".self." not in n], False, 6),
            "nothing": ([], True, 4),
        }
        for what, (trained, of_input, least) in choices.items():
            found, matmuls = gradients(trained, of_input=of_input, rotary=rotary)
            assert matmuls == least, (what, matmuls)
            for name, gradient in found.items():
                wanted = of_input if name == "its input" else name in trained
                assert (gradient is not None) == wanted, (what, name)
                if gradient is not None:
                    torch.testing.assert_close(gradient, exact[name])  # the same kernels
            print(f"pre-norm layer, rotary {rotary}, {what} trained: agrees")


def by_kernels(layer: Any, hidden: Tensor, *_: Any, **inputs: Any) -> Any:
    """A fused layer's forward with its kernels, in the dtype of its input."""
    packed = layer._packed(inputs)
    return layer.by_kernels(hidden.squeeze(0), packed, hidden.dtype).unsqueeze(0), None


def models(name: Any, *, fused: bool) -> None:
    """Compare the loss and gradients of a whole model with the untouched one's. Its layers share the bias's table."""
    stock = tiny_model(name, "tokens").to(DEVICE).train()
    ours = copy.deepcopy(stock)
    unpad(ours, 1, check="never")
    if fused:
        fuse(ours)
    inputs = {key: value.to(DEVICE) for key, value in batch([70, 5, 37, 1]).items()}
    inputs["labels"] = (inputs["input_ids"] % 2).masked_fill(inputs["attention_mask"] == 0, -100)
    with patch.object(attention, "supports_triton_attention", lambda *_: True):
        # the kernels, in float32 and also on a CPU
        with patch.object(FusedLayer, "forward", by_kernels), counting() as ran:
            losses = [model(**inputs).loss for model in (ours, stock)]
    assert ran["packed_encoder"] == 1
    near(f"{name}'s loss, {'fused' if fused else 'unpadded'}", *losses)
    for loss in losses:
        loss.backward()
    expected = dict(stock.named_parameters())
    for parameter_name, parameter in ours.named_parameters():
        if (parameter.grad is None) != (expected[parameter_name].grad is None):
            raise AssertionError(parameter_name)
        if parameter.grad is not None:
            near(f"the gradient of {parameter_name}", parameter.grad, expected[parameter_name].grad)


def main() -> int:
    torch.manual_seed(0)
    for dropout, heads, size, scale in ((0.0, 2, 16, None), (0.3, 2, 16, None), (0.0, 1, 64, 1.0)):
        attentions(dropout, heads, size, scale)
    for window in (3, 90):
        attentions(0.0, 2, 16, window=window)
    operators()
    for name in ("mpnet", "jina_embeddings_v3", "esm"):
        layers(name)
    frozen_weights()
    models("mpnet", fused=False)
    models("mpnet", fused=True)
    models("t5", fused=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
