"""What there is to try: each technique's exactness and the settings worth a trial.

``tests/test_tune_candidates.py`` holds every line against ``tests/settings.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from composer_speedups.recommendation import RECOMMENDED
from composer_speedups.tune.settings import Kind

__all__ = ["CHOICES", "KINDS", "Candidate", "Choice", "Variant", "candidates_for", "kind_of", "worst"]

KINDS: tuple[Kind, ...] = ("exact", "rounding", "lower_precision", "recipe")


@dataclass(frozen=True)
class Variant:
    """Settings worth a trial.

    Attributes:
        settings: Constructor arguments.
        kind: Where it is not the technique's own.
        beside: Techniques that come with it, since it needs or wants them.
        device: ``cpu`` or ``cuda``, where it makes sense on one only.
        fallback: Tried only where the variant before it is refused.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    kind: Kind | None = None
    beside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    device: str | None = None
    fallback: bool = False


@dataclass(frozen=True)
class Choice:
    """A technique: what it does to the numbers, and its variants, or why it has none."""

    kind: Kind
    variants: tuple[Variant, ...] = (Variant(),)
    never: str | None = None


_FEW_SIZES = {"unpadding": {"pad_to_multiple_of": 512}}  # a graph for each size
_MEMORY = "it trades time for memory, and this search is for time"

# In the order of the trials: what gives most on most machines comes first, in case the time runs out.
CHOICES: dict[str, Choice] = {
    "mixed_precision": Choice(
        "lower_precision",
        (
            Variant({"dtype": "bf16"}, device="cuda"),
            Variant({"dtype": "fp16"}, device="cuda", fallback=True),
            Variant({"dtype": "bf16", "allow_cpu": True}, device="cpu"),
        ),
    ),
    "tf32_matmul": Choice("lower_precision", (Variant({"precision": "high"}),)),
    "unpadding": Choice("rounding"),
    "fused_optimizer": Choice("rounding"),
    "sdpa_attention": Choice("rounding"),
    "fused_layers": Choice("lower_precision", (Variant(beside={"unpadding": {}}),)),
    "torch_compile": Choice("rounding", (Variant({"scope": "blocks"}), Variant({"scope": "model"}))),
    "cuda_graphs": Choice(
        "rounding", (Variant({"max_graphs": 16}), Variant({"max_graphs": 16}, beside=_FEW_SIZES, device="cuda"))
    ),
    "early_loss": Choice("exact"),
    "foreach_optimizer": Choice("rounding"),
    "fast_layernorm": Choice(
        "lower_precision", (Variant({"implementation": "low_precision"}), Variant({"implementation": "triton"}))
    ),
    "float8_linear": Choice("lower_precision", (Variant({"recipe": "tensorwise"}), Variant({"recipe": "rowwise"}))),
    "apex_optimizer": Choice("rounding"),
    "bnb_optimizer": Choice("recipe", (Variant({"bits": 32}, kind="rounding"), Variant({"bits": 8}))),
    "kahan_optimizer": Choice("recipe"),  # the weights themselves become bfloat16
    "lora": Choice("recipe"),
    "adafactor": Choice("recipe"),
    "lowbit_optimizer": Choice("recipe", (Variant({"bits": 8}),)),
    "gradient_checkpointing": Choice("exact", (), _MEMORY),
    "offloaded_optimizer": Choice("rounding", (), _MEMORY),
    "empty_cache": Choice("exact", (), _MEMORY),
    "sparse_upcycling": Choice("recipe", (), "it adds parameters, and makes no step faster"),
}


@dataclass(frozen=True)
class Candidate:
    """A change of the ``algorithms`` section.

    Attributes:
        label: What tables and comments call it.
        adds: Techniques put in, or given other settings.
        removes: Techniques taken out.
        kind: The most that it does to the numbers.
        fallback_of: Label of the candidate whose refusal this one waits for.
    """

    label: str
    adds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    removes: tuple[str, ...] = ()
    kind: Kind = "exact"
    fallback_of: str | None = None


def candidates_for(given: Mapping[str, Any], device: str, *, autocast_by_config: bool = False) -> list[Candidate]:
    """All candidates beside a given ``algorithms`` section, in the order of their trials.

    Args:
        given: YAML name → settings.
        device: ``cpu`` or ``cuda``.
        autocast_by_config: ``trainer.precision`` is 16-bit already, and ``mixed_precision`` has nothing to add.
    """
    left = {"mixed_precision"} if autocast_by_config else set()
    found = [_of_set("the recommended set", {n: s for n, s in RECOMMENDED.items() if n not in left})]
    for name, choice in CHOICES.items():
        if name not in left:
            found += _variants(name, choice, device)
    found += [Candidate(f"without {name}", removes=(name,)) for name in given if kind_of(name, given[name]) != "recipe"]
    return found


def _variants(name: str, choice: Choice, device: str) -> Iterator[Candidate]:
    before = None
    for variant in choice.variants:
        if variant.device not in (None, device):
            continue
        told = ", ".join(f"{k}: {v}".lower() for k, v in variant.settings.items() if k != "allow_cpu")
        label = name + (f" ({told})" if told else "") + "".join(f" with {other}" for other in variant.beside)
        kind = worst(variant.kind or choice.kind, *(kind_of(n, s) for n, s in variant.beside.items()))
        adds = {**variant.beside, name: variant.settings}
        yield Candidate(label, adds, kind=kind, fallback_of=before if variant.fallback else None)
        before = label


def _of_set(label: str, techniques: Mapping[str, Mapping[str, Any]]) -> Candidate:
    return Candidate(label, techniques, kind=worst(*(kind_of(n, s) for n, s in techniques.items())))


def kind_of(name: str, settings: Mapping[str, Any] | None) -> Kind:
    """What a technique with these settings does to the numbers."""
    choice = CHOICES[name]
    for variant in choice.variants:
        if variant.kind is not None and variant.settings.items() <= dict(settings or {}).items():
            return variant.kind
    return choice.kind


def worst(*kinds: Kind) -> Kind:
    """The one that changes the numbers most."""
    return max(kinds, key=KINDS.index)
