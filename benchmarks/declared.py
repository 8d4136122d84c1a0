"""Tables of what the code declares: techniques with their order and conflicts, model families, heads and tasks.

What is refused is listed in tests/helpers/refusals.py, and what tasks read and report in tests/helpers/support.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.tables import table
from composer_speedups.algorithms.optimizers.optimizers import TECHNIQUES as OPTIMIZERS
from composer_speedups.core.registry import folder_of, technique_class, technique_names
from composer_speedups.core.run import Run
from composer_speedups.core.technique import FSDP, Order, Technique
from composer_speedups.families.family import Family, family_named
from composer_speedups.families.family import families as known_families
from tests.helpers.refusals import FAILING, HEADS, INPUTS, MISSING, REFUSALS, TECHNIQUES, UNDEFINED, refusal_of
from tests.helpers.settings import ENTRIES
from tests.helpers.support import TASKS

ROOT = Path(__file__).parent.parent
_STAGES = {
    "FLAGS": "process-wide flags and precision",
    "LAYERS": "modules and weights changed",
    "KERNELS": "layers computed by kernels of this package",
    "ADAPTERS": "parameters frozen or added",
    "OPTIMIZER": "over the final parameters",
    "COMPILE": "of the final modules",
    "GRAPHS": "of the final step",
}


# Families and heads, as tests/families/test_family_techniques.py finds them


def families() -> list[str]:
    """Families × techniques: "yes" if some head is supported, or "no" with the number of the reason in
    :func:`refusals`."""
    lines = []
    for family in _families_by_title():
        cells = [[_supported(technique, family.name, head) for head in HEADS] for technique in TECHNIQUES]
        lines.append([family.title, *("yes" if "yes" in cell else cell[0] for cell in cells)])
    return table(["family", *_quoted(TECHNIQUES)], lines)


def families_short() -> list[str]:
    """The families, grouped by the techniques that they do not support with any head."""
    groups: dict[str, list[str]] = defaultdict(list)
    for family in _families_by_title():
        refused = ", ".join(_quoted([t for t in TECHNIQUES if all(refusal_of(t, family.name, head) for head in HEADS)]))
        groups[f"all except {refused}" if refused else "all"].append(family.title)
    lines = [[", ".join(titles), techniques] for techniques, titles in sorted(groups.items())]
    names = ", ".join(_quoted(TECHNIQUES))
    return [*table(["families", "supported techniques"], lines), "", f"Techniques that depend on the family: {names}."]


def heads() -> list[str]:
    """Heads × techniques, for every family that the technique supports."""
    lines = [
        [title, *(_supported(technique, "bert", head) for technique in TECHNIQUES)] for head, title in HEADS.items()
    ]
    return table(["head", *_quoted(TECHNIQUES)], lines)


def refusals() -> list[str]:
    """Refused combinations, numbered, and inputs for which the untouched model's own values mean nothing."""
    lines = []
    for number, line in enumerate(REFUSALS, 1):
        names = ", ".join(_quoted(line.techniques))
        refused = [*map(_title, line.families), HEADS.get(line.head, ""), line.input and f"a {line.input}"]
        lines.append(f"{number}. {names} with {', '.join(filter(None, refused))}: {line.why}.")
    lines += ["", f"- Inputs tried with each: {', '.join(INPUTS)}."]
    for head, without in MISSING.items():
        lines.append(f"- transformers has no head for {HEADS[head]} for {', '.join(map(_title, without))}.")
    for (family, given), why in FAILING.items():
        lines.append(f"- Not compared: {_title(family)} with a {given}, on which the untouched model fails: {why}.")
    for (technique, family, head, given), what in UNDEFINED.items():
        lines.append(
            f"- Not compared: `{technique}` on {_title(family)} for {HEADS[head]} with {given}. The head {what}, and a "
            "padding slot whose local window contains no token attends to nothing: eager attention and SDPA differ."
        )
    return lines


def _families_by_title() -> list[Family]:
    return sorted(known_families(), key=lambda family: family.title.lower())


def _title(name: str) -> str:
    family = family_named(name)
    assert family is not None
    return family.title


def _supported(technique: str, family: str, head: str) -> str:
    line = refusal_of(technique, family, head)
    return "yes" if line is None else f"no ({REFUSALS.index(line) + 1})"


def _quoted(names: list[str] | tuple[str, ...]) -> list[str]:
    return [f"`{name}`" for name in names]


# Tasks


def tasks() -> list[str]:
    """The tasks: columns, loss, metrics of an evaluation, and the YAMLs that train them."""
    yamls = _yamls_by_task()
    lines = []
    for name, row in TASKS.items():
        metrics = ", ".join(filter(None, [*row.metrics.values(), row.more]))
        lines.append([f"`{name}`", row.texts, row.label, row.loss, metrics, ", ".join(_quoted(yamls[name]))])
    return table(["`model.task`", "`data.text_columns`", "label", "loss", "metrics", "YAML (`-f`)"], lines)


def _yamls_by_task() -> dict[str, list[str]]:
    """The YAMLs of the repository, those of a folder as one; the quickstart trains every task."""
    names: dict[str, list[str]] = defaultdict(lambda: ["quickstart"])
    for path in sorted((ROOT / "yamls").rglob("*.yaml")):
        name = path.relative_to(ROOT / "yamls").with_suffix("")
        task = (yaml.safe_load(path.read_text()).get("model") or {}).get("task", "classification")
        shown = f"{name.parent}/…" if name.parent.name else str(name)
        if shown not in names[task]:
            names[task].append(shown)
    return names


