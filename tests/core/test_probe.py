"""cannot_run: torch's errors become one line with the technique's name, except running out of memory."""

from __future__ import annotations

import pytest
import torch

from composer_speedups.core.errors import TechniqueError
from composer_speedups.core.operator_recorder import cannot_run


@pytest.mark.parametrize(
    ("message", "line"), [("\nno kernel\nin detail", "no kernel"), ("", "RuntimeError")], ids=["lines", "nothing"]
)
def test_a_torch_error_becomes_one_line(message: str, line: str) -> None:
    with pytest.raises(TechniqueError) as raised, cannot_run("some_technique", "it cannot run", "remove it"):
        raise RuntimeError(message)
    assert str(raised.value) == f"some_technique: it cannot run ({line}); remove it"
    assert isinstance(raised.value.__cause__, RuntimeError)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), KeyError("input_ids")])
def test_out_of_memory_and_unrelated_errors_are_not_changed(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, cannot_run("some_technique", "it cannot run", "remove it"):
        raise error
    assert raised.value is error
