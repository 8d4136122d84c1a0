"""Compare the disentangled attention kernels with plain PyTorch; run on the CPU under TRITON_INTERPRET=1, or on a GPU.

Like ``tests.reference.fused_kernels``, this program needs a process of its own.
"""

from __future__ import annotations

import sys
from itertools import pairwise

import torch
from torch import Tensor

from composer_speedups.algorithms.fused_layers.layer import Positions, fused_layer
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.families.family import DropoutRates, family_named
from composer_speedups.kernels.disentangled_attention import attend, disentangled_backward, disentangled_forward
from composer_speedups.packing.attention import Relative
from composer_speedups.packing.layout import lay_out
from tests.helpers.models import tiny_model
from tests.reference.fused_kernels import DEVICE, kept_weights, near, random, seed

TABLE = 24
LENGTHS: list[int]
LONGEST: int
CU: Tensor


def use_lengths(lengths: list[int], longest: int) -> None:
    """Set the rows that all comparisons use; ``longest`` is the greatest number of tokens that the kernels read."""
    global LENGTHS, CU, LONGEST
    LENGTHS, LONGEST = lengths, longest
    CU = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=DEVICE)


use_lengths([5, 0, 70, 1, 37, 130], 192)


def entries() -> Tensor:
    """Return the table entry of each distance, in ascending order: one per small distance, shared by larger ones."""
    distances = torch.arange(-LONGEST, LONGEST + 1, device=DEVICE)
    far = distances.abs()
    buckets = distances.sign() * torch.where(far < 5, far, 4 + far.float().log2().int())
    return (buckets + TABLE // 2).clamp(0, TABLE - 1).int()


def plain(qkv: Tensor, positions: Tensor, heads: int, masks: list[Tensor], dropout: float) -> Tensor:
    """Compute the same attention with torch's operators, row by row."""
    rows, table = [], positions.view(TABLE, 2, heads, -1)
    for (start, end), mask in zip(pairwise(CU.tolist()), masks, strict=True):
        q, k, v = qkv[start:end].unflatten(1, (3, heads, -1)).unbind(1)  # (S, A, D)
        slots = torch.arange(end - start, device=DEVICE)
        entry = entries()[slots[:, None] - slots + LONGEST].long()
        scores = torch.einsum("iad,jad->aij", q, k)
        scores = scores + torch.einsum("iad,ijad->aij", q, table[entry, 0])
        scores = scores + torch.einsum("jad,ijad->aij", k, table[entry, 1])
        weights = (scores * (3 * q.shape[-1]) ** -0.5).softmax(-1) * mask / (1 - dropout)
        rows.append(torch.einsum("aij,jad->iad", weights, v).flatten(1))
    return torch.cat(rows)


def without_positions(qkv: Tensor, heads: int, dropout: float) -> Tensor:
    table = torch.zeros(TABLE, qkv.shape[1] // 3 * 2, device=DEVICE)
    return disentangled_forward(qkv, table, entries(), CU, LONGEST, heads, dropout, seed())[0]


def attentions(dropout: float, heads: int, size: int) -> None:
    masks = [torch.ones(heads, length, length, device=DEVICE) for length in LENGTHS]
    if dropout:
        masks = kept_weights(LENGTHS, heads, lambda qkv: without_positions(qkv, heads, dropout))
        rate = float(torch.cat([m.flatten() for m in masks]).mean())
        assert abs(rate - (1 - dropout)) < 0.01, rate
    qkv, positions = random(sum(LENGTHS), 3 * heads * size), random(TABLE, 2 * heads * size)
    leaves = [each.clone().requires_grad_() for each in (qkv, positions)]
    expected = plain(leaves[0], leaves[1], heads, masks, dropout)
    out, logs = disentangled_forward(qkv, positions, entries(), CU, LONGEST, heads, dropout, seed())
    near(f"disentangled attention, dropout {dropout}, {heads} heads of {size}", out, expected)
    grad = random(*out.shape)
    expected.backward(grad)
    given = (grad, qkv, positions, entries(), out, logs, CU, LONGEST, dropout, seed())
    d_qkv, d_positions = disentangled_backward(*given)
    for i, name in enumerate(("queries", "keys", "values")):
        near(f"the gradient of its {name}", d_qkv.chunk(3, 1)[i], leaves[0].grad.chunk(3, 1)[i])  # type: ignore[union-attr]
    for i, name in enumerate(("keys", "queries")):
        near(f"the gradient of its position {name}", d_positions.chunk(2, 1)[i], leaves[1].grad.chunk(2, 1)[i])  # type: ignore[union-attr]
    again = disentangled_backward(*given)
    assert all(torch.equal(a, b) for a, b in zip(again, (d_qkv, d_positions), strict=True)), "deterministic"


def operators() -> None:
    """Check the operator under autograd.

    With dropout, the result is linear in the values, so values times their gradient must equal result times gradient.
    """
    heads, size = 2, 16
    qkv = random(sum(LENGTHS), 3 * heads * size).requires_grad_()
    positions = random(TABLE, 2 * heads * size).requires_grad_()
    out = attend(qkv, positions, entries(), CU, LONGEST, heads, 0.0)
    grad = random(*out.shape)
    actual = torch.autograd.grad(out, [qkv, positions], grad)
    masks = [torch.ones(heads, length, length, device=DEVICE) for length in LENGTHS]
    wanted = torch.autograd.grad(plain(qkv, positions, heads, masks, 0.0), [qkv, positions], grad)
    for name, *both in zip(("queries, keys and values", "positions"), actual, wanted, strict=True):
        near(f"the operator's gradient of {name}", *both)
    dropped = attend(qkv, positions, entries(), CU, LONGEST, heads, 0.5)
    of_values = torch.autograd.grad(dropped, qkv, grad)[0].chunk(3, 1)[2]
    near("dropout's mask in both passes", (of_values * qkv.chunk(3, 1)[2]).sum(), (dropped * grad).sum())


def layers() -> None:
    """Compare the layer with transformers' layer on packed tokens, in float32 and hence with torch's attention."""
    model = tiny_model("deberta_v2").to(DEVICE).train()
    unpad(model, 1)
    layer, encoder, family = model.deberta.encoder.layer[0], model.deberta.encoder, family_named("deberta_v2")
    assert family is not None
    assert family.layer_modules is not None
    assert family.position_table is not None
    mask = torch.arange(max(LENGTHS), device=DEVICE) < torch.tensor(LENGTHS, device=DEVICE)[:, None]
    plan, rates = lay_out(mask, sum(LENGTHS), 1), DropoutRates(0.0, 0.0, 0.0)
    relative = Relative(plan, encoder_entries(plan.longest))
    x, grad, results = random(sum(LENGTHS), 32), random(sum(LENGTHS), 32), []
    names = ["its input", *dict(layer.named_parameters()), "relative embeddings"]
    for fused in (True, False):
        leaf = x.clone().requires_grad_()
        embeddings = encoder.get_rel_embedding()
        if fused:
            table = family.position_table(layer, embeddings)
            positions = Positions(table=table, entries=relative.entries)
            modules = family.layer_modules(layer)
            result = fused_layer(leaf, modules, rates, plan.cu_seqlens, plan.longest, positions)
        else:
            result = layer(leaf.unsqueeze(0), None, relative_pos=relative, rel_embeddings=embeddings)[0].squeeze(0)
        of = [leaf, *layer.parameters(), encoder.rel_embeddings.weight]
        results.append([result, *torch.autograd.grad(result, of, grad)])
    for name, ours, theirs in zip(["its result", *names], *results, strict=True):
        near(f"layer, {name}", ours, theirs)


def encoder_entries(longest: int) -> Tensor:
    """Return the entry of each distance in a table of 12 entries."""
    distances = torch.arange(-longest, longest + 1, device=DEVICE)
    return (distances // 9 + 6).clamp(0, 11).int()


def main() -> int:
    torch.manual_seed(0)
    for dropout, heads, size in ((0.0, 2, 16), (0.3, 2, 16), (0.0, 1, 64)):
        attentions(dropout, heads, size)
    operators()
    layers()
    return 0


if __name__ == "__main__":
    sys.exit(main())
