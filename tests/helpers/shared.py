"""Results that pytest-xdist's workers share."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from filelock import FileLock


def once_per_run(compute: Callable[[], Any], name: str, factory: pytest.TempPathFactory) -> Any:
    """Return ``compute()``, which only the first worker of a test run calls; the others wait for its result."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return compute()
    path = factory.getbasetemp().parent / f"{name}-{run}.pkl"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            path.write_bytes(pickle.dumps(compute()))
        return pickle.loads(path.read_bytes())
