"""Compare the fused Triton kernels with plain PyTorch; run on the CPU under TRITON_INTERPRET=1, or on a GPU.

A program of its own, because Triton reads that variable when its kernels are defined. Prints a line for each comparison
and ends with an error at the first that fails.
"""

from __future__ import annotations

import builtins
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if os.environ.get("TRITON_INTERPRET") == "1":
    import numpy
    import triton.runtime.interpreter as interpreter

    class _Int(int):  # Triton 3.6 takes int() of arrays of one element, which NumPy 2.4 refuses
        def __new__(cls, x: Any = 0, *rest: Any) -> Any:
            return builtins.int(x.item() if isinstance(x, numpy.ndarray) else x, *rest)

    interpreter.int = _Int  # type: ignore[attr-defined]

    def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Without patching the language at each call between functions of a kernel, which takes half of the time."""
        if interpreter.tl.core.is_builtin(interpreter.tl.core.full):
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = _call  # type: ignore[method-assign]

from composer_speedups import kernels
from composer_speedups.algorithms.fused_layers.gated_layer import gated_layer
from composer_speedups.algorithms.fused_layers.layer import fused_layer
from composer_speedups.algorithms.fused_layers.modules import plain_layer
from composer_speedups.families.family import GatedParts, Parts, Rates
from composer_speedups.families.packed_tokens import make_plan
from composer_speedups.kernels.attention import attention_backward, attention_forward
from composer_speedups.kernels.embeddings import embed
from composer_speedups.kernels.geglu import geglu_backward, geglu_forward
from composer_speedups.kernels.gelu import column_sums, gelu_backward
from composer_speedups.kernels.norm import add_norm_backward, add_norm_forward
from composer_speedups.kernels.pre_norm import pre_norm_backward, pre_norm_forward
from composer_speedups.kernels.rotary import rotate

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
LENGTHS = [5, 0, 70, 1, 37]


def near(what: str, actual: Tensor | None, expected: Tensor | None) -> None:
    assert expected is not None
    assert expected.numel()
    # float32 products of a GPU's Triton are TF32, hence its wider bounds
    bounds = {"rtol": 1e-4, "atol": 1e-5} if DEVICE == "cpu" else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(actual, expected, **bounds, msg=lambda m: f"{what}: {m}")
    print(what, "agrees")


def seed(number: int = 12345) -> Tensor:
    return torch.tensor([number], dtype=torch.int32, device=DEVICE)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def norms(dropout: float) -> None:
    tokens, hidden = 37, 48
    x, residual, weight, bias = random(tokens, hidden), random(tokens, hidden), random(hidden), random(hidden)
    ones, zeros = torch.ones_like(x), torch.zeros_like(x)
    mask = add_norm_forward(ones, zeros, weight, bias, 1e-5, dropout, seed())[1]  # what becomes of ones
    assert dropout == 0 or abs(float((mask == 0).float().mean()) - dropout) < 0.05
    leaves = [t.clone().requires_grad_() for t in (x, residual, weight, bias)]
    expected = F.layer_norm(leaves[0] * mask + leaves[1], (hidden,), leaves[2], leaves[3], 1e-5)
    out, summed, statistics = add_norm_forward(x.clone(), residual, weight, bias, 1e-5, dropout, seed())
    near(f"norm, dropout {dropout}", out, expected)
    grad = random(tokens, hidden)
    expected.backward(grad)
    d_residual, d_x, sums, again = add_norm_backward(grad, summed, statistics, weight, dropout, seed(), bias)
    near("its result again", again, out)
    assert add_norm_backward(grad, summed, statistics, weight, dropout, seed())[3] is None
    near("its residual's gradient", d_residual, leaves[1].grad)
    near("its input's gradient", d_x, leaves[0].grad)
    parameters: list[Any] = [leaves[2].grad, leaves[3].grad]
    near("its parameters' gradients", sums[:2], torch.stack(parameters))
    near("the sum of its input's", sums[2], leaves[0].grad.sum(0))


def gelus() -> None:
    x, grad = 4 * random(50, 200), random(50, 200)  # far into both tails
    leaf = x.clone().requires_grad_()
    F.gelu(leaf).backward(grad)
    d_x, result, sums = gelu_backward(grad.clone(), x)
    near("GELU's gradient", d_x, leaf.grad)
    near("GELU again", result, F.gelu(x))
    near("the sum of GELU's gradient", sums, leaf.grad.sum(0))
    near("sums over tokens", column_sums(x), x.sum(0))


def kept_weights(cu: Tensor, heads: int, size: int, dropout: float) -> list[Tensor]:
    """Which weights dropout keeps: uniform attention over values that are 1 for one key at a time."""
    tokens, starts = int(cu[-1]), cu.tolist()
    masks = [torch.zeros(heads, length, length, device=DEVICE) for length in LENGTHS]
    for first in range(0, max(LENGTHS), size):
        qkv = torch.zeros(tokens, 3, heads, size, device=DEVICE)
        for start, length in zip(starts, LENGTHS, strict=False):
            units = torch.arange(max(0, min(size, length - first)))
            qkv[start + first + units, 2, :, units] = 1
        out, _ = attention_forward(qkv.view(tokens, -1), cu, 128, heads, dropout, seed())
        for mask, start, length in zip(masks, starts, LENGTHS, strict=False):
            kept = (out[start : start + length].view(length, heads, size) > 0).transpose(0, 1).float()
            mask[..., first : first + size] = kept[..., : max(0, length - first)]
    return masks


def pre_norms(dropout: float) -> None:
    tokens, hidden = 37, 48
    residual, branch, weight = random(tokens, hidden), random(tokens, hidden), random(hidden)
    zeros, ones = torch.zeros_like(residual), torch.ones_like(branch)
    mask = pre_norm_forward(zeros, ones, weight, 1e-5, dropout, seed(), torch.float32)[1]  # what becomes of ones
    assert dropout == 0 or abs(float((mask == 0).float().mean()) - dropout) < 0.05
    for sublayer in (branch, None):
        leaves = [t.clone().requires_grad_() for t in (residual, branch, weight)]
        summed = leaves[0] if sublayer is None else leaves[0] + leaves[1] * mask
        expected = F.layer_norm(summed, (hidden,), leaves[2], None, 1e-5)
        found = pre_norm_forward(residual.clone(), sublayer, weight, 1e-5, dropout, seed(), torch.float32)
        near(f"pre-norm, dropout {dropout}", found[0], expected)
        near("its sum", found[1], summed)
        grad, grad_sum = random(tokens, hidden), random(tokens, hidden)
        torch.autograd.backward([expected, summed], [grad, grad_sum])
        d_residual, d_branch, d_weight, again = pre_norm_backward(
            grad, grad_sum, *found[1:], weight, dropout, seed(), sublayer=sublayer is not None
        )
        near("its residual's gradient", d_residual, leaves[0].grad)
        near("its weight's gradient", d_weight, leaves[2].grad)
        near("its result again", again, found[0])
        if sublayer is None:
            assert d_branch is None
        else:
            near("its sublayer's gradient", d_branch, leaves[1].grad)


def geglus(dropout: float) -> None:
    tokens, inner = 19, 600  # more than a program takes
    x, grad = 3 * random(tokens, 2 * inner), random(tokens, inner)
    ones = torch.cat([torch.full((tokens, inner), 9.0, device=DEVICE), torch.ones(tokens, inner, device=DEVICE)], 1)
    mask = geglu_forward(ones, dropout, seed()) / 9
    assert dropout == 0 or abs(float((mask == 0).float().mean()) - dropout) < 0.05
    leaf = x.clone().requires_grad_()
    activated, gate = leaf.chunk(2, 1)
    expected = F.gelu(activated) * gate * mask
    near(f"GeGLU, dropout {dropout}", geglu_forward(x, dropout, seed()), expected)
    expected.backward(grad)
    d_x, again = geglu_backward(grad.clone(), x, dropout, seed())
    near("its gradient", d_x, leaf.grad)
    near("its result again", again, expected)


def rotations() -> None:
    tokens, heads, size = 11, 3, 16
    angles = random(tokens, size // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    qkv = random(tokens, 3 * heads * size)
    leaf = qkv.clone().requires_grad_()
    turned = leaf.view(tokens, 3, heads, size)
    half = torch.cat([-turned[..., size // 2 :], turned[..., : size // 2]], -1)
    expected = turned * cos[:, None, None] + half * sin[:, None, None]
    expected = torch.cat([expected[:, :2], turned[:, 2:]], 1).reshape(tokens, -1)
    found, grad = qkv.clone(), random(*qkv.shape)
    rotate(found, cos, sin, heads)
    near("rotary positions", found, expected)
    expected.backward(grad)
    rotate(grad, cos, sin, heads, back=True)
    near("their gradient", grad, leaf.grad)


def slopes_are_the_gradients_norms(scalar: Callable[[], Tensor], leaves: Sequence[Tensor]) -> None:
    """Along its own gradient, a function rises by the gradient's norm: dropout's masks are the same in both passes."""
    for leaf, gradient in zip(leaves, torch.autograd.grad(scalar(), leaves), strict=True):
        norm = gradient.norm()
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                step = sign * 0.02 * gradient / norm
                leaf.add_(step)
                values.append(scalar())
                leaf.sub_(step)
        slope = (values[0] - values[1]) / 0.04
        assert abs(float(slope / norm) - 1) < 0.01, (slope, norm)
    print("slopes and the gradients' norms are the same")


def windows() -> None:
    """Attention to some tokens on either side: windows narrower than a block of keys, wider, and wider than a row."""
    heads, size, lengths = 2, 16, [5, 0, 200, 1, 70]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=DEVICE)
    for window in (0, 3, 64, 90, 256):
        qkv = random(sum(lengths), 3 * heads * size)
        leaf, rows = qkv.clone().requires_grad_(), []
        for start, length in zip(cu.tolist(), lengths, strict=False):
            q, k, v = (x.view(length, heads, size).transpose(0, 1) for x in leaf[start : start + length].chunk(3, 1))
            at = torch.arange(length, device=DEVICE)
            near_enough = (at[:, None] - at).abs() <= window
            weights = (q @ k.transpose(1, 2) * size**-0.5).masked_fill(~near_enough, float("-inf")).softmax(-1)
            rows.append((weights @ v).transpose(0, 1).reshape(length, heads * size))
        expected = torch.cat(rows)
        out, logs = attention_forward(qkv, cu, 256, heads, 0.0, seed(), window)
        near(f"attention, window {window}", out, expected)
        grad = random(*out.shape)
        expected.backward(grad)
        near("its gradient", attention_backward(grad, qkv, out, logs, cu, 256, 0.0, seed(), window), leaf.grad)


def attentions(dropout: float) -> None:
    heads, size = 2, 16
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device=DEVICE)
    masks = kept_weights(cu, heads, size, dropout)
    rate = float(torch.cat([m.flatten() for m in masks]).mean())
    assert abs(rate - (1 - dropout)) < 0.01, rate
    qkv = random(sum(LENGTHS), 3 * heads * size)
    leaf = qkv.clone().requires_grad_()
    rows = []
    for start, length, mask in zip(cu.tolist(), LENGTHS, masks, strict=False):
        q, k, v = (x.view(length, heads, size).transpose(0, 1) for x in leaf[start : start + length].chunk(3, 1))
        weights = (q @ k.transpose(1, 2) * size**-0.5).softmax(-1) * mask / (1 - dropout)
        rows.append((weights @ v).transpose(0, 1).reshape(length, heads * size))
    expected = torch.cat(rows)
    out, logs = attention_forward(qkv, cu, 128, heads, dropout, seed())
    near(f"attention, dropout {dropout}", out, expected)
    grad = random(*out.shape)
    expected.backward(grad)
    near("its gradient", attention_backward(grad, qkv, out, logs, cu, 128, dropout, seed()), leaf.grad)


def layers() -> None:
    """The whole layer beside torch's own operators, which test_fused_layers.py holds against the stock models'."""
    heads, hidden, inner = 2, 32, 64
    sizes = [(hidden, hidden)] * 4 + [(hidden, inner), (inner, hidden)]
    query, key, value, out, up, down = (nn.Linear(*size, device=DEVICE) for size in sizes)
    norms = [nn.LayerNorm(hidden, device=DEVICE) for _ in range(2)]
    parts = Parts(query, key, value, out, norms[0], up, down, norms[1], heads)
    for parameter in parts.parameters():
        nn.init.normal_(parameter, std=0.4)
    mask = torch.arange(max(LENGTHS), device=DEVICE) < torch.tensor(LENGTHS, device=DEVICE)[:, None]
    plan, rates = make_plan(mask, sum(LENGTHS), 1), Rates(0.0, 0.0, 0.0)
    x, grad, found = random(sum(LENGTHS), hidden), random(sum(LENGTHS), hidden), []
    for fused in (True, False):
        leaf = x.clone().requires_grad_()
        result = (
            fused_layer(leaf, parts, rates, plan.cu_seqlens, plan.longest)
            if fused
            else plain_layer(leaf, parts, rates, plan)
        )
        found.append([result, *torch.autograd.grad(result, [leaf, *parts.parameters()], grad)])
    for i, (ours, theirs) in enumerate(zip(*found, strict=True)):
        near(f"layer, {'its result' if i == 0 else f'gradient {i}'}", ours, theirs)


def gated_layers(window: int | None, *, first: bool) -> None:
    """The whole gated layer beside plain operators, which test_fused_layers.py holds against the stock models'."""
    heads, hidden, inner, size = 2, 32, 24, 16
    sizes = [(hidden, 3 * hidden), (hidden, hidden), (hidden, 2 * inner), (inner, hidden)]
    linears = [nn.Linear(*shape, bias=False, device=DEVICE) for shape in sizes]
    before = None if first else nn.LayerNorm(hidden, bias=False, device=DEVICE)
    after = nn.LayerNorm(hidden, bias=False, device=DEVICE)
    parts = GatedParts(*linears, before, after, heads, window)
    for parameter in parts.parameters():
        nn.init.normal_(parameter, std=0.2)
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device=DEVICE)
    tokens = sum(LENGTHS)
    angles = random(tokens, size // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    leaves = [t.clone().requires_grad_() for t in [random(tokens, hidden)] * 2]
    row = torch.repeat_interleave(torch.arange(len(LENGTHS), device=DEVICE), torch.tensor(LENGTHS, device=DEVICE))
    at = torch.arange(tokens, device=DEVICE)
    seen = (row[:, None] == row) & ((at[:, None] - at).abs() <= (tokens if window is None else window))

    def plain(x: Tensor) -> Tensor:
        normed = x if before is None else before(x)
        query, key, value = parts.qkv(normed).view(tokens, 3, heads, size).permute(1, 2, 0, 3)
        query, key = (t * cos + torch.cat([-t[..., size // 2 :], t[..., : size // 2]], -1) * sin for t in (query, key))
        attended = F.scaled_dot_product_attention(query, key, value, seen).transpose(0, 1).reshape(tokens, hidden)
        summed = x + parts.out(attended)
        activated, gate = parts.up(after(summed)).chunk(2, -1)
        return summed + parts.down(F.gelu(activated) * gate)

    results = [
        gated_layer(leaves[0], parts, Rates(0.0, 0.0, 0.0), cos, sin, cu, 128, torch.float32),
        plain(leaves[1]),
    ]
    grad = random(tokens, hidden)
    gradients = [
        torch.autograd.grad(result, [leaf, *parts.parameters()], grad)
        for result, leaf in zip(results, leaves, strict=True)
    ]
    near(f"gated layer, window {window}", *results)
    for i, (ours, theirs) in enumerate(zip(*gradients, strict=True)):
        near(f"its gradient {i}", ours, theirs)

    def scalar(rates: Rates) -> Tensor:
        torch.manual_seed(3)  # of the dropout
        return (gated_layer(leaves[0], parts, rates, cos, sin, cu, 128, torch.float32) * grad).sum()

    for rates in (Rates(0.4, 0.0, 0.0), Rates(0.0, 0.4, 0.0), Rates(0.0, 0.0, 0.4)):
        slopes_are_the_gradients_norms(partial(scalar, rates), [parts.qkv.weight, parts.up.weight])


def embeddings(dropout: float, *, mixed: bool) -> None:
    rows, width, hidden = 19, 3, 24  # more rows than a program takes
    ids = torch.randint(0, 30, (rows, width), device=DEVICE)
    positions = torch.arange(width, device=DEVICE)[None]
    types = torch.zeros(1, width, dtype=torch.long, device=DEVICE)
    if mixed:
        positions = torch.randint(0, 9, (rows, width), device=DEVICE)
        types = torch.randint(0, 2, (rows, width), device=DEVICE)
    tables: list[Any] = [random(n, hidden) for n in (30, 10, 2)] + [random(hidden), random(hidden)]
    ours: Any = [t.clone().requires_grad_() for t in tables]
    theirs = [t.clone().requires_grad_() for t in tables]
    w, p, k, weight, bias = ours
    out = embed(ids, positions, types, w, p, k, weight, bias, 1e-5, dropout, torch.float32, (1, 2))
    summed = F.embedding(ids, theirs[0], 1) + F.embedding(positions, theirs[1], 2) + F.embedding(types, theirs[2])
    mask = (out != 0).float() / (1 - dropout)
    expected = F.layer_norm(summed, (hidden,), theirs[3], theirs[4], 1e-5) * mask
    near(f"embeddings, dropout {dropout}", out, expected)
    grad = random(*out.shape)
    grad[3] = 0  # padding
    out.backward(grad)
    expected.backward(grad)
    for name, a, b in zip(("word", "position", "type", "weight", "bias"), ours, theirs, strict=True):
        near(f"their {name} gradient", a.grad, b.grad)


def independence() -> None:
    """Rows, columns, columns at one distance and quadruples of a mask are as independent as torch's random numbers."""
    tokens, hidden, p, runs = 64, 1024, 0.1, 6  # a program a token is what takes the interpreter its time
    variances, squares, apart = [], [], []
    for number in range(runs):
        ones, zeros = torch.ones(tokens, hidden, device=DEVICE), torch.zeros(tokens, hidden, device=DEVICE)
        weight = torch.ones(hidden, device=DEVICE)
        mask = add_norm_forward(ones, zeros, weight, weight, 1e-5, p, seed(1000 + number))[1]
        dropped = ((mask == 0).double() - p) / (p * (1 - p)) ** 0.5
        for product, n in ((dropped @ dropped.T, hidden), (dropped.T @ dropped, tokens)):
            pairs = product[tuple(torch.triu_indices(len(product), len(product), 1))] / n**0.5
            variances.append(float(pairs.var()))
        for distance in (1, 2, 3, 8, 32, 64, 128):
            together = dropped[:, :-distance] * dropped[:, distance:]
            apart.append(float(together.mean()) * together.numel() ** 0.5)
        four = dropped[: tokens // 2] * dropped[tokens // 2 :]
        quadruples = four[:, :-128] * four[:, 128:]
        squares.append(float(quadruples.mean()) * quadruples.numel() ** 0.5)
    assert all(0.85 < v < 1.15 for v in variances), variances  # of independent ones: 1
    assert abs(sum(squares)) / runs**0.5 < 4, squares  # of independent ones: normal, deviation 1
    assert sum(a * a for a in apart) / len(apart) < 1.7, apart  # likewise
    print("masks are independent")


def documented_example() -> None:
    """What the package's documentation shows, against plain attention; the same seed drops the same weights."""
    code = inspect.cleandoc(str(kernels.__doc__).partition("::\n")[2])
    found: dict[str, Any] = {"device": DEVICE}
    exec(code, found)
    first, second = dict(found), found
    exec(code.replace("dropout = 2, 0.1", "dropout = 2, 0.0"), second)
    assert first["grad_qkv"].isfinite().all()
    query, key, value = (x.unflatten(-1, (2, 16)).transpose(0, 1) for x in second["qkv"].chunk(3, -1))
    for rows in (slice(0, 5), slice(5, 8)):
        expected = F.scaled_dot_product_attention(query[:, rows], key[:, rows], value[:, rows])
        near("the documented example", second["out"][rows], expected.transpose(0, 1).flatten(1))


if __name__ == "__main__":
    torch.manual_seed(0)
    documented_example()
    for rate in (0.0, 0.25):
        norms(rate)
        attentions(rate)
        pre_norms(rate)
        geglus(rate)
        embeddings(rate, mixed=False)
        embeddings(rate, mixed=True)
    gelus()
    layers()
    rotations()
    windows()
    gated_layers(None, first=True)
    gated_layers(7, first=False)
    independence()
    sys.exit(0)
