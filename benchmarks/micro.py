"""python -m benchmarks.micro: time each kernel of fused_layers separately.

In bf16, compared with PyTorch's operators for the same work, and with the time to read its inputs and write its outputs
once at the rate of a large copy. The rows have the lengths of IMDB's reviews; ``rank`` is that of LoRA adapters. Prints
Markdown, and appends a row to benchmarks/results/<gpu>/micro.jsonl.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.benchmark import Timer

from benchmarks.rows import append_row, call_time
from benchmarks.tables import kernel_times
from composer_speedups.families.blocks import repeated_blocks
from composer_speedups.families.family import family_of
from composer_speedups.train.environment import environment

# Quantiles of the lengths of 8,000 reviews, in tokens of bert-base-uncased's vocabulary, from the shortest to the
# longest.
_QUANTILES = (
    13, 74, 96, 120, 140, 150, 156, 161, 168, 175, 182, 189, 197, 206, 215, 225, 236,
    247, 261, 276, 294, 313, 333, 356, 385, 417, 452, 496, 555, 636, 761, 943, 2467,
)  # fmt: skip


SHAPE = {"rows": 128, "longest": 256, "hidden": 768, "heads": 12, "rank": 8}
DROPOUT = 0.1


class Case(NamedTuple):
    """A kernel: its call, PyTorch's equivalent, and the bytes that it reads and writes."""

    name: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    moved: int


def lengths(rows: int, longest: int) -> list[int]:
    """Lengths of a batch, distributed as IMDB's."""
    at = (np.arange(rows) + 0.5) / rows
    spread = np.interp(at, np.linspace(0, 1, len(_QUANTILES)), _QUANTILES)
    return [min(int(length), longest) for length in spread]


class Product(NamedTuple):
    """The matrix product of a Linear layer."""

    inputs: int
    outputs: int
    rows: int


