"""Fixtures: no network, one thread, a fresh compiler, and no test without a GPU where one is needed."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.helpers.wandb_runs import WandbRun

ROOT = Path(__file__).parent.parent
if sys.dont_write_bytecode and sys.pycache_prefix is None:
    # Otherwise each process that a test starts compiles the source of torch and Composer anew, for ten seconds.
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(ROOT / ".pytest_cache" / "bytecode")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_INIT_TIMEOUT", "1800")  # a busy machine starts wandb's process slowly
os.environ.setdefault("WANDB__SERVICE_WAIT", "1800")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two tests run at a time, on two cores

import pytest  # noqa: E402


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "slow" not in item.keywords)  # so that no worker is alone with one at the end
    import torch  # not where xdist's controller has only to start the workers

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU, and there is none here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each of xdist's workers begins with a share of whole modules, whose fixtures it then sets up once."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_collection_finish() -> None:
    """Full collections of garbage are a tenth as frequent: each looks for a second at all that was compiled."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 100)


@pytest.fixture(scope="session", autouse=True)
def _known_processor() -> None:
    from tests.helpers.forks import skip_isa_probe

    skip_isa_probe()


@pytest.fixture(autouse=True)
def _clean_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test in a folder of its own, with nothing compiled and full float32 matmuls."""
    import torch
    from torch.optim import optimizer as torch_optimizer

    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    yield
    if observer := sys.modules.get("composer_speedups.core.observer"):
        observer.leave_open()  # a batch that ended with an expected exception while it was observed
    for hooks in (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks):
        hooks.clear()  # those of models that are still there
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def wandb_run(tmp_path_factory: pytest.TempPathFactory) -> WandbRun:
    """One offline run of the quickstart for all tests that look at what it logged; not to be changed by them."""
    import torch

    from tests.helpers.wandb_runs import train_offline

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("wandb_run"))
        patch.delenv("WANDB_MODE", raising=False)
        patch.delenv("WANDB_API_KEY", raising=False)
        torch.set_num_threads(1)
        return train_offline()


@pytest.fixture
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of this test's own: ``datasets`` takes other folders of the same name and configurations from it."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets_cache")