# Techniques


def _card_and_summary(name: str) -> tuple[str, str]:
    """The path of a technique's card, and the card's first sentence; a card of several has a section for each."""
    folder = folder_of(name).name
    card = f"composer_speedups/algorithms/{folder}/README.md"
    text = (ROOT / card).read_text()
    if folder != name:
        card, text = f"{card}#{name}", text[text.index(f"### {name}\n") :]
    _, summary, *_ = text.split("\n\n")
    return card, re.split(r"(?<=\.)\s", summary.replace("\n", " "))[0].rstrip(".")


def techniques(prefix: str = "") -> list[str]:
    """The techniques: what each does, what it is for, and whether the result stays the same.

    ``prefix`` leads from the document to the repository's root.
    """
    lines = []
    for technique in _classes():
        card, sentence = _card_and_summary(technique.name)
        purpose, same = technique.purpose.removeprefix("saves "), _EFFECTS[technique.effect]
        lines.append([f"[`{technique.name}`]({prefix}{card})", sentence, purpose, same])
    return table(["technique", "what it does", "meant to save", "result"], lines)


_EFFECTS = {
    "exact": "the same",
    "rounding": "the same up to rounding",
    "lower_precision": "the same in lower precision",
    "recipe": "another recipe",
}


def technique_groups() -> list[str]:
    """README's table: the techniques by what they are for and whether the result stays the same."""
    groups: dict[str, list[str]] = {title: [] for title in _GROUPS.values()}
    for technique in _classes():
        kind = technique.effect if technique.effect in ("lower_precision", "recipe") else technique.purpose
        groups[_GROUPS[kind]].append(f"[`{technique.name}`]({_card_and_summary(technique.name)[0]})")
    return table(["what it does", "techniques"], [[title, ", ".join(links)] for title, links in groups.items()])


_GROUPS = {
    "saves time": "faster steps, the same result (some up to rounding)",
    "lower_precision": "faster steps in lower precision",
    "saves memory": "less memory, the same result",
    "recipe": "what is learned changes, so compare its accuracy",
}


def order() -> list[str]:
    """Two tables: the stages in the order of techniques, and the conflicts with their reasons."""
    every = _classes()
    stages = []
    for stage in Order:
        engaged = ", ".join(_quoted([t.name for t in every if t.order == stage]))
        stages.append([f"{stage:d}", f"{stage.name.lower()}: {_STAGES[stage.name]}", engaged])
    optimizers = ", ".join(_quoted(OPTIMIZERS))
    conflicting = [[f"any two of {optimizers}", "each sets the optimizer"]]
    for one, other in combinations(every, 2):
        if (reason := _reason(one, other)) and not {one.name, other.name} <= {*OPTIMIZERS}:
            conflicting.append([f"`{one.name}`, `{other.name}`", reason])
    return [
        *table(["order", "stage", "techniques"], stages),
        "",
        *table(["techniques that conflict", "reason"], conflicting),
    ]


def ranks() -> list[str]:
    """Which techniques support DDP and FSDP, and why the others do not."""
    lines = []
    for technique in _classes():
        per_rank = ENTRIES[technique.name].per_rank
        trained = f"close: {per_rank}" if per_rank else "yes"
        alone = [f"`{field}: true`" for field in _flags(technique) if _needs_one_rank(technique, **{field: True})]
        except_with = f", except with {' or '.join(alone)}" if alone else ""
        ddp = _needs_one_rank(technique) or f"{trained}{except_with}"
        lines.append([f"`{technique.name}`", ddp, technique.not_with.get(FSDP, trained)])
    return table(["technique", "DDP", "FSDP"], lines)


def conflicts(name: str) -> list[str]:
    """The lines of a card's section: every technique that conflicts with this one, or with one of this folder."""
    ones = [technique for technique in _classes() if name in (technique.name, folder_of(technique.name).name)]
    lines = ["- any two of them: each sets the optimizer"] if len(ones) > 1 else []
    for one, other in ((one, other) for one in ones for other in _classes() if other not in ones):
        if reason := _reason(one, other):
            lines.append(f"- {f'`{one.name}`, ' if len(ones) > 1 else ''}`{other.name}`: {reason}")
    return lines or ["None."]


def _classes() -> list[type[Technique]]:
    return [technique_class(name) for name in technique_names()]


def _flags(technique: type[Technique]) -> list[str]:
    """The settings that are false unless they are set to true."""
    return [name for name, field in technique.model_fields.items() if field.default is False]


def _needs_one_rank(technique: type[Technique], **settings: Any) -> str | None:
    """The reason of the first refusal with two ranks that one rank does not get; None without one."""
    runs = [Run(torch.device("cpu"), ranks=n) for n in (1, 2)]
    unmet = [[refusal.reason for refusal in technique(**settings).needs(run)] for run in runs]
    return next((reason for reason in unmet[1] if reason not in unmet[0]), None)


def _reason(one: type[Technique], other: type[Technique]) -> str | None:
    """Why the two always conflict."""
    return one.not_with.get(other.name) or other.not_with.get(one.name)