def linear_products(model: nn.Module, tokens: int, first_tokens: int | None = None) -> list[Product]:
    """The products of every Linear in the model's repeated blocks, each of ``tokens`` rows.

    A last block that computes only first tokens has ``first_tokens`` rows instead, except for keys and values.
    """
    blocks = list(repeated_blocks(model).values())
    products, few = [], first_tokens or 0
    for block in blocks:
        short = first_tokens is not None and block is blocks[-1]
        layer_modules = getattr(family_of(type(block)), "layer_modules", None)
        modules = layer_modules(block) if short and layer_modules is not None else None
        of_all = {id(getattr(modules, name, None)) for name in ("key", "value")}
        for module in block.modules():
            if not isinstance(module, nn.Linear):
                continue
            inputs, outputs = module.in_features, module.out_features
            if not short or id(module) in of_all:
                products.append(Product(inputs, outputs, tokens))
            elif module is getattr(modules, "qkv", None):
                products += [Product(inputs, outputs // 3, few), Product(inputs, 2 * outputs // 3, tokens)]
            else:
                products.append(Product(inputs, outputs, few))
    return products


def gemm_floor(products: Sequence[Product], device: torch.device, dtype: torch.dtype, repeats: int = 10) -> float:
    """Seconds of a step's products, forward and backward, with the weights of each layer; the best of three."""
    shapes = {(product.rows, width) for product in products for width in (product.inputs, product.outputs)}
    rows = {shape: torch.randn(*shape, device=device, dtype=dtype) for shape in shapes}
    weights = [torch.randn(product.outputs, product.inputs, device=device, dtype=dtype) for product in products]
    layers = list(zip(products, weights, strict=True))

    def step() -> None:
        for product, weight in layers:
            rows[product.rows, product.inputs] @ weight.T
        for product, weight in reversed(layers):
            gradient = rows[product.rows, product.outputs]
            gradient @ weight
            gradient.T @ rows[product.rows, product.inputs]

    return min(_seconds(step, repeats) for _ in range(3))


def _seconds(call: Callable[[], Any], repeats: int) -> float:
    """Mean duration of repeated calls after two others; waits for the GPU before and after them."""
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.timeit(repeats).mean


def microseconds(call: Callable[[], Any], repeats: int = 30) -> float:
    """Duration of one call on the GPU: the median of five times ``repeats`` calls."""
    return 1e6 * statistics.median(_seconds(call, repeats) for _ in range(5))


def copied_per_microsecond(size: int = 2**30) -> float:
    """Bytes per microsecond that a large copy reads and writes."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / microseconds(lambda: target.copy_(source), 5)


def cases(rows: int, longest: int, hidden: int, heads: int, rank: int, dropout: float = DROPOUT) -> list[Case]:
    from composer_speedups.kernels.attention import attention_backward, attention_forward
    from composer_speedups.kernels.gelu import gelu_backward, gelu_forward
    from composer_speedups.kernels.gelu_products import gelu_product, gelu_product_backward
    from composer_speedups.kernels.narrow import adapter_gradients, gelu_backward_narrow, gelu_narrow, narrow_gradient
    from composer_speedups.kernels.norm import add_norm_backward, add_norm_forward

    sizes = lengths(rows, longest)
    tokens = sum(sizes)
    cu = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device="cuda")
    seed = torch.tensor([7], dtype=torch.int32, device="cuda")

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    x, residual, grad = (random(tokens, hidden) for _ in range(3))
    qkv, up, d_up = (random(tokens, width * hidden) for width in (3, 4, 4))
    weight, bias = torch.ones(hidden, device="cuda"), torch.zeros(hidden, device="cuda")
    out, logs = attention_forward(qkv, cu, longest, heads, dropout, seed)
    _, summed, moments = add_norm_forward(x.clone(), residual, weight, bias, 1e-12, dropout, seed)
    unit = 2 * tokens * hidden

    q, k, v = (part.view(tokens, heads, -1) for part in qkv.split(hidden, 1))
    flash: Any = torch.ops.aten._flash_attention_forward
    flash_out = flash(q, k, v, cu, cu, longest, longest, dropout, False, False)

    def flash_backward() -> Any:
        result, logsumexp, state, offset = flash_out[:4]
        return torch.ops.aten._flash_attention_backward(
            grad.view_as(q), q, k, v, result, logsumexp, cu, cu, longest, longest, dropout, False, state, offset
        )

    leaves = [t.to(x.dtype).requires_grad_() for t in (x.clone(), residual.clone(), weight, bias)]

    def plain_norm() -> Tensor:
        return F.layer_norm(F.dropout(leaves[0], dropout) + leaves[1], (hidden,), leaves[2], leaves[3], 1e-12)

    leaf = up.clone().requires_grad_()
    normed, activated = plain_norm(), F.gelu(leaf)
    z, z_qkv = random(tokens, rank), random(tokens, 3 * rank)
    on_qkv, on_up = random(3 * hidden * rank), random(4 * hidden, rank)
    each_b = [(slice(i * hidden, (i + 1) * hidden), b.view(-1, rank)) for i, b in enumerate(on_qkv.chunk(3))]

    widen, narrow_again, offsets = random(4 * hidden, hidden), random(hidden, 4 * hidden), random(4 * hidden)

    def plain_product_backward() -> Any:
        return torch.ops.aten.gelu_backward(grad @ narrow_again, up, approximate="tanh")

    def gelu_backward_and_products() -> Any:
        d_x = torch.autograd.grad(activated, leaf, d_up, retain_graph=True)[0]
        return d_x, d_x @ on_up, d_x.t() @ z, z.t() @ F.gelu(up)

    return [
        Case("attention", lambda: attention_forward(qkv, cu, longest, heads, dropout, seed),
             lambda: flash(q, k, v, cu, cu, longest, longest, dropout, False, False), 4 * unit),
        Case("attention_backward", lambda: attention_backward(grad, qkv, out, logs, cu, longest, dropout, seed),
             flash_backward, 8 * unit),
        Case("norm", lambda: add_norm_forward(x, residual, weight, bias, 1e-12, dropout, seed), plain_norm, 4 * unit),
        Case("norm_backward", lambda: add_norm_backward(grad, summed, moments, weight, dropout, seed, bias),
             lambda: torch.autograd.grad(normed, leaves, grad, retain_graph=True), 5 * unit),
        Case("gelu", lambda: gelu_forward(up), lambda: F.gelu(up), 8 * unit),
        Case("gelu_backward", lambda: gelu_backward(d_up, up),
             lambda: (torch.autograd.grad(activated, leaf, d_up, retain_graph=True)[0].sum(0), F.gelu(up)), 16 * unit),
        Case("product_with_gelu", lambda: gelu_product(x, widen, offsets),
             lambda: F.gelu(torch.addmm(offsets, x, widen.t()), approximate="tanh"), 9 * unit),
        Case("product_with_gelu_backward", lambda: gelu_product_backward(grad, narrow_again, up),
             plain_product_backward, 9 * unit),
        Case("adapters_qkv_backward", lambda: adapter_gradients(qkv, z_qkv, on_qkv, [rank] * 3),
             lambda: [(qkv[:, part] @ b, qkv[:, part].t() @ z) for part, b in each_b], 3 * unit),
        Case("adapters_input_backward", lambda: narrow_gradient(x, z_qkv), lambda: z_qkv.t() @ x, unit),
        Case("gelu_with_adapter", lambda: gelu_narrow(up, on_up), lambda: F.gelu(up) @ on_up, 8 * unit),
        Case("gelu_backward_with_adapters", lambda: gelu_backward_narrow(d_up, up, z, on_up, z),
             gelu_backward_and_products, 12 * unit),
    ]  # fmt: skip


def main(shape: dict[str, int] = SHAPE) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.micro times kernels of a CUDA GPU, and there is none here")
    every, speed = cases(**shape), copied_per_microsecond()
    kernels = []
    for case in every:
        times = {"us": microseconds(case.ours), "torch_us": microseconds(case.theirs), "copy_us": case.moved / speed}
        kernels.append({"name": case.name, **times})
    row = {
        "table": "micro",
        "call": call_time(),
        **shape,
        "dropout": DROPOUT,
        "tokens": sum(lengths(shape["rows"], shape["longest"])),
        "copy_gb_per_second": speed / 1e3,
        "kernels": kernels,
        "environment": environment(),
    }
    append_row(row, "micro")
    print("\n".join(kernel_times(row)))


if __name__ == "__main__":
    main()
