"""Your own Composer Trainer on two ranks: the example trains."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import runpy
import sys
from typing import Any

import pytest

from composer_speedups import FreezeGarbage
from tests.conftest import ROOT
from tests.helpers.common import make_trainer
from tests.helpers.ranks import on_ranks

TINY = ["--size", "tiny", "--samples", "64", "--batch-size", "4", "--max-length", "32", "--duration", "6ba"]


def example(*arguments: str) -> dict[str, Any] | None:
    """Run ``examples/own_trainer.py``; return the JSON of its last line, or None on ranks that print nothing."""
    sys.argv = ["own_trainer.py", *TINY, "--on-unavailable", "warn", *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(ROOT / "examples" / "own_trainer.py"), run_name="__main__")
    lines = printed.getvalue().strip().splitlines()
    return json.loads(lines[-1]) if lines else None


@pytest.mark.exhaustive
def test_the_example_trains_on_two_ranks() -> None:
    first, second = on_ranks(example)
    assert second is None
    assert (first["ranks"], first["batch_size_per_rank"], first["batches"]) == (2, 4, 6)
    assert first["samples_per_sec"] > 0
    assert first["loss"] == pytest.approx(0.69, abs=0.2)
    assert first["techniques"]["unpadding"]["engaged"]
    assert not first["techniques"]["cuda_graphs"]["engaged"], "there is no GPU"
    assert first["ddp"]["overlapped_steps"] == 4, "all but the first two"
    assert first["ddp"]["gradients_read_by"] is None
    plain, _ = on_ranks(lambda: example("--plain"))
    assert plain["ddp"] is None


def test_objects_are_frozen_from_fit_start_until_the_trainer_closes() -> None:
    frozen = gc.get_freeze_count()  # tests/conftest.py may have frozen objects
    gc.unfreeze()
    try:
        trainer = make_trainer(callbacks=[FreezeGarbage()])
        assert gc.get_freeze_count() == 0
        trainer.fit()
        assert gc.get_freeze_count() > 10_000
        other = make_trainer(callbacks=[FreezeGarbage()])
        other.fit()
        other.close()
        assert gc.get_freeze_count() > 10_000, "still frozen by the first trainer"
        trainer.close()
        assert gc.get_freeze_count() == 0
    finally:
        if frozen:
            gc.freeze()
