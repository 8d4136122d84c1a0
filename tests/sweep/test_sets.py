"""The table of sets, and their combination with the recipe of the run to tune."""

from __future__ import annotations

from typing import Any

import pytest

from composer_speedups.core.engaging import refuse_conflicts
from composer_speedups.core.registry import build_techniques, technique_class
from composer_speedups.recommendation import RECOMMENDED
from composer_speedups.sweep.sets import SETS, Changes, combined, forbidden, key_of
from composer_speedups.train.config.schema import Config, TrainerConfig

EVERY = [
    pytest.param(device, changes, techniques, id=f"{device}: {label}")
    for device, by_changes in SETS.items()
    for changes, labelled in by_changes.items()
    for label, techniques in labelled.items()
]


@pytest.mark.parametrize(("device", "changes", "techniques"), EVERY)
def test_every_set_is_valid_and_changes_what_the_table_says(device: str, changes: Changes, techniques: Any) -> None:
    refuse_conflicts(build_techniques(techniques))
    kinds = {technique_class(name).effect_with(settings, device) for name, settings in techniques.items()}
    order = ("exact", "rounding", "lower_precision", "recipe")
    assert max(kinds, key=order.index) == changes
    assert sum(param.values[2] == techniques and param.values[0] == device for param in EVERY) == 1


def test_the_recipe_stays_and_the_sets_techniques_that_conflict_with_it_are_left_out() -> None:
    def whole(algorithms: Any, precision: Any = "fp32") -> dict[str, Any]:
        return combined(Config(algorithms=algorithms, trainer=TrainerConfig(precision=precision)), RECOMMENDED)

    assert whole({"torch_compile": {}, "sdpa_attention": {}}) == RECOMMENDED
    assert whole({"lora": {"rank": 2}}) == {"lora": {"rank": 2}, **RECOMMENDED}
    factored = {name: settings for name, settings in RECOMMENDED.items() if name != "fused_optimizer"}
    assert whole({"adafactor": {}, "fused_optimizer": {}}) == {"adafactor": {}, **factored}
    assert "fused_layers" not in whole({"sparse_upcycling": {}})
    assert "mixed_precision" not in whole({}, "amp_bf16")


def test_sets_are_equal_whatever_their_order_and_defaults() -> None:
    one: Any = {"torch_compile": {"scope": "model"}, "sdpa_attention": {}}
    assert key_of(one) == key_of({"sdpa_attention": {}, "torch_compile": {}})
    assert key_of(one) != key_of({"torch_compile": {"scope": "blocks"}, "sdpa_attention": {}})


def test_only_permitted_changes_are_tried() -> None:
    assert forbidden("rounding", ()) is forbidden("lower_precision", ("lower_precision",)) is None
    assert "tune.allow=[lower_precision] allows it" in (forbidden("lower_precision", ()) or "")
    assert "tune.allow=[lower_precision, recipe]" in (forbidden("recipe", ("lower_precision",)) or "")
