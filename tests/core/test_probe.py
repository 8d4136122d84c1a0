"""What a probe makes of torch's errors: one line in the technique's name, but for want of memory."""

from __future__ import annotations

import pytest
import torch

from composer_speedups.core.errors import TechniqueError
from composer_speedups.core.operator_recorder import cannot_run


@pytest.mark.parametrize(
    ("said", "shown"), [("\nno kernel\nin detail", "no kernel"), ("", "RuntimeError")], ids=["lines", "nothing"]
)
def test_an_error_is_one_line_with_torchs_first(said: str, shown: str) -> None:
    with pytest.raises(TechniqueError) as raised, cannot_run("some_technique", "it cannot run", "remove it"):
        raise RuntimeError(said)
    assert str(raised.value) == f"some_technique: it cannot run ({shown}); remove it"
    assert isinstance(raised.value.__cause__, RuntimeError)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), KeyError("input_ids")])
def test_want_of_memory_and_mistakes_of_another_kind_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, cannot_run("some_technique", "it cannot run", "remove it"):
        raise error
    assert raised.value is error
