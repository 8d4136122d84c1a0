"""The sets of techniques that tune tries, and how a set is combined with the recipe of the run to tune."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from composer_speedups.core.engaging import refuse_conflicts
from composer_speedups.core.errors import Refusal
from composer_speedups.core.registry import build_techniques, technique_class
from composer_speedups.recommendation import RECOMMENDED
from composer_speedups.train.config.schema import Config

Algorithms = Mapping[str, Mapping[str, Any]]
"""YAML name → settings, as in a config."""
Changes = Literal["rounding", "lower_precision", "recipe"]


def _fast(**changed: Mapping[str, Any] | None) -> Algorithms:
    """The recommended set with other settings, or without a technique if they are None."""
    return {name: settings for name, settings in {**RECOMMENDED, **changed}.items() if settings is not None}


_PADDED: Any = {"unpadding": None, "fused_layers": None, "cuda_graphs": None}
_COMPILED: Any = {**_PADDED, "early_loss": None}
_CPU: Algorithms = {"fused_optimizer": {}, "unpadding": {}, "fused_layers": {}}

SETS: dict[str, dict[Changes, dict[str, Algorithms]]] = {
    "cuda": {
        "lower_precision": {
            "recommended": RECOMMENDED,
            "recommended, without graphs": _fast(unpadding={}, cuda_graphs=None),
            "recommended, with fp8 layers": _fast(fused_layers={"precision": "fp8"}),
            "unpadding and graphs": _fast(fused_layers=None),
            "unpadding": _fast(unpadding={}, fused_layers=None, cuda_graphs=None),
            "compiled": _fast(**_COMPILED, torch_compile={"scope": "model"}),
            "compiled block by block": _fast(**_COMPILED, torch_compile={"scope": "blocks"}),
            "padded": _fast(**_PADDED, sdpa_attention={}),
            "padded, in fp16": _fast(  # for GPUs without bf16
                **_PADDED, sdpa_attention={}, tf32_matmul=None, mixed_precision={"dtype": "fp16"}
            ),
        },
        "rounding": {
            "unpadding, in float32": {"fused_optimizer": {}, "early_loss": {}, "unpadding": {}},
            "padded, in float32": {"fused_optimizer": {}, "early_loss": {}, "sdpa_attention": {}},
            "compiled, in float32": {"fused_optimizer": {}, "torch_compile": {}},
        },
        "recipe": {
            "recommended, with LoRA": _fast(lora={}),
            "recommended, with frozen embeddings": _fast(layer_freezing={}),
        },
    },
    "cpu": {
        "rounding": {
            "unpadding and fused layers": _CPU,
            "unpadding": {"fused_optimizer": {}, "unpadding": {}},
            "padded": {"fused_optimizer": {}, "sdpa_attention": {}},
            "compiled": {"fused_optimizer": {}, "torch_compile": {}},
        },
        "lower_precision": {
            "unpadding and fused layers, in bf16": {**_CPU, "mixed_precision": {"dtype": "bf16", "allow_cpu": True}}
        },
        "recipe": {
            "unpadding and fused layers, with LoRA": {**_CPU, "lora": {}},
            "unpadding and fused layers, with frozen embeddings": {**_CPU, "layer_freezing": {}},
        },
    },
}
"""Device → what the sets change at most → label → set, in the order in which they are tried."""


def combined(config: Config, techniques: Algorithms) -> dict[str, Any]:
    """The techniques of a config's recipe, such as LoRA, and those of a set that are compatible with the config."""
    fitting = {n: s for n, s in config.algorithms.items() if technique_class(n).effect_with(s, None) == "recipe"}
    omitted = {*fitting, *(["mixed_precision"] if config.trainer.precision != "fp32" else [])}
    for name, settings in techniques.items():
        if name not in omitted and not _conflicts({**fitting, name: settings}):
            fitting[name] = dict(settings)
    return fitting


def _conflicts(algorithms: Algorithms) -> bool:
    try:
        refuse_conflicts(build_techniques(algorithms))
    except Refusal:
        return True
    return False


def forbidden(changes: Changes, allow: Collection[str]) -> str | None:
    """Why a set that changes this may not be tried; None if it may."""
    if changes == "rounding" or changes in allow:
        return None
    what = "computes in less than float32" if changes == "lower_precision" else "changes the training recipe"
    return f"{what}, which is not allowed; tune.allow=[{', '.join([*sorted(allow), changes])}] allows it"


def key_of(algorithms: Algorithms) -> tuple[str, ...]:
    """A key that is equal for sets that train identically, independent of order and of explicit defaults."""
    return tuple(sorted(map(repr, build_techniques(algorithms))))
