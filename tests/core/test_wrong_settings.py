"""Every technique's class and function refuse each value that its settings do not allow, and name the setting."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import annotated_types
import pytest
import torch

import composer_speedups
from composer_speedups import apply_unpadding
from composer_speedups.core.catalogue import technique_names
from composer_speedups.core.registry import technique_class
from composer_speedups.core.settings import ComposerTime
from composer_speedups.core.technique import Technique
from tests.helpers.common import tiny_bert

OUTSIDE = {  # bound → how far a refused value is beyond it
    annotated_types.Ge: ("ge", -1),
    annotated_types.Gt: ("gt", 0),
    annotated_types.Le: ("le", 1),
    annotated_types.Lt: ("lt", 0),
}


def refused_values() -> Iterator[Any]:
    for name in technique_names():
        for setting, field in technique_class(name).__pydantic_fields__.items():
            if setting in Technique.__pydantic_fields__:
                continue
            kinds = {get_origin(kind) for kind in (field.annotation, *get_args(field.annotation))}
            values: list[Any] = ["nonsense"] if Literal in kinds else []
            for bound in field.metadata:
                if isinstance(bound, ComposerTime):
                    values.append("1 hour")
                    continue
                attribute, beyond = OUTSIDE[type(bound)]
                values.append(getattr(bound, attribute) + beyond)
            for value in values:
                yield pytest.param(name, setting, value, id=f"{name}-{setting}-{value}")


@pytest.mark.parametrize(("name", "setting", "value"), refused_values())
def test_a_value_that_is_not_allowed_is_refused(name: str, setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{setting} must be .* not {value!r}"):
        technique_class(name)(**{setting: value})
    function: Any = getattr(composer_speedups, f"apply_{name}", lambda: None)  # optimizers have none
    parameters = inspect.signature(function).parameters
    if setting in parameters:
        model = tiny_bert()
        if name == "fused_layers":
            apply_unpadding(model)
        given = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        arguments = {key: argument for key, argument in given.items() if key in parameters}
        with pytest.raises(ValueError, match=f"{setting} must be .* not {value!r}"):
            function(**arguments, **{setting: value})
