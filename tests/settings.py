"""One entry a technique: how the generic tests exercise it. A technique without one fails collection."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch

from composer_speedups.algorithms.catalogue import technique_names
from composer_speedups.algorithms.registry import technique_class
from composer_speedups.algorithms.technique import Technique

__all__ = ["ENTRIES", "Entry", "cases"]

Same = Literal["logits", "losses", "gradients", "weights"]


@dataclass(frozen=True)
class Entry:
    """How to test a technique.

    Attributes:
        variants: Constructor arguments, one dict a test case. Those that need a GPU go to ``gpu_variants``.
        exactness: ``"exact"`` (bit for bit), ``"rounding"`` (within ``dtype``'s tolerance of the untouched
            model), or ``"recipe"`` (another training recipe).
        same: What still equals the untouched model within ``dtype``'s tolerance; a recipe keeps less than the
            default, all of it.
        loss_bound: Greatest distance of the smoothed loss over 200 steps from the untouched model's; stated by
            every technique that computes in less than float32 or changes the recipe.
        dtype: What the technique computes in.
        needs: Techniques it requires beside it.
        evidence: Keys that its evidence must hold.
        stock_checkpoint: Parameter names, shapes and exports are the stock model's.
    """

    variants: list[dict[str, Any]] = field(default_factory=list)
    gpu_variants: list[dict[str, Any]] = field(default_factory=list)
    exactness: Literal["exact", "rounding", "recipe"] = "rounding"
    same: tuple[Same, ...] = ("logits", "losses", "gradients", "weights")
    loss_bound: float | None = None
    dtype: torch.dtype = torch.float32
    needs: dict[str, dict[str, Any]] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()
    stock_checkpoint: bool = True

    def __post_init__(self) -> None:
        assert self.exactness == "recipe" or len(self.same) == 4, "what is not the same is another recipe"
        approximate = self.exactness == "recipe" or self.dtype != torch.float32
        assert approximate == (self.loss_bound is not None), "loss_bound is for those that are not exact in float32"


BF16 = {"mixed_precision": {"dtype": "bf16", "allow_cpu": True}}

ENTRIES: dict[str, Entry] = {
    "fast_layernorm": Entry(
        [{}], needs=BF16, dtype=torch.bfloat16, loss_bound=0.05, evidence=("modules", "output_dtype")
    ),
    "float8_linear": Entry(
        [{"recipe": "tensorwise", "emulate": True}],  # the coarsest; test_float8_linear.py has all of them
        gpu_variants=[{"recipe": "tensorwise"}, {"recipe": "rowwise"}, {"recipe": "rowwise_with_gw_hp"}],
        needs=BF16,
        dtype=torch.float8_e4m3fn,
        loss_bound=0.06,
        evidence=("modules", "float8_matmuls", "seen_in"),
    ),
    "foreach_optimizer": Entry([{}], evidence=("operators_in_one_step",)),
    "fused_optimizer": Entry([{}], evidence=("operators_in_one_step",)),
    "mixed_precision": Entry(
        [{"dtype": "bf16", "allow_cpu": True}],
        gpu_variants=[{"dtype": "bf16"}, {"dtype": "fp16"}],
        dtype=torch.bfloat16,
        loss_bound=0.05,
        evidence=("dtypes_seen",),
    ),
    "sdpa_attention": Entry(
        [{}, {"backend": "math"}],
        gpu_variants=[{}, {"backend": "efficient"}],  # the others take no fp32; see test_sdpa_attention.py
        evidence=("kernel",),
    ),
    "sparse_upcycling": Entry(
        [{"every": 1}],
        exactness="recipe",
        same=("logits",),
        loss_bound=0.1,
        evidence=("layers", "parameters_added", "rows_per_expert", "load_balancing_loss", "share_in_first_batch"),
        stock_checkpoint=False,
    ),
    "tf32_matmul": Entry(
        gpu_variants=[{"precision": "high"}, {"precision": "medium"}],
        dtype=torch.float16,  # TF32 has fp16's mantissa
        loss_bound=0.05,
        evidence=("matmul_relative_error",),
    ),
    "torch_compile": Entry(
        [{"scope": "model", "backend": "aot_eager"}, {"scope": "blocks", "backend": "aot_eager"}],
        gpu_variants=[{"scope": "model"}, {"scope": "blocks"}],
        evidence=("graphs", "graph_breaks", "recompiles"),
    ),
}

missing = set(technique_names()) ^ set(ENTRIES)
if missing:
    raise RuntimeError(f"tests/settings.py and the technique folders differ by: {', '.join(sorted(missing))}")


@dataclass(frozen=True)
class Case:
    """One technique with one set of arguments."""

    name: str
    arguments: tuple[tuple[str, Any], ...]
    entry: Entry

    def build(self) -> Technique:
        return technique_class(self.name)(**dict(self.arguments))

    def build_all(self) -> list[Technique]:
        """The technique and what it needs."""
        return [*(technique_class(n)(**kw) for n, kw in self.entry.needs.items()), self.build()]

    @property
    def id(self) -> str:
        return "-".join([self.name, *(str(v) for _, v in self.arguments)])


def cases(*, gpu: bool = False) -> list[Any]:
    """pytest parameters: every variant of every technique, on the CPU or on a GPU."""
    found = [
        Case(name, tuple(arguments.items()), entry)
        for name, entry in sorted(ENTRIES.items())
        for arguments in ((entry.gpu_variants or entry.variants) if gpu else entry.variants)
    ]
    return [pytest.param(case, id=case.id) for case in found]
