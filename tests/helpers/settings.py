"""How the generic tests exercise each technique. Collection fails for a technique without an entry."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch

from composer_speedups.core.registry import technique_class, technique_names
from composer_speedups.core.requirements import needs_apex
from composer_speedups.core.technique import Effect, Technique

Same = Literal["logits", "losses", "gradients", "weights"]


@dataclass(frozen=True)
class Entry:
    """How to test a technique, with constructor arguments for each test case."""

    variants: list[dict[str, Any]] = field(default_factory=list)
    gpu_variants: list[dict[str, Any]] = field(default_factory=list)  # of those that need a GPU
    # What equals the untouched model's within the tolerance of ``dtype``: all of it, unless it is a recipe.
    same: tuple[Same, ...] = ("logits", "losses", "gradients", "weights")
    # Largest distance of the smoothed loss from the untouched model's over 200 steps, where it may differ.
    loss_bound: float | None = None
    dtype: torch.dtype = torch.float32  # in which it computes
    needs: dict[str, dict[str, Any]] = field(default_factory=dict)  # other techniques
    evidence: tuple[str, ...] = ()  # keys that it must have
    stock_checkpoint: bool = True  # parameter names, shapes and exports are the stock model's
    weight_dtype: torch.dtype = torch.float32  # of the trained and exported weights
    package: str | None = None  # without which the variants are skipped
    also: tuple[Entry, ...] = ()  # further variants with other properties
    gpu: Entry | None = None  # what applies on a GPU instead
    per_rank: str = ""  # why its losses on several ranks differ a little from those of one process


BF16 = {"mixed_precision": {"dtype": "bf16", "allow_cpu": True}}

SWAPPED = ("parameters_moved", "state_dtypes", "state_bytes", "state_on")
BNB = {"bits": 8, "min_8bit_size": 1024}  # tiny_bert's matrices have 1024 and 2048 values
LOW_BITS = {"min_size": 1024}

ENTRIES: dict[str, Entry] = {
    "adafactor": Entry(
        [{}],
        same=("logits", "gradients"),
        loss_bound=0.25,
        evidence=SWAPPED,
    ),
    "apex_optimizer": Entry(gpu_variants=[{}], evidence=SWAPPED, package="apex"),
    "bnb_optimizer": Entry(
        [BNB],
        same=("logits", "gradients"),
        loss_bound=0.01,
        evidence=(*SWAPPED, "tensors_by_state_bits"),
        package="bitsandbytes",
        also=(
            Entry([{"bits": 32}], evidence=(*SWAPPED, "tensors_by_state_bits"), package="bitsandbytes"),
            Entry(
                [{**BNB, "stable_embedding": True}],
                same=(),
                loss_bound=0.05,
                evidence=(*SWAPPED, "stable_embedding"),
                stock_checkpoint=False,
                package="bitsandbytes",
            ),
        ),
    ),
    "cuda_graphs": Entry(gpu_variants=[{}], needs={"sdpa_attention": {}}, evidence=("graphs", "replays")),
    "early_loss": Entry(gpu_variants=[{}], evidence=("losses_read", "read_before_the_batch_was_over")),
    "empty_cache": Entry(gpu_variants=[{"every": 2}], evidence=("times_emptied",)),
    "fast_layernorm": Entry(
        [{}],
        gpu_variants=[{}, {"implementation": "triton"}],  # apex: a stand-in, in test_fast_layernorm.py
        needs=BF16,
        dtype=torch.bfloat16,
        loss_bound=0.05,
        evidence=("modules", "output_dtype"),
    ),
    "float8_linear": Entry(
        [{"recipe": "tensorwise", "emulate": True}],  # the coarsest; test_float8_linear.py has all of them
        gpu_variants=[{"recipe": "tensorwise"}, {"recipe": "rowwise"}, {"recipe": "rowwise_with_gw_hp"}],
        needs=BF16,
        dtype=torch.float8_e4m3fn,
        loss_bound=0.06,
        evidence=("modules", "float8_matmuls", "seen_in"),
        per_rank="a tensor's scale depends on the rank's rows",
    ),
    "foreach_optimizer": Entry([{}], evidence=("operators_in_one_step",)),
    "fused_optimizer": Entry([{}], gpu_variants=[{}], evidence=("operators_in_one_step",)),
    "fused_layers": Entry(
        [{}, {"last_layer": "all"}],
        needs={"unpadding": {}},
        evidence=("layers", "layers_ran", "embeddings_ran"),
        gpu=Entry(  # its kernels take 16 bits only
            gpu_variants=[{}, {"last_layer": "all"}, {"gelu": "tanh"}],
            needs={"unpadding": {}, **BF16},
            dtype=torch.bfloat16,
            loss_bound=0.05,
        ),
        also=(
            Entry(
                gpu_variants=[{"last_layer": "all", "precision": "fp8", "fp8_min_width": 0}],
                needs={"unpadding": {}, **BF16},
                dtype=torch.float8_e4m3fn,
                loss_bound=0.06,
                evidence=("layers", "layers_ran", "embeddings_ran"),
            ),
        ),
    ),
    "gradient_checkpointing": Entry([{}, {"every": 2}], evidence=("blocks", "blocks_recomputed", "seen_in")),
    "kahan_optimizer": Entry(
        [{}],
        dtype=torch.bfloat16,
        weight_dtype=torch.bfloat16,
        loss_bound=0.05,
        evidence=SWAPPED,
    ),
    "layer_freezing": Entry(
        [{"layers": 1}, {"layers": "embeddings"}],
        same=("logits",),
        loss_bound=0.65,  # random embeddings, frozen from the start; one that learned nothing would end 0.7 away
        evidence=("frozen", "frozen_parameters", "trained_parameters"),
    ),
    "lean_dispatch": Entry([{}], evidence=("events_per_batch", "calls_left_out_per_batch")),
    "lora": Entry(
        # Above the defaults, with which a base of random weights learns next to nothing at the tests' rate.
        [{"targets": "all-linear", "alpha": 64.0}, {"targets": ["query", "dense"], "rank": 4, "alpha": 64.0}],
        same=("logits",),  # adapters start at zero
        loss_bound=0.55,  # one that learned nothing would end 0.7 away
        evidence=("modules", "trainable_parameters", "total_parameters", "adapters_with_gradient", "parameters_moved"),
        stock_checkpoint=False,
    ),
    "lowbit_optimizer": Entry(
        [{"bits": 8, **LOW_BITS}, {"bits": "fp8", **LOW_BITS}],
        same=("logits", "gradients"),
        loss_bound=0.01,
        evidence=(*SWAPPED, "tensors_by_state_bits"),
        also=(
            Entry(
                [{"bits": 4, **LOW_BITS}],
                same=("logits", "gradients"),
                loss_bound=0.1,
                evidence=(*SWAPPED, "tensors_by_state_bits"),
            ),
        ),
    ),
    "mixed_precision": Entry(
        [{"dtype": "bf16", "allow_cpu": True}],
        gpu_variants=[{"dtype": "bf16"}, {"dtype": "fp16"}],
        dtype=torch.bfloat16,
        loss_bound=0.05,
        evidence=("dtypes_seen",),
    ),
    "offloaded_optimizer": Entry([{"allow_cpu": True}], gpu_variants=[{}], evidence=SWAPPED),
    "sdpa_attention": Entry(
        [{}, {"backend": "math"}],
        gpu_variants=[{}, {"backend": "efficient"}],  # the others take no fp32; see test_sdpa_attention.py
        evidence=("kernel",),
    ),
    "sharded_optimizer": Entry([{}], evidence=(*SWAPPED, "ranks", "state_bytes_by_rank")),
    "sparse_upcycling": Entry(
        [{"every": 1}],
        same=("logits",),
        loss_bound=0.1,
        evidence=("layers", "parameters_added", "experts_that_ran", "load_balancing_loss"),
        per_rank="the load-balancing loss is a product of means over a rank's tokens",
        stock_checkpoint=False,
    ),
    "tf32_matmul": Entry(
        gpu_variants=[{"precision": "high"}, {"precision": "medium"}],
        dtype=torch.float16,  # TF32 has fp16's mantissa
        loss_bound=0.05,
        evidence=("matmul_relative_error",),
    ),
    "torch_compile": Entry(
        # The whole model's backward pass takes aot_eager half a minute to trace: test_float8_linear.py does so.
        [{"scope": "blocks", "backend": "aot_eager"}, {"scope": "model", "backend": "eager"}],
        gpu_variants=[{"scope": "model"}, {"scope": "blocks"}],
        evidence=("graphs", "graph_breaks", "recompiles"),
    ),
    "unpadding": Entry(
        [{}, {"pad_to_multiple_of": 8}],
        evidence=("encoders", "layers", "attention", "first_batch_packed", "padding_of_the_run"),
    ),
}

missing = set(technique_names()) ^ set(ENTRIES)
if missing:
    raise RuntimeError(f"tests/helpers/settings.py and the technique folders differ by: {', '.join(sorted(missing))}")


@dataclass(frozen=True)
class Case:
    """One technique with one set of arguments."""

    name: str
    arguments: tuple[tuple[str, Any], ...]
    entry: Entry

    def build(self) -> Technique:
        return technique_class(self.name)(**dict(self.arguments))

    def effect(self, *, gpu: bool = False) -> Effect:
        """The effect on the result that the class declares."""
        return technique_class(self.name).effect_with(dict(self.arguments), "cuda" if gpu else "cpu")

    def build_all(self) -> list[Technique]:
        """The techniques that it needs, and the technique itself as the last one."""
        return [*(technique_class(n)(**kw) for n, kw in self.entry.needs.items()), self.build()]

    @property
    def id(self) -> str:
        return "-".join([self.name, *(str(v) for _, v in self.arguments)])


def cases(*, gpu: bool = False) -> list[Any]:
    """pytest parameters: every variant of every technique, on the CPU or on a GPU; all but its first are exhaustive."""
    parameters = []
    for name, first in sorted(ENTRIES.items()):
        variants = [
            Case(name, tuple(arguments.items()), entry)
            for entry in ((first.gpu or first) if gpu else first, *first.also)
            for arguments in ((entry.gpu_variants or entry.variants) if gpu else entry.variants)
        ]
        for case in variants:
            further = [pytest.mark.exhaustive] if case is not variants[0] else []
            parameters.append(pytest.param(case, id=case.id, marks=[*_skip(case.entry.package), *further]))
    return parameters


def _skip(package: str | None) -> list[pytest.MarkDecorator]:
    apex = package == "apex" and [*needs_apex("", "apex.optimizers")]
    if not apex and (package in (None, "apex") or importlib.util.find_spec(str(package)) is not None):
        return []
    where = "; no package index has a build of it, and its tests on the CPU use a stand-in" if package == "apex" else ""
    return [pytest.mark.skip(reason=f"needs the package {package}, and it is not installed{where}")]
