"""Compare the fused Triton kernels with plain PyTorch; run on the CPU under TRITON_INTERPRET=1, or on a GPU.

It needs a process of its own, because Triton reads that variable when kernels are defined. It prints one line per
comparison and stops with an error at the first that fails.
"""

from __future__ import annotations

import builtins
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
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
        """Skip patching the language at each call between functions of a kernel, which takes half of the time."""
        if interpreter.tl.core.is_builtin(interpreter.tl.core.full):
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = _call  # type: ignore[method-assign]

    # Triton computes each sum and product of integers again in 64 bits, for an assertion that debug mode alone makes.
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)

    _np_dtype_of, _np_dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def _np_dtype(kind: Any) -> Any:
        """From a table, where Triton builds one at each call."""
        name = kind.scalar.name
        if name not in _np_dtypes:
            _np_dtypes[name] = _np_dtype_of(kind.scalar)
        return _np_dtypes[name]

    interpreter._get_np_dtype = _np_dtype  # type: ignore[attr-defined]

    _convert, _formats = interpreter._convert_float, {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}

    def _to_float8(x: Any, source: Any, target: Any, rounding: Any) -> Any:
        """Work around Triton 3.6, which does not carry from mantissa to exponent and rounds small numbers to zero."""
        if str(target) not in _formats or str(source) != "fp32":
            return _convert(x, source, target, rounding)
        numbers = torch.from_numpy(numpy.ascontiguousarray(x).view(numpy.float32).copy())
        return numbers.to(_formats[str(target)]).view(torch.uint8).numpy().reshape(x.shape)

    interpreter._convert_float = _to_float8  # type: ignore[attr-defined]

from composer_speedups import kernels
from composer_speedups.algorithms.fused_layers.layer import OPERANDS, fused_layer
from composer_speedups.algorithms.fused_layers.modules import plain_layer
from composer_speedups.algorithms.fused_layers.pre_norm_layers import gated_layer
from composer_speedups.families.family import DropoutRates, GatedLayerModules, LayerModules
from composer_speedups.kernels.attention import attention_backward, attention_forward, rotate
from composer_speedups.kernels.casts import cast_parameters, cast_together, merged_weights
from composer_speedups.kernels.embeddings import embed
from composer_speedups.kernels.first_token_attention import first_token_attention
from composer_speedups.kernels.float8 import (
    ACTIVATION,
    GRADIENT,
    Float8,
    begin_scales,
    cast_float8,
    cast_weights,
    new_scales,
    scaled_product,
)
from composer_speedups.kernels.gelu import geglu_backward, geglu_forward, gelu_backward, gelu_float8, gelu_forward
from composer_speedups.kernels.norm import add_norm_backward, add_norm_forward, pre_norm_backward, pre_norm_forward
from composer_speedups.kernels.sums import partial_sums, totals
from composer_speedups.packing.layout import Layout
from tests.reference import masked_layer

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
LENGTHS = [5, 0, 70, 1, 37]


def near(what: str, actual: Tensor | None, expected: Tensor | None) -> None:
    assert expected.numel()
    # On a GPU, Triton computes float32 matmuls in TF32, hence the wider bounds. The order of PyTorch's sums, and hence
    # their rounding, depends on the kind of CPU.
    bounds = {"rtol": 1e-4, "atol": 5e-5} if DEVICE == "cpu" else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(actual, expected, **bounds, msg=lambda m: f"{what}: {m}")
    print(what, "agrees")


def agree(
    what: str, ours: Tensor, theirs: Tensor, leaves: Mapping[str, Tensor] | Sequence[Tensor], grad: Tensor | None = None
) -> None:
    """Compare two results that were computed from the same leaves, and their gradients."""
    near(what, ours, theirs)
    if not isinstance(leaves, Mapping):
        leaves = {str(i): leaf for i, leaf in enumerate(leaves)}
    grad = random(*ours.shape) if grad is None else grad
    gradients = [torch.autograd.grad(result, list(leaves.values()), grad) for result in (ours, theirs)]
    for name, *both in zip(leaves, *gradients, strict=True):
        near(f"{what}, gradient of {name}", *both)


def in_another_layout(x: Tensor) -> Tensor:
    """Return a copy of x that is not contiguous."""
    return x.repeat_interleave(2, -1)[..., ::2]


