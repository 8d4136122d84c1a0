"""The Triton kernels of fused_layers, as they are launched, compile for GPUs that need not be here."""

from __future__ import annotations

import inspect
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="Triton comes with torch on Linux only")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from composer_speedups.algorithms.fused_layers.attention import attention_backward, attention_forward  # noqa: E402
from composer_speedups.algorithms.fused_layers.embeddings import embed  # noqa: E402
from composer_speedups.algorithms.fused_layers.gelu import gelu_backward  # noqa: E402
from composer_speedups.algorithms.fused_layers.norm import add_norm_backward, add_norm_forward  # noqa: E402

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
SEED, CU = torch.zeros(1, dtype=torch.int32), torch.tensor([0, 200, 256], dtype=torch.int32)
HIDDEN = 768


def launch(fn: Any, *args: Any, architecture: int, **kwargs: Any) -> Any:
    """Compile what a launch with these arguments would run."""
    names = inspect.signature(fn.fn).parameters
    given = {**dict(zip(names, args, strict=False)), **{n: v for n, v in kwargs.items() if n in names}}
    options = {n: v for n, v in kwargs.items() if n not in names}
    signature, constants, attributes = {}, {}, {}
    for i, (name, value) in enumerate(given.items()):
        if isinstance(value, Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
        elif fn.params[i].is_constexpr or value == 1:
            signature[name], constants[i,] = "constexpr", value
        else:
            whole = "i32" if -(2**31) <= value < 2**31 else "i64"
            signature[name] = "fp32" if isinstance(value, float) else whole
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0 and (i,) not in constants):
            attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource(fn, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def tokens(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def norms(dropout: float, dtype: torch.dtype) -> None:
    x, weight = tokens(256, HIDDEN, dtype=dtype), torch.zeros(HIDDEN)
    add_norm_forward(x, x, weight, weight, 1e-12, dropout, SEED)
    for bias in (None, weight):
        add_norm_backward(x, x, torch.zeros(2, 256), weight, dropout, SEED, bias)


def attention(dropout: float, dtype: torch.dtype) -> None:
    qkv, out = tokens(256, 3 * HIDDEN, dtype=dtype), tokens(256, HIDDEN, dtype=dtype)
    attention_forward(qkv, CU, 256, 12, dropout, SEED)
    attention_backward(out, qkv, out, torch.zeros(12, 256), CU, 256, dropout, SEED)


def gelu(dropout: float, dtype: torch.dtype) -> None:
    gelu_backward(tokens(256, 4 * HIDDEN, dtype=dtype), tokens(256, 4 * HIDDEN, dtype=dtype))


def embeddings(dropout: float, dtype: torch.dtype) -> None:
    ids, places = torch.zeros(4, 64, dtype=torch.long), torch.arange(64)[None]
    word, position, kind = (torch.zeros(n, HIDDEN, requires_grad=True) for n in (32, 64, 2))
    weight = torch.zeros(HIDDEN, requires_grad=True)
    out = embed(ids, places, 0 * places, word, position, kind, weight, weight, 1e-12, dropout, dtype, (0, -1))
    out.backward(torch.zeros_like(out))


@pytest.mark.pins
@pytest.mark.parametrize("case", [norms, attention, gelu, embeddings])
@pytest.mark.parametrize(("architecture", "dropout"), [(80, 0.1), (90, 0.1), (90, 0.0)])
def test_every_launch_compiles_and_spills_no_registers(
    case: Callable[[float, torch.dtype], None], architecture: int, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(Path.cwd()))
    compiled: list[Any] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert all(programs > 0 for programs in grid)
        compiled.append(launch(self, *args, architecture=architecture, **kwargs))

    monkeypatch.setattr(JITFunction, "run", run)
    case(dropout, torch.float16 if architecture == 80 else torch.bfloat16)
    assert len(compiled) == {"norms": 3, "attention": 3, "gelu": 1, "embeddings": 2}[case.__name__]
    if architecture == 90:  # what the block sizes were chosen for
        for kernel in compiled:
            Path("kernel.cubin").write_bytes(kernel.asm["cubin"])
            tool = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "cuobjdump"
            used = subprocess.run(
                [tool, "-res-usage", "kernel.cubin"], capture_output=True, text=True, check=True
            ).stdout
            registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", used).groups())  # type: ignore[union-attr]
            assert (stack, registers <= 255) == (0, True), kernel.metadata.name
