"""CPU threads of torch: the ranks of a node share its cores; a rank that trains on a GPU uses one."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import composer_speedups.train.trainer
from composer_speedups import FusedOptimizer, OffloadedOptimizer
from composer_speedups.distributed.host import _at_first, share_cores
from composer_speedups.train.config.schema import Config
from tests.helpers.jobs import run
from tests.helpers.ranks import on_ranks


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let torch use eight threads, as on a machine with eight cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    _at_first.cache_clear()
    yield
    torch.set_num_threads(before)
    _at_first.cache_clear()


def test_ranks_of_a_node_share_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for computes, ranks, threads in [(True, 1, 8), (True, 3, 2), (True, 9, 1), (False, 1, 1)]:
        monkeypatch.setattr("composer.utils.dist.get_local_world_size", lambda ranks=ranks: ranks)
        for _ in range(2):  # a second Trainer in the process does not divide again
            share_cores(computes=computes)
            assert torch.get_num_threads() == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    share_cores(computes=True)
    assert torch.get_num_threads() == 1, "the variable is respected"


@pytest.mark.parametrize(
    ("on", "fsdp", "technique", "computes"),
    [
        ("cpu", None, None, True),
        ("cuda", None, None, False),
        ("cuda", SimpleNamespace(cpu_offload=True), None, True),
        ("cuda", SimpleNamespace(cpu_offload=False), None, False),
        ("cuda", None, OffloadedOptimizer(), True),
        ("cuda", None, FusedOptimizer(), False),
    ],
)
def test_threads_are_shared_only_if_the_host_computes(
    on: str, fsdp: Any, technique: Any, computes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*, computes: bool, at_most: int | None) -> None:
        raise InterruptedError(computes)

    monkeypatch.setattr(composer_speedups.train.trainer, "share_cores", asked)
    config, device = Config(), SimpleNamespace(_device=torch.device(on))
    config.trainer.fsdp = fsdp
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=768))
    parts: list[Any] = [config, model, None, [technique] if technique else [], device, None]
    with pytest.raises(InterruptedError, match=str(computes)):
        composer_speedups.train.trainer.build_trainer(*parts)


def test_a_cpu_run_uses_all_cores_two_ranks_share_them_and_a_small_model_uses_one() -> None:
    def threads(size: str) -> int:
        torch.set_num_threads(8)
        run("trainer.max_duration=1ba", "trainer.eval_batches=1", "data.batch_size=4", f"model.size={size}")
        return torch.get_num_threads()

    assert threads("mini") == 8
    assert threads("tiny") == 1
    assert on_ranks(partial(threads, "mini")) == [4, 4]