def seed(number: int = 12345) -> Tensor:
    return torch.tensor([number], dtype=torch.int32, device=DEVICE)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def norms(dropout: float) -> None:
    tokens, hidden = 37, 48
    x, residual, weight, bias = random(tokens, hidden), random(tokens, hidden), random(hidden), random(hidden)
    ones, zeros = torch.ones_like(x), torch.zeros_like(x)
    mask = add_norm_forward(ones, zeros, weight, bias, 1e-5, dropout, seed())[1]  # dropout applied to ones
    assert dropout == 0 or abs(float((mask == 0).float().mean()) - dropout) < 0.05
    leaves = [t.clone().requires_grad_() for t in (x, residual, weight, bias)]
    expected = F.layer_norm(leaves[0] * mask + leaves[1], (hidden,), leaves[2], leaves[3], 1e-5)
    out, summed, statistics = add_norm_forward(x.clone(), residual, weight, bias, 1e-5, dropout, seed())
    near(f"norm, dropout {dropout}", out, expected)
    grad = random(tokens, hidden)
    expected.backward(grad)
    d_residual, d_x, sums, again = add_norm_backward(grad, summed, statistics, weight, dropout, seed(), bias)
    near("its recomputed result", again, out)
    assert add_norm_backward(grad, summed, statistics, weight, dropout, seed())[3] is None
    near("its residual's gradient", d_residual, leaves[1].grad)
    near("its input's gradient", d_x, leaves[0].grad)
    parameters: list[Any] = [leaves[2].grad, leaves[3].grad]
    (sums,) = totals([sums])
    near("its parameters' gradients", sums[:2], torch.stack(parameters))
    near("the sum of its input's gradient", sums[2], leaves[0].grad.sum(0))


def gelus() -> None:
    x, grad = 4 * random(50, 200), random(50, 200)  # far into both tails
    leaf = x.clone().requires_grad_()
    F.gelu(leaf).backward(grad)
    d_x, result, sums = gelu_backward(grad.clone(), x)
    near("GELU's gradient", d_x, leaf.grad)
    near("GELU", gelu_forward(x), F.gelu(x))
    near("the recomputed GELU", result, F.gelu(x))
    third, fourth = random(300, 2, 33), random(1, 5)  # more rows than one block, and strips with an end
    summed = totals([sums, partial_sums(x), third, fourth])
    near("the sum of GELU's gradient", summed[0], leaf.grad.sum(0))
    near("sums over tokens", summed[1], x.sum(0))
    near("totals", summed[2], third.sum(0))
    near("the total of one row", summed[3], fourth[0])


def casts() -> None:
    sources = [random(*shape) for shape in ((64, 64), (70, 64), (3,), (5000,), (1, 1))]
    sources[1] = sources[1].t().contiguous().t()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        copies = cast_together(sources, dtype)
        for source, copy in zip(sources, copies, strict=True):
            # Triton's interpreter truncates numbers that become bf16.
            rtol = 2**-7 if DEVICE == "cpu" and dtype == torch.bfloat16 else 0.0
            torch.testing.assert_close(copy, source.to(dtype), rtol=rtol, atol=0.0)
            print(f"a copy of {tuple(source.shape)} in {dtype} agrees")
    leaves = [source.requires_grad_() for source in sources]
    copies = list(cast_parameters(leaves, torch.float16))
    unused, given = copies.pop(2), [random(*copy.shape).half() for copy in copies]
    torch.autograd.backward(copies, given)
    torch.testing.assert_close(unused, leaves.pop(2).half(), rtol=0.0, atol=0.0)
    for leaf, gradient in zip(leaves, given, strict=True):
        torch.testing.assert_close(leaf.grad, gradient.float(), rtol=0.0, atol=0.0)
        print(f"a gradient of {tuple(leaf.shape)} agrees")


