"""Fixtures: no network, one thread, a fresh compiler, and no test without a GPU where one is needed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
if sys.dont_write_bytecode and sys.pycache_prefix is None:
    # Otherwise each process that a test starts compiles the source of torch and Composer anew, for ten seconds.
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(ROOT / ".pytest_cache" / "bytecode")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two tests run at a time, on two cores

import pytest  # noqa: E402
import torch  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU, and there is none here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _clean_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test in a folder of its own, with nothing compiled and full float32 matmuls."""
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    yield
    torch._dynamo.reset()


@pytest.fixture
def root() -> Path:
    """The repository."""
    return ROOT
