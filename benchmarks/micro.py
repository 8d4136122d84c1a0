"""python -m benchmarks.micro [rows=128] [longest=256] [hidden=768] [heads=12] [dropout=0.1] [KERNEL.OPTION=N,N …]

Times each kernel of fused_layers separately in bf16, compared with PyTorch's operators for the same work, and with the
time to read its inputs and write its outputs once at the rate of a large copy. Prints Markdown, and appends a row to
benchmarks/results/<gpu>/micro.jsonl.

The rows have the lengths of IMDB's reviews. Kernels are ``attention``, ``queries`` and ``keys`` (the two kernels of
attention's backward pass), ``norm_backward``, ``gelu`` and ``gelu_backward``. Their options are the constants of their
modules (ROWS, COLUMNS, BLOCK, num_warps, num_stages, maxnreg), and several values are tried in turn:
``attention.num_stages=1,2``.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.rows import Row, append_row, call_time
from benchmarks.tables import table
from composer_speedups.families.blocks import repeated_blocks
from composer_speedups.families.family import family_of
from composer_speedups.train.environment import environment

# Quantiles of the lengths of 8,000 reviews, in tokens of bert-base-uncased's vocabulary, from the shortest to the
# longest.
_QUANTILES = (
    13, 74, 96, 120, 140, 150, 156, 161, 168, 175, 182, 189, 197, 206, 215, 225, 236,
    247, 261, 276, 294, 313, 333, 356, 385, 417, 452, 496, 555, 636, 761, 943, 2467,
)  # fmt: skip
_PLACES = {  # kernel → its case, its module of composer_speedups.kernels, its options in that module
    "attention": ("attention", "attention", "_FORWARD"),
    "queries": ("attention_backward", "attention", "_QUERIES"),
    "keys": ("attention_backward", "attention", "_KEYS"),
    "norm_backward": ("norm_backward", "norm", "BACKWARD"),
    "gelu": ("gelu", "gelu", "_FORWARD"),
    "gelu_backward": ("gelu_backward", "gelu", "_BACKWARD"),
}


class Settings(NamedTuple):
    rows: int = 128
    longest: int = 256
    hidden: int = 768
    heads: int = 12
    dropout: float = 0.1


class Case(NamedTuple):
    """A kernel: its call, PyTorch's equivalent, and the bytes and operations it needs."""

    name: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    moved: int  # bytes
    flops: int = 0


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
    """The products of every Linear in the model's repeated blocks, in order.

    Args:
        model: A transformers model, or a module around one.
        tokens: Number of rows of each product.
        first_tokens: Number of rows in the last block if it computes only first tokens, except for keys and values;
            None if it computes all.
    """
    blocks = list(repeated_blocks(model).values())
    found = []
    for block in blocks:
        short = first_tokens is not None and block is blocks[-1]
        family = family_of(type(block))
        modules = (
            family.layer_modules(block) if short and family is not None and family.layer_modules is not None else None
        )
        of_all = {id(getattr(modules, name, None)) for name in ("key", "value")}
        for module in block.modules():
            if not isinstance(module, nn.Linear):
                continue
            inputs, outputs = module.in_features, module.out_features
            if not short or id(module) in of_all:
                found.append(Product(inputs, outputs, tokens))
            elif module is getattr(modules, "qkv", None):
                found += [Product(inputs, outputs // 3, first_tokens or 0), Product(inputs, 2 * outputs // 3, tokens)]
            else:
                found.append(Product(inputs, outputs, first_tokens or 0))
    return found


def gemm_floor(products: Sequence[Product], device: torch.device, dtype: torch.dtype, repeats: int = 10) -> float:
    """Seconds of one step's products: forward, input gradient and weight gradient of each.

    Every layer has its own weights, as in a step. The best of three passes of ``repeats`` steps is returned.
    """
    shapes = {(each.rows, width) for each in products for width in (each.inputs, each.outputs)}
    rows = {shape: torch.randn(*shape, device=device, dtype=dtype) for shape in shapes}
    weights = [(each, torch.randn(each.outputs, each.inputs, device=device, dtype=dtype)) for each in products]

    def step() -> None:
        for each, weight in weights:
            rows[each.rows, each.inputs] @ weight.T
        for each, weight in reversed(weights):
            gradient = rows[each.rows, each.outputs]
            gradient @ weight
            gradient.T @ rows[each.rows, each.inputs]

    def timed() -> float:
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        wait()
        return (time.perf_counter() - start) / repeats

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    step()
    return min(timed() for _ in range(3))


def read_arguments(arguments: Sequence[str]) -> tuple[Settings, dict[str, dict[str, list[int]]]]:
    """Settings, and values to try by kernel and option.

    Raises:
        SystemExit: Names the argument.
    """
    settings, tried = Settings(), {}  # type: ignore[var-annotated]
    for argument in arguments:
        name, _, value = argument.partition("=")
        kernel, _, option = name.partition(".")
        try:
            if option and kernel in _PLACES:
                tried.setdefault(kernel, {})[option] = [int(number) for number in value.split(",")]
            else:
                kind = type(getattr(Settings(), name))
                settings = settings._replace(**{name: kind(value)})
        except (AttributeError, TypeError, ValueError):
            known = ", ".join([*Settings._fields, *(f"{kernel}.OPTION" for kernel in _PLACES)])
            raise SystemExit(f"{argument}: expected integers for one of {known}") from None
    return settings, tried


def microseconds(call: Callable[[], Any], repeats: int = 30) -> float:
    """Duration of one call on the GPU: the median of five times ``repeats`` calls."""
    for _ in range(3):
        call()
    found = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        found.append(1e3 * start.elapsed_time(end) / repeats)
    return sorted(found)[2]


def copied_per_microsecond(size: int = 2**30) -> float:
    """Bytes per microsecond that a large copy reads and writes."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / microseconds(lambda: target.copy_(source), 5)


def cases(settings: Settings) -> list[Case]:
    from composer_speedups.kernels.attention import attention_backward, attention_forward
    from composer_speedups.kernels.gelu import gelu_backward, gelu_forward
    from composer_speedups.kernels.norm import add_norm_backward, add_norm_forward

    rows, longest, hidden, heads, dropout = settings
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
    _, summed, statistics = add_norm_forward(x.clone(), residual, weight, bias, 1e-12, dropout, seed)
    unit, products = 2 * tokens * hidden, 4 * sum(size**2 for size in sizes) * hidden

    q, k, v = (each.view(tokens, heads, -1) for each in qkv.split(hidden, 1))
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
    return [
        Case("attention", lambda: attention_forward(qkv, cu, longest, heads, dropout, seed),
             lambda: flash(q, k, v, cu, cu, longest, longest, dropout, False, False), 4 * unit, products),
        Case("attention_backward", lambda: attention_backward(grad, qkv, out, logs, cu, longest, dropout, seed),
             flash_backward, 8 * unit, 5 * products // 2),
        Case("norm", lambda: add_norm_forward(x, residual, weight, bias, 1e-12, dropout, seed), plain_norm, 4 * unit),
        Case("norm_backward", lambda: add_norm_backward(grad, summed, statistics, weight, dropout, seed, bias),
             lambda: torch.autograd.grad(normed, leaves, grad, retain_graph=True), 5 * unit),
        Case("gelu", lambda: gelu_forward(up), lambda: F.gelu(up), 8 * unit),
        Case("gelu_backward", lambda: gelu_backward(d_up, up),
             lambda: (torch.autograd.grad(activated, leaf, d_up, retain_graph=True)[0].sum(0), F.gelu(up)), 16 * unit),
    ]  # fmt: skip


def _tries(
    found: Sequence[Case], tried: dict[str, dict[str, list[int]]]
) -> Iterator[tuple[Case, dict[str, int], float]]:
    """Every case with its default options, then with each combination of a kernel's options."""
    for case in found:
        yield case, {}, microseconds(case.ours)
    for kernel, options in tried.items():
        name, module, attribute = _PLACES[kernel]
        place = getattr(importlib.import_module(f"composer_speedups.kernels.{module}"), attribute)
        case, before = next(case for case in found if case.name == name), dict(place)
        for numbers in itertools.product(*options.values()):
            chosen = dict(zip(options, numbers, strict=True))
            place.update(chosen)
            yield case, {f"{kernel}.{option}": number for option, number in chosen.items()}, microseconds(case.ours)
            place.clear()
            place.update(before)


def main(arguments: Sequence[str]) -> None:
    if arguments and arguments[0] in ("-h", "--help"):
        print(__doc__)
        return
    settings, tried = read_arguments(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.micro times kernels of a CUDA GPU, and there is none here")
    found, speed = cases(settings), copied_per_microsecond()
    theirs = {case.name: microseconds(case.theirs) for case in found}
    kernels = [
        {
            "name": case.name,
            "options": options,
            "us": us,
            "torch_us": theirs[case.name],
            "copy_us": case.moved / speed,
            "tflops": case.flops / us / 1e6 or None,
        }
        for case, options, us in _tries(found, tried)
    ]
    row = {
        "table": "micro",
        "call": call_time(),
        **settings._asdict(),
        "tokens": sum(lengths(settings.rows, settings.longest)),
        "copy_gb_per_second": speed / 1e3,
        "kernels": kernels,
        "environment": environment(),
    }
    append_row(row, "micro")
    print("\n".join(markdown(row)))


def markdown(row: Row) -> list[str]:
    """Format a row as a table."""
    lines = []
    for kernel in row["kernels"]:
        options = " ".join(f"{name}={number}" for name, number in kernel["options"].items())
        times = [f"{kernel[name]:.0f}" for name in ("us", "torch_us", "copy_us")]
        rate = "–" if kernel["tflops"] is None else f"{kernel['tflops']:.0f}"
        lines.append([kernel["name"], options, *times, rate])
    return table(["kernel", "options", "µs", "PyTorch's, µs", "one copy, µs", "TFLOP/s"], lines)


if __name__ == "__main__":
    main(sys.argv[1:])