def merged() -> None:
    """Adapters of different ranks, one of them missing and one in fp16, for weights of any width and layout."""
    for hidden, inner in ((40, 150), (130, 18)):
        weights = [random(*shape).float() for shape in (*[(hidden, hidden)] * 4, (inner, hidden), (hidden, inner))]
        ranks, scales = (8, None, 3, 1, 16, 40), (2.0, 0.0, 0.5, -1.0, 0.25, 1.0)
        adapters = [
            None if rank is None else (random(rank, weight.shape[1]), random(len(weight), rank), scale)
            for rank, weight, scale in zip(ranks, weights, scales, strict=True)
        ]
        weights[4], weights[0] = (weight.t().contiguous().t() for weight in (weights[4], weights[0]))
        adapters[4] = tuple(x.half() if torch.is_tensor(x) else x for x in adapters[4])
        adapters[5] = tuple(x.t().contiguous().t() if torch.is_tensor(x) else x for x in adapters[5])
        for dtype in (torch.float32, torch.float16):
            for weight, adapter, found in zip(weights, adapters, merged_weights(weights, adapters, dtype), strict=True):
                wanted = weight.double()
                if adapter is not None:
                    wanted = wanted + adapter[2] * (adapter[1].double() @ adapter[0].double())
                exact = dtype == torch.float32
                torch.testing.assert_close(found.double(), wanted, rtol=1e-5 if exact else 2**-10, atol=1e-5)
                print(f"a merged weight of {tuple(weight.shape)} in {dtype} agrees")


def kept_weights(
    lengths: Sequence[int], heads: int, dropout: float, attend: Callable[[Tensor], Tensor]
) -> list[Tensor] | None:
    """Return the factors of the attention weights under dropout, (heads, S, S) for each row; None without dropout.

    They are read from uniform attention, (T, 3 · heads · 64) → (T, heads · 64), over values that are 1 for one key at a
    time.
    """
    if not dropout:
        return None
    size = 64  # masks do not depend on the head size
    masks = [torch.zeros(heads, length, length, device=DEVICE) for length in lengths]
    for first in range(0, max(lengths), size):
        qkv = torch.zeros(sum(lengths), 3, heads, size, device=DEVICE)
        for row in qkv.split([*lengths]):
            units = torch.arange(max(0, min(size, len(row) - first)))
            row[first + units, 2, :, units] = 1
        for mask, out in zip(masks, attend(qkv.flatten(1)).split([*lengths]), strict=True):
            kept = (out.view(-1, heads, size) > 0).transpose(0, 1).float()
            mask[..., first : first + size] = kept[..., : max(0, len(out) - first)]
    rate = float(torch.cat([m.flatten() for m in masks]).mean())
    assert abs(rate - (1 - dropout)) < 0.01, rate
    return [mask / (1 - dropout) for mask in masks]


def offsets(lengths: Sequence[int]) -> Tensor:
    """The start of each row, and the number of all tokens."""
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)


