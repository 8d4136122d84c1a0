"""Compare attention with a bias by distance or tables, and the layers with positions, with plain PyTorch.

Like ``tests.reference.fused_kernels``, this program needs a process of its own, on the CPU under TRITON_INTERPRET=1, or
on a GPU.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from composer_speedups.algorithms.fused_layers.layer import Positions, fused_layer
from composer_speedups.algorithms.fused_layers.pre_norm_layers import pre_norm_layer
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.families.blocks import repeated_blocks
from composer_speedups.families.family import DropoutRates, family_named
from composer_speedups.kernels import disentangled_attention
from composer_speedups.kernels.attention import biased_attention
from composer_speedups.kernels.disentangled_attention import disentangled_backward, disentangled_forward
from composer_speedups.packing.attention import PositionBias, Relative
from composer_speedups.packing.layout import lay_out
from tests.helpers.models import tiny_model
from tests.reference.fused_kernels import (
    DEVICE,
    agree,
    attentions,
    check_slopes,
    kept_weights,
    near,
    offsets,
    plain_attention,
    random,
    seed,
)

TABLE = 24
LENGTHS: list[int]
LONGEST: int
CU: Tensor
NO_DROPOUT = DropoutRates(0.0, 0.0, 0.0)


def use_lengths(lengths: list[int], longest: int) -> None:
    """Set the rows that all comparisons use; ``longest`` is the greatest number of tokens that the kernels read."""
    global LENGTHS, CU, LONGEST
    LENGTHS, LONGEST, CU = lengths, longest, offsets(lengths)


use_lengths([5, 0, 70, 1, 37, 130], 192)


# DeBERTa's attention: scores of queries with the keys of distances, and of keys with the queries of distances.


def entries() -> Tensor:
    """Return the table entry of each distance, in ascending order: one per small distance, shared by larger ones."""
    distances = torch.arange(-LONGEST, LONGEST + 1, device=DEVICE)
    far = distances.abs()
    buckets = distances.sign() * torch.where(far < 5, far, 4 + far.float().log2().int())
    return (buckets + TABLE // 2).clamp(0, TABLE - 1).int()


def plain_disentangled(qkv: Tensor, positions: Tensor, heads: int, masks: list[Tensor] | None = None) -> Tensor:
    table, scale = positions.view(TABLE, 2, heads, -1), (qkv.shape[1] // heads) ** -0.5

    def bias(q: Tensor, k: Tensor, distances: Tensor) -> Tensor:
        entry = entries()[distances + LONGEST].long()
        by_key = torch.einsum("aid,ijad->aij", q, table[entry, 0])
        return (by_key + torch.einsum("ajd,ijad->aij", k, table[entry, 1])) * scale

    return plain_attention(qkv, LENGTHS, heads, masks, scale=scale, bias=bias)


def disentangled(dropout: float, heads: int, size: int) -> None:
    given = (entries(), CU, LONGEST, heads, dropout, seed())
    no_positions = torch.zeros(TABLE, 2 * heads * 64, device=DEVICE)
    masks = kept_weights(LENGTHS, heads, dropout, lambda qkv: disentangled_forward(qkv, no_positions, *given)[0])
    qkv, positions = random(sum(LENGTHS), 3 * heads * size), random(TABLE, 2 * heads * size)
    leaves = [each.clone().requires_grad_() for each in (qkv, positions)]
    expected = plain_disentangled(leaves[0], leaves[1], heads, masks)
    out, logs = disentangled_forward(qkv, positions, *given)
    near(f"disentangled attention, dropout {dropout}, {heads} heads of {size}", out, expected)
    grad = random(*out.shape)
    expected.backward(grad)
    backward = (grad, qkv, positions, entries(), out, logs, CU, LONGEST, dropout, seed())
    found = disentangled_backward(*backward)
    for name, ours, leaf in zip(("queries, keys and values", "positions"), found, leaves, strict=True):
        near(f"the gradient of its {name}", ours, leaf.grad)
    again = disentangled_backward(*backward)
    assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True)), "deterministic"


def operators() -> None:
    """Check the operators under autograd, and that dropout has the same mask in both passes.

    With dropout, the result is linear in the values, so values times their gradient must equal result times gradient.
    """
    heads, size = 2, 16
    qkv, bias = random(sum(LENGTHS), 3 * heads * size).requires_grad_(), random(heads, 2 * LONGEST + 1).requires_grad_()
    positions = random(TABLE, 2 * heads * size).requires_grad_()

    def biased(dropout: float, scale: float | None = None) -> Tensor:
        return biased_attention(qkv, bias, CU, LONGEST, heads, dropout, scale)

    def by_table(dropout: float) -> Tensor:
        return disentangled_attention.attend(qkv, positions, entries(), CU, LONGEST, heads, dropout)

    for scale in (None, 1.0):
        expected = plain_attention(qkv, LENGTHS, heads, scale=scale, bias=lambda q, k, far: bias[:, far + LONGEST])
        agree(f"the biased operator, scale {scale}", biased(0.0, scale), expected, [qkv, bias])
    agree("the disentangled operator", by_table(0.0), plain_disentangled(qkv, positions, heads), [qkv, positions])
    for attend in (biased, by_table):
        dropped = attend(0.5)
        grad = random(*dropped.shape)
        of_values = torch.autograd.grad(dropped, qkv, grad)[0].chunk(3, 1)[2]
        near("dropout's mask in both passes", (of_values * qkv.chunk(3, 1)[2]).sum(), (dropped * grad).sum())


def layers(name: Any) -> None:
    """Compare a layer with transformers' layer on packed tokens, in float32 and hence with torch's attention."""
    model = tiny_model(name, "tokens").to(DEVICE).train()
    unpad(model, 1)
    family: Any = family_named(name)
    layer: Any = next(iter(repeated_blocks(model).values()))
    with torch.no_grad():
        for parameter in layer.parameters():  # norms begin as the identity
            parameter.add_(0.2 * random(*parameter.shape))
    mask = torch.arange(max(LENGTHS), device=DEVICE) < torch.tensor(LENGTHS, device=DEVICE)[:, None]
    layout, modules = lay_out(mask, sum(LENGTHS), 1), family.layer_modules(layer)
    rows = layout.cu_seqlens, layout.longest
    x, grad = random(sum(LENGTHS), 32).requires_grad_(), 0.02 * random(sum(LENGTHS), 32)
    angles = random(sum(LENGTHS), 8).repeat(1, 2)
    rotary = (angles.cos(), angles.sin())
    leaves = {"input": x, **dict(layer.named_parameters())}
    packed: Any = x.unsqueeze(0)
    if name == "deberta_v2":
        encoder = model.deberta.encoder
        leaves["relative embeddings"] = encoder.rel_embeddings.weight
        # a table of 12 entries
        distances = torch.arange(-layout.longest, layout.longest + 1, device=DEVICE)
        relative = Relative(layout, (distances // 9 + 6).clamp(0, 11).int())
        table = family.position_table(layer, encoder.get_rel_embedding())
        positions = Positions(table=table, entries=relative.entries)
        theirs = layer(packed, None, relative_pos=relative, rel_embeddings=encoder.get_rel_embedding())[0]
    elif name == "mpnet":
        by_distance = leaves["bias"] = random(2, 2 * layout.longest + 1).requires_grad_()
        positions = Positions(bias=by_distance)
        theirs = layer(packed, position_bias=PositionBias(layout, by_distance))[0]
    else:
        positions = Positions(angles=rotary)
        theirs = layer(packed, position_embeddings=tuple(angle.unsqueeze(0) for angle in rotary), layout=layout)

    def pre_norm(rates: DropoutRates) -> Tensor:
        return pre_norm_layer(x, modules, rates, rotary, *rows, x.dtype)

    ours = pre_norm(NO_DROPOUT) if name == "esm" else fused_layer(x, modules, NO_DROPOUT, *rows, positions)
    agree(f"{name} layer", ours, theirs.squeeze(0), leaves, grad)
    if name == "esm":

        def scalar() -> Tensor:
            return (pre_norm(DropoutRates(0.2, 0.3, 0.1)) * grad).sum()

        check_slopes(scalar, [x, modules.query.weight, modules.up.bias])


def frozen_weights() -> None:
    """Compare the pre-norm layer's wanted gradients with those of a layer that computes all, and count matmuls."""
    layer: Any = next(iter(repeated_blocks(tiny_model("esm", "tokens").to(DEVICE).train()).values()))
    family: Any = family_named("esm")
    modules, tokens, every = family.layer_modules(layer), sum(LENGTHS), dict(layer.named_parameters())
    x, grad, angles = random(tokens, 32), 0.02 * random(tokens, 32), random(tokens, 8).repeat(1, 2)

    def gradients(trained: list[str], *, of_input: bool, rotary: bool) -> tuple[dict[str, Tensor | None], int]:
        """The gradients, and the number of matmuls of the backward pass."""
        for name, parameter in every.items():
            parameter.grad = None
            parameter.requires_grad_(name in trained)
        leaf = x.clone().requires_grad_(of_input)
        positions = (angles.cos(), angles.sin()) if rotary else None
        result = pre_norm_layer(leaf, modules, NO_DROPOUT, positions, CU, LONGEST, x.dtype)
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


if __name__ == "__main__":
    torch.manual_seed(0)
    rows: Any = {"lengths": LENGTHS, "longest": LONGEST, "biased": True}
    for dropout, heads, size, scale in ((0.0, 2, 16, None), (0.3, 2, 16, None), (0.0, 1, 64, 1.0)):
        attentions(dropout, heads, size, **rows, scale=scale)
        disentangled(dropout, heads, size)
    for window in (3, 90):
        attentions(**rows, window=window)
    operators()
    for name in ("mpnet", "jina_embeddings_v3", "esm", "deberta_v2"):
        layers(name)
    use_lengths([5, 0, 37], 64)  # which gradients are computed does not depend on the rows
    frozen_weights()
    sys.exit(0)
