"""torch's sync debug mode, for tests that the host does not wait for the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.helpers.common import batch
from tests.reference.loop import counted


@contextmanager
def no_waiting(*, strict: bool = True) -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error" if strict else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_planned_steps(model: Any) -> None:
    """Train an unpadded classifier on the GPU for four steps, none of which waits after the first."""
    model.config.problem_type = "single_label_classification"
    for i in range(4):
        inputs = batch([12, 7, 16, 10 - i], seed=i)
        on_gpu = {name: values.cuda() for name, values in counted(model, inputs).items()}
        with no_waiting(strict=i > 0):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(**on_gpu).loss
            loss.backward()