def plain_attention(
    qkv: Tensor,
    lengths: Sequence[int],
    heads: int,
    masks: Sequence[Tensor] | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
    bias: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Compute attention row by row with torch's operators, (T, 3 · H) → (T, H).

    ``masks`` are each row's factors of the attention weights, (heads, S, S). ``window`` is a key's largest distance
    from its query. ``bias`` computes what is added to the scores from a row's queries, keys and distances of tokens.
    """
    rows = []
    for i, row in enumerate(qkv.split([*lengths])):
        q, k, v = (x.unflatten(1, (heads, -1)).transpose(0, 1) for x in row.chunk(3, 1))
        scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        distances = torch.arange(len(row), device=DEVICE)[:, None] - torch.arange(len(row), device=DEVICE)
        if bias is not None:
            scores = scores + bias(q, k, distances)
        if window is not None:
            scores = scores.masked_fill(distances.abs() > window, float("-inf"))
        weights = scores.softmax(-1) if masks is None else scores.softmax(-1) * masks[i]
        rows.append((weights @ v).transpose(0, 1).flatten(1))
    return torch.cat(rows)


def pre_norms(dropout: float) -> None:
    tokens, hidden = 37, 48
    residual, branch, weight = random(tokens, hidden), random(tokens, hidden), random(hidden)
    zeros, ones = torch.zeros_like(residual), torch.ones_like(branch)
    mask = pre_norm_forward(zeros, ones, weight, 1e-5, dropout, seed(), torch.float32)[1]  # dropout applied to ones
    assert dropout == 0 or abs(float((mask == 0).float().mean()) - dropout) < 0.05
    for sublayer in (branch, None):
        leaves = [t.clone().requires_grad_() for t in (residual, branch, weight)]
        summed = leaves[0] if sublayer is None else leaves[0] + leaves[1] * mask
        expected = F.layer_norm(summed, (hidden,), leaves[2], None, 1e-5)
        forward = pre_norm_forward(residual.clone(), sublayer, weight, 1e-5, dropout, seed(), torch.float32)
        near(f"pre-norm, dropout {dropout}", forward[0], expected)
        near("its sum", forward[1], summed)
        grad, grad_sum = random(tokens, hidden), random(tokens, hidden)
        torch.autograd.backward([expected, summed], [grad, grad_sum])
        d_residual, d_branch, d_weight, again = pre_norm_backward(
            grad, grad_sum, *forward[1:], weight, dropout, seed(), sublayer=sublayer is not None
        )
        near("its residual's gradient", d_residual, leaves[0].grad)
        near("its weight's gradient", d_weight, leaves[2].grad)
        near("its recomputed result", again, forward[0])
        if sublayer is None:
            assert d_branch is None
        else:
            near("its sublayer's gradient", d_branch, leaves[1].grad)


def geglus(dropout: float) -> None:
    tokens, inner = 19, 600  # more than one program's block
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
    near("its recomputed result", again, expected)


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
    rotated, grad = qkv.clone(), random(*qkv.shape)
    rotate(rotated, cos, sin, heads)
    near("rotary positions", rotated, expected)
    expected.backward(grad)
    rotate(grad, cos, sin, heads, back=True)
    near("their gradient", grad, leaf.grad)


def check_slopes(scalar: Callable[[], Tensor], leaves: Sequence[Tensor]) -> None:
    """Check that the backward pass uses the dropout masks of the forward pass.

    The steps are long, because Triton's attention rounds float32 operands to TF32 on a GPU.
    """
    slope = masked_layer.slope_over_norm(scalar, leaves, 3, 0.1)
    assert abs(slope - 1) < 0.01, slope
    print("slopes equal the gradients' norms")


def attentions(
    dropout: float = 0.0,
    heads: int = 2,
    size: int = 16,
    *,
    lengths: Sequence[int] | None = None,
    longest: int = 128,
    biased: bool = False,
    scale: float | None = None,
    window: int | None = None,
) -> None:
    """Compare attention under the masks that the kernel draws; ``biased`` adds a number for each distance."""
    lengths = LENGTHS if lengths is None else lengths
    cu, settings = offsets(lengths), {"scale": scale, "window": window}
    bias = random(heads, 2 * longest + 1) if biased else None
    zeros = None if bias is None else torch.zeros_like(bias)
    masks = kept_weights(
        lengths, heads, dropout, lambda qkv: attention_forward(qkv, cu, longest, heads, dropout, seed(), bias=zeros)[0]
    )
    qkv = random(sum(lengths), 3 * heads * size)
    leaf, bias_leaf = qkv.clone().requires_grad_(), None if bias is None else bias.clone().requires_grad_()
    by_distance = None if bias_leaf is None else lambda q, k, distances: bias_leaf[:, distances + longest]
    expected = plain_attention(leaf, lengths, heads, masks, **settings, bias=by_distance)
    out, logs = attention_forward(qkv, cu, longest, heads, dropout, seed(), bias=bias, **settings)
    near(f"attention, dropout {dropout}, {heads} heads of {size}, biased {biased}, {settings}", out, expected)
    grad = random(*out.shape)
    expected.backward(grad)
    settings["bias"], grad_bias = bias, None if bias is None else torch.full_like(bias, 7.0)
    given = (grad, qkv, out, logs, cu, longest, dropout, seed())
    d_qkv, partial = attention_backward(*given, **settings, grad_bias=grad_bias)
    near("its gradient", d_qkv, leaf.grad)
    if bias is None:
        near("the sum of its gradient", totals([partial])[0], leaf.grad.sum(0))  # type: ignore[union-attr]
    else:
        near("the gradient of its bias", grad_bias, bias_leaf.grad)
        again = torch.empty_like(bias)
        attention_backward(*given, **settings, grad_bias=again)
        assert torch.equal(again, grad_bias), "deterministic"


def dequantized(operand: Float8) -> Tensor:
    """Return the operand's values in float32, with the scale removed."""
    return operand.values.float() * operand.scales[4].view(torch.float32)


def check_cast(what: str, operand: Float8, x: Tensor) -> None:
    """Check that every number is rounded to the nearest 8-bit value and none is clipped."""
    # Half a step of each dtype, for normal and subnormal numbers.
    mantissa, smallest = (4, 2.0**-10) if operand.values.dtype == ACTIVATION else (3, 2.0**-17)
    error, inverse = (dequantized(operand) - x.float()).abs(), operand.scales[4].view(torch.float32)
    assert bool((error <= x.float().abs() * 2.0**-mantissa * 1.001 + inverse * smallest * 1.001).all()), what
    if x.any():
        largest = float(operand.values.float().abs().max())
        assert 8 <= largest <= float(torch.finfo(operand.values.dtype).max), (what, largest)
    print(what, "agrees")


def float8_scales() -> None:
    """Check scales for magnitudes far from the present scale and close to it, and for zeros, inf and NaN."""
    for kind in (ACTIVATION, GRADIENT):
        gradients = int(kind == GRADIENT)
        rows = new_scales(2, torch.device(DEVICE))
        for magnitude in (1e-9, 3e-9, 1.0, 1e6, 1.3e6, 2.0):
            x = magnitude * random(37, 48)
            check_cast(f"{kind} at {magnitude}", cast_float8(x, rows[1], kind), x)
            before = rows[1, 0].clone()
            forgotten = begin_scales(rows, gradients, keep=False)
            assert torch.equal(rows[1, 0], before), "evaluation changes no scale"
            begin_scales(rows, gradients, keep=True)
            assert torch.equal(rows, forgotten)
            scale = float(rows[1, 0].view(torch.float32))
            most = float(torch.finfo(kind).max) / (16 if gradients else 2)
            assert most / 2 < float(x.abs().max()) * scale <= most
            again = cast_float8(x, rows[1], kind)
            assert float(rows[1, 4].view(torch.float32)) == 1 / scale, "a scale that fits is kept"
            check_cast(f"{kind} at {magnitude} again", again, x)
            begin_scales(rows, gradients, keep=True)
        scale = rows[1, 0].clone()
        for odd in (0.0, float("inf"), float("nan")):
            begin_scales(rows, gradients, keep=True)
            x = torch.full((16, 16), odd, device=DEVICE)
            operand = cast_float8(x, rows[1], kind)
            if odd == 0:
                check_cast("zeros", operand, x)
            else:
                assert dequantized(operand).isnan().all(), "inf and NaN must reach the matmul's result"
            begin_scales(rows, gradients, keep=True)
            assert torch.equal(rows[1, 0], scale), odd


def float8_kernels(dropout: float) -> None:
    """Check the 8-bit operands that the other kernels write in addition to their results."""
    tokens, hidden, inner = 37, 48, 80
    rows = new_scales(12, torch.device(DEVICE))
    for attempt in range(2):  # with scales of 1, then with fitted ones
        x, residual, weight, bias = random(tokens, hidden), random(tokens, hidden), random(hidden), random(hidden)
        operand = Float8.like(x, ACTIVATION, rows[0])
        out, summed, stats = add_norm_forward(x, residual, weight, bias, 1e-5, dropout, seed(), operand)
        check_cast(f"norm in 8 bits, {attempt}", operand, out)
        grad, more = 1e-6 * random(tokens, hidden), 1e-6 * random(tokens, hidden)
        operand = Float8.like(grad, GRADIENT, rows[1])
        found = add_norm_backward(grad, summed, stats, weight, dropout, seed(), bias, more, operand)
        for ours, theirs in zip(
            found, add_norm_backward(grad + more, summed, stats, weight, dropout, seed(), bias), strict=True
        ):
            near("two gradients", ours, theirs)
        check_cast(f"norm's gradient in 8 bits, {attempt}", operand, found[1])
        up, d_up = 4 * random(tokens, inner), 1e-6 * random(tokens, inner)
        check_cast(f"GELU in 8 bits, {attempt}", gelu_float8(up, rows[2]), F.gelu(up))
        operand = Float8.like(up, GRADIENT, rows[3])
        d_up = gelu_backward(d_up, up, operand)[0]
        check_cast(f"GELU's gradient in 8 bits, {attempt}", operand, d_up)
        qkv, cu = random(tokens, 3 * hidden), offsets([30, 0, tokens - 30])
        attended, gradient = Float8.like(x, ACTIVATION, rows[4]), Float8.like(qkv, GRADIENT, rows[5])
        out, logs = attention_forward(qkv, cu, 128, 3, dropout, seed(), operand=attended)
        check_cast(f"attention in 8 bits, {attempt}", attended, out)
        grad_out = 1e-6 * random(tokens, hidden)
        d_qkv, _ = attention_backward(grad_out, qkv, out, logs, cu, 128, dropout, seed(), operand=gradient)
        check_cast(f"attention's gradient in 8 bits, {attempt}", gradient, d_qkv)
        weights = [0.02 * random(hidden, hidden) for _ in range(4)] + [random(inner, hidden), random(hidden, inner)]
        weights[4] = weights[4].t().contiguous().t()
        products = [torch.cat(weights[:3]), *weights[3:]]
        for straight, turned, product in zip(*cast_weights(weights, rows[8:].unbind()), products, strict=True):
            check_cast(f"a weight, {attempt}", straight, product)
            assert torch.equal(turned.values.float(), straight.values.float().t()), "the second copy is the transpose"
        begin_scales(rows, 0, keep=True)
    a, b = cast_float8(random(tokens, 48), rows[0]), cast_float8(random(32, 48), rows[1])
    product = scaled_product(a, b, torch.bfloat16, torch.ones(32, device=DEVICE, dtype=torch.bfloat16))
    torch.testing.assert_close(product.float(), dequantized(a) @ dequantized(b).t() + 1, rtol=2e-2, atol=2e-2)
    print("an 8-bit matmul agrees")


def dropped_layer(rates: DropoutRates) -> None:
    """Read every dropout mask of the layer from its forward pass, and compare it with a plain layer under these masks.

    A backward pass with other masks fails.
    """
    plan, modules = masked_layer.plan_on(DEVICE), masked_layer.modules_on(DEVICE)
    x = random(sum(masked_layer.LENGTHS), masked_layer.HIDDEN).requires_grad_()

    def layer(x_TH: Tensor, modules: LayerModules, rates: DropoutRates, plan: Layout) -> Tensor:
        return fused_layer(x_TH, modules, rates, plan.cu_seqlens, plan.longest)

    masks = masked_layer.masks_of(layer, rates, DEVICE, 11)
    masked_layer.check_rates(masks, rates)
    torch.manual_seed(11)
    ours, theirs = layer(x, modules, rates, plan), masked_layer.masked_layer(x, modules, rates, masks)
    agree(f"layer that drops {tuple(rates)}", ours, theirs, [x, *modules.parameters()])


def gated_layers(
    window: int | None, *, first: bool, dropouts: Sequence[DropoutRates], frozen: Sequence[str] = ()
) -> None:
    """Compare the gated layer with torch's operators, which tests/families compares with the stock models.

    ``frozen`` names modules whose weights have no gradients.
    """
    lengths, heads, hidden, inner, size = [5, 0, 70, 1], 2, 32, 24, 16
    sizes = [(hidden, 3 * hidden), (hidden, hidden), (hidden, 2 * inner), (inner, hidden)]
    qkv, out, up, down = (nn.Linear(*shape, bias=False, device=DEVICE) for shape in sizes)
    before = None if first else nn.LayerNorm(hidden, bias=False, device=DEVICE)
    after = nn.LayerNorm(hidden, bias=False, device=DEVICE)
    modules = GatedLayerModules(qkv, out, up, down, before, after, heads, window)
    for parameter in modules.parameters():
        nn.init.normal_(parameter, std=0.2)
    for name in frozen:
        getattr(modules, name).weight.requires_grad_(False)
    trained = [parameter for parameter in modules.parameters() if parameter.requires_grad]
    cu, tokens = offsets(lengths), sum(lengths)
    angles = random(tokens, size // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    x = random(tokens, hidden).requires_grad_()
    row = torch.repeat_interleave(torch.arange(len(lengths), device=DEVICE), torch.tensor(lengths, device=DEVICE))
    at = torch.arange(tokens, device=DEVICE)
    seen = (row[:, None] == row) & ((at[:, None] - at).abs() <= (tokens if window is None else window))
    normed = x if before is None else before(x)
    query, key, value = modules.qkv(normed).view(tokens, 3, heads, size).permute(1, 2, 0, 3)
    query, key = (t * cos + torch.cat([-t[..., size // 2 :], t[..., : size // 2]], -1) * sin for t in (query, key))
    attended = F.scaled_dot_product_attention(query, key, value, seen).transpose(0, 1).reshape(tokens, hidden)
    summed = x + modules.out(attended)
    activated, gate = modules.up(after(summed)).chunk(2, -1)
    plain = summed + modules.down(F.gelu(activated) * gate)

    def layer(rates: DropoutRates) -> Tensor:
        return gated_layer(x, modules, rates, cos, sin, cu, 128, torch.float32)

    grad = random(tokens, hidden)
    agree(f"gated layer, window {window}", layer(DropoutRates(0.0, 0.0, 0.0)), plain, [x, *trained], grad)

    def scalar(rates: DropoutRates) -> Tensor:
        return (layer(rates) * grad).sum()

    for rates in dropouts:
        check_slopes(partial(scalar, rates), [modules.qkv.weight, modules.up.weight])


def whole_float8_layer() -> None:
    """Check that errors are within 8-bit rounding, and that the second pass, with fitted scales, equals the first."""
    plan, modules = masked_layer.plan_on(DEVICE), masked_layer.modules_on(DEVICE)
    for parameter in modules.parameters():
        nn.init.normal_(parameter, std=0.2)
    rates, shape = DropoutRates(0.0, 0.0, 0.0), (sum(masked_layer.LENGTHS), masked_layer.HIDDEN)
    x, grad = random(*shape), random(*shape)
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    rows = new_scales(len(OPERANDS), torch.device(DEVICE))
    attempts: list[list[Tensor]] = []
    for attempt in range(3):
        leaf = x.to(dtype, copy=True).requires_grad_()
        if attempt < 2:
            result = fused_layer(leaf, modules, rates, plan.cu_seqlens, plan.longest, scales=rows, learn=True)
        else:
            result = plain_layer(leaf.float(), modules, rates, plan)
        wanted = [leaf, *modules.parameters()]
        attempts.append([result, *torch.autograd.grad(result, wanted, 1e-6 * grad.to(result.dtype))])
    key_bias = 2 + 3  # its gradient is zero except for rounding
    for i, (first, second, exact) in enumerate(zip(*attempts, strict=True)):
        what = f"8-bit layer, {'its result' if i == 0 else f'gradient {i}'}"
        if i != key_bias:
            distance = float((first.float() - exact).norm() / exact.norm())
            assert (0 if i < 18 else -1) <= distance < 0.3, (what, distance)  # 0.22 was seen for the query's bias
        torch.testing.assert_close(first, second, rtol=0 if DEVICE == "cpu" else 2e-2, atol=0, msg=what)
        print(what, "agrees")
    assert int((rows[:, 0].view(torch.float32) != 1).sum()) == len(OPERANDS), "every operand has a fitted scale"


def embeddings(dropout: float, *, mixed: bool) -> None:
    rows, width, hidden = 19, 3, 24  # more rows than one program's block
    ids = torch.randint(0, 30, (rows, width), device=DEVICE)
    positions = torch.arange(width, device=DEVICE)[None]
    types = torch.zeros(1, width, dtype=torch.long, device=DEVICE)
    if mixed:
        positions = torch.randint(0, 9, (rows, width), device=DEVICE)
        types = torch.randint(0, 2, (rows, width), device=DEVICE)
    shapes = [(30, hidden), (10, hidden), (2, hidden), (hidden,), (hidden,)]
    leaves = [random(*shape).requires_grad_() for shape in shapes]
    given: list[Any] = [in_another_layout(leaf) if mixed else leaf for leaf in leaves]
    out = embed(*[ids, positions, types, *given, 1e-5, dropout, torch.float32, (1, 2)])
    summed = F.embedding(ids, leaves[0], 1) + F.embedding(positions, leaves[1], 2) + F.embedding(types, leaves[2])
    mask = (out != 0).float() / (1 - dropout)
    expected = F.layer_norm(summed, (hidden,), leaves[3], leaves[4], 1e-5) * mask
    grad = random(*out.shape)
    grad[3] = 0  # padding
    names = ("word", "position", "type", "weight", "bias")
    agree(f"embeddings, dropout {dropout}", out, expected, dict(zip(names, leaves, strict=True)), grad)


def independence() -> None:
    """Check that rows, columns, columns at a fixed distance and quadruples of a mask are statistically independent."""
    tokens, hidden, p, runs = 64, 1024, 0.1, 6  # small, because the interpreter is slow: there is one program per token
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
    assert all(0.85 < v < 1.15 for v in variances), variances  # 1 if independent
    assert abs(sum(squares)) / runs**0.5 < 4, squares  # standard normal if independent
    assert sum(a * a for a in apart) / len(apart) < 1.7, apart  # each is standard normal if independent
    print("masks are independent")


def first_tokens(dropout: float, window: int | None) -> None:
    """Compare the attention of first tokens with a softmax under the mask that the kernel draws; the last row has no
    query."""
    lengths, heads, size = [5, 0, 100, 64, 1, 7], 2, 64
    cu = offsets(lengths)
    starts, hidden, rows = cu.tolist(), heads * size, len(lengths) - 1
    query, key_value = random(rows, hidden).requires_grad_(), random(sum(lengths), 2 * hidden).requires_grad_()
    masks = [torch.ones(heads, length, device=DEVICE) for length in lengths]
    for first in range(0, max(lengths) if dropout else 0, size):
        keys_alone = torch.zeros_like(key_value)  # uniform attention over values that are 1 for one key at a time
        for start, length in zip(starts, lengths, strict=False):
            units = torch.arange(max(0, min(size, length - first)))
            keys_alone.view(-1, 2, heads, size)[start + first + units, 1, :, units] = 1
        torch.manual_seed(3)
        out = first_token_attention(torch.zeros_like(query), keys_alone, cu, heads, dropout)
        for mask, row in zip(masks, out.view(rows, heads, size), strict=False):
            mask[:, first : first + size] = (row > 0).float()[:, : max(0, mask.shape[1] - first)]
    dropped = 1 - float(torch.cat([mask.flatten() for mask in masks[:rows]]).mean())
    assert abs(dropped - dropout) < 0.08, dropped
    expected = []
    for row, mask in enumerate(masks[:rows]):
        seen = slice(starts[row], starts[row] + min(lengths[row], lengths[row] if window is None else window + 1))
        keys, values = key_value[seen].unflatten(1, (2, heads, size)).unbind(1)
        weights = torch.einsum("ad,nad->an", query[row].view(heads, size), keys) * size**-0.5
        kept = weights.softmax(-1) * mask[:, : weights.shape[1]] / (1 - dropout)
        expected.append(torch.einsum("an,nad->ad", kept, values).flatten())
    torch.manual_seed(3)
    actual = first_token_attention(query, key_value, cu, heads, dropout, window)
    what = f"attention of first tokens, dropout {dropout}, window {window}"
    agree(what, actual, torch.stack(expected), {"queries": query, "keys and values": key_value})


def documented_example() -> None:
    """Run the package's documented example, and compare it (without dropout) with plain attention."""
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
        float8_kernels(rate)
    float8_scales()
    gelus()
    casts()
    merged()
    whole_float8_layer()
    dropped_layer(DropoutRates(0.3, 0.2, 0.4))
    for site in DropoutRates._fields if DEVICE == "cuda" else ():  # masks_of reads one site at a time anyway
        dropped_layer(masked_layer.only(site, 0.5))
    rotations()
    for width in (0, 3, 64, 90, 256):
        attentions(lengths=[5, 0, 200, 1, 70], longest=256, window=width)
    for settings in ((0.0, None), (0.0, 5), (0.3, None), (0.3, 70)):
        first_tokens(*settings)
    gated_layers(None, first=True, dropouts=[DropoutRates(0.4, 0.4, 0.4)])
    alone = [DropoutRates(0.4, 0.0, 0.0), DropoutRates(0.0, 0.4, 0.0), DropoutRates(0.0, 0.0, 0.4)]
    gated_layers(7, first=False, dropouts=alone)
    independence()
    sys.exit(0)
