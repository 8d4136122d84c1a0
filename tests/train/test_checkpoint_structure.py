"""Checks of the types, keys, lengths and shapes of values that were read from a checkpoint."""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated, Any, TypedDict

import pytest
import torch
from torch import Tensor

from composer_speedups.algorithms.lowbit_optimizer.torchao_adamw import lowbit_adamw
from composer_speedups.train.checkpoints.structure import MalformedError, conforming, like


class Pair(TypedDict):
    name: str
    size: Annotated[int, range(1, 4)]


DEEP: Any = 0
for _ in range(40):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (1, int),
        (1, float),
        (0.5, float),
        (None, int | None),
        ("x", int | str),
        ([1, 2], list[int]),
        ((1, "x"), tuple[int, str]),
        ((1, 2, 3), tuple[int, ...]),
        ({"a": [1]}, dict[str, list[int]]),
        (OrderedDict(a=1), dict[str, int]),
        ({"name": "x", "size": 3}, Pair),
        ({"a": 1, "b": None}, {"a": int, "b": int | None}),
        ({"a": (1, [None, "x", {"b": 0.5}])}, Any),
        (object, object),
    ],
)
def test_a_conforming_value_is_returned(value: Any, hint: Any) -> None:
    assert conforming(value, hint, "top") == value


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        (True, int, "top is a bool, not an int"),
        (0.5, int, "top is a float, not an int"),
        (None, int, "top is nothing, not an int"),
        ("x", int | None, "top is a str, not an int"),
        ([1, "x"], list[int], "top/1 is a str, not an int"),
        ((1, 2), list[int], "top is a tuple, not a list"),
        ((1, 2), tuple[int], "top has 2 entries, not 1"),
        ({1: 1}, dict[str, int], "a key of top is an int, not a str"),
        ({"name": "x", "size": 4}, Pair, "top/size is 4, not within 1 to 3"),
        ({"name": "x"}, Pair, "top has no size"),
        ({"name": "x", "size": 1, "more": 2}, Pair, "top has 'more', which this run does not have"),
        ({"a": {1, 2}}, Any, "top/a is a set, not a plain value"),
        ({"a": torch.ones(1)}, Any, "top/a is a Tensor, not a plain value"),
        (DEEP, Any, "is nested deeper than 30 levels"),
        ([1], Tensor, "top is a list, not a tensor"),
        (torch.ones(2).to_sparse(), Tensor, "top is a sparse or nested tensor"),
        (torch.ones(2, dtype=torch.complex64), Tensor, "top is a complex tensor"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), Tensor, "top is a quantised tensor"),
        (torch.ones(2, device="meta"), Tensor, "top is a tensor without values"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_value_that_does_not_conform_is_named(value: Any, hint: Any, message: str) -> None:
    with pytest.raises(MalformedError) as error:
        conforming(value, hint, "top")
    assert message in str(error.value)


def test_containers_and_attributes_of_a_file_are_replaced() -> None:
    tensor = torch.ones(2)
    tensor.to = "shadowed"  # type: ignore[method-assign, assignment]
    mapping: Any = OrderedDict(a=tensor)
    mapping.items_of_mine = 1
    kept = conforming(mapping, dict[str, Tensor], "top")
    assert type(kept) is dict
    assert not vars(kept["a"])


@pytest.mark.parametrize(
    ("value", "own", "message"),
    [
        (torch.ones(1), torch.ones(3), "top has the shape (1,), not (3,)"),
        (torch.ones(3).long(), torch.ones(3), "top has the dtype int64, not float32"),
        (0.5, torch.ones(3), "top is a float, not a tensor"),
        ("x", 0.5, "top is a str, not a float"),
        (torch.ones(3), 0.5, "top is a Tensor, not a float"),
        ([1], [1, 2], "top is a list of 1 and not a list of 2"),
        ("ab", [1, 2], "top is a str and not a list of 2"),
        ({"a": 1}, {"a": 1, "b": 2}, "top has no b"),
        ({"a": 1, "b": 2}, {"a": 1}, "top has 'b', which this run does not have"),
        ([1], None, "top is a list, not nothing"),
        (None, "x", "top is nothing, not a str"),
    ],
)
def test_a_value_that_differs_from_the_runs_own_is_named(value: Any, own: Any, message: str) -> None:
    with pytest.raises(MalformedError) as error:
        like(value, own, "top")
    assert str(error.value) == message


def test_numbers_are_converted_to_the_runs_own_types() -> None:
    given = like(
        {"lr": 0.5, "step": torch.tensor(3.0), "fused": True}, {"lr": torch.ones(()), "step": 1, "fused": None}, ""
    )
    assert given == {"lr": torch.tensor(0.5), "step": 3.0, "fused": True}
    assert isinstance(given["lr"], Tensor)
    assert isinstance(given["step"], float)


def low_bit_moment(values: int) -> Tensor:
    parameter = torch.nn.Parameter(torch.ones(values))
    parameter.grad = torch.ones(values)
    optimizer = lowbit_adamw([{"params": [parameter]}], min_size=256)
    optimizer.step()
    return optimizer.state[parameter]["exp_avg"]


def test_the_inner_tensors_of_a_quantised_tensor_are_checked() -> None:
    own, other = low_bit_moment(512), low_bit_moment(512)
    given = like(other, own, "top")
    torch.testing.assert_close(given.dequantize(), other.dequantize(), rtol=0, atol=0)
    other.scale = torch.ones(1)  # type: ignore[attr-defined]  # two blocks need two scales
    with pytest.raises(MalformedError, match=r"top/scale has the shape \(1,\), not \(2,\)"):
        like(other, own, "top")
    with pytest.raises(MalformedError, match="top is a Tensor, not an OptimState8bit"):
        like(torch.ones(512), own, "top")
    with pytest.raises(MalformedError, match="top is an OptimState8bit, not a tensor"):
        like(own, torch.ones(512), "top")
    with pytest.raises(MalformedError, match="another shape"):
        like(low_bit_moment(256), own, "top")


@pytest.mark.parametrize(("given", "message"), [("abc", ""), ("ab", " has no c"), ("a", " has no b (and 1 more)")])
def test_the_first_missing_key_is_named_and_others_are_counted(given: str, message: str) -> None:
    own, value = dict.fromkeys("abc", 1), dict.fromkeys(given, 2)
    if not message:
        assert like(value, own, "top") == value
        return
    with pytest.raises(MalformedError) as error:
        like(value, own, "top")
    assert str(error.value) == f"top{message}"


@pytest.mark.parametrize(("type_", "message"), [(int, "an int"), (str, "a str"), (OrderedDict, "an OrderedDict")])
def test_type_names_have_the_right_article(type_: type, message: str) -> None:
    with pytest.raises(MalformedError, match=f"top is nothing, not {message}$"):
        conforming(None, type_, "top")


def test_long_sequences_must_have_the_same_length() -> None:
    assert like([2] * 300, [1] * 300, "top") == [2] * 300
    with pytest.raises(MalformedError, match="is a list of 299 and not a list of 300"):
        like([2] * 299, [1] * 300, "top")
