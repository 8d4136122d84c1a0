"""Micro-batches: the report states their size and how it was chosen; the effective batch does not change."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch

from composer_speedups.train.report import summary_table
from tests.helpers.jobs import run


@pytest.mark.pins
def test_a_micro_batch_set_by_the_config_gives_the_same_loss_and_is_in_the_report() -> None:
    whole = run("trainer.max_duration=2ba", "export=false")
    report = run("trainer.microbatch_size=2", "trainer.max_duration=2ba", "export=false")
    assert report["metrics"]["train_loss"] == pytest.approx(whole["metrics"]["train_loss"], rel=1e-3)
    training = report["training"]
    assert (training["microbatch_size"], training["microbatch_chosen"]) == (2, "by the config")
    assert training["samples"] == 16
    assert "chosen by the config" in summary_table(report, "runs")


# Batches that need about 10 GiB without micro-batches.
LARGE = [
    "trainer.max_duration=3ba",
    "model.size=mini",
    "data.train_samples=2048",
    "data.batch_size=1024",
    "data.max_length=256",
    "data.padding=max_length",
    "algorithms={fused_optimizer: {}}",
    "export=false",
]


@contextlib.contextmanager
def three_gib_more() -> Iterator[float]:
    """Limit this process to 3 GiB of GPU memory beyond what earlier tests hold; yield the limit in GiB."""
    gc.collect()
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + 3 * 2**30
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield limit / 2**30
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("microbatch", [None, 512])
@pytest.mark.filterwarnings("ignore:trainer.microbatch_size. out of memory:UserWarning")
def test_a_batch_that_does_not_fit_the_gpu_is_trained_in_micro_batches(microbatch: int | None) -> None:
    """Neither the whole batch nor the configured micro-batch fits."""
    whole = run(*LARGE, "trainer.microbatch_size=64")
    with three_gib_more() as limit:
        report = run(*LARGE, f"trainer.microbatch_size={'null' if microbatch is None else microbatch}")
    training = report["training"]
    assert training["microbatch_chosen"] == "after running out of memory"
    assert training["microbatch_changes"][0]["from"] == (microbatch or 1024)
    assert training["samples"] == 3 * 1024
    assert report["memory"]["peak_gib"] < limit
    assert report["metrics"]["train_loss"] == pytest.approx(whole["metrics"]["train_loss"], rel=1e-3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:`device_train_microbatch_size='auto'` may:UserWarning")  # Composer advises
@pytest.mark.filterwarnings("ignore:CUDA out of memory or excessive:RuntimeWarning")  # at each halving
def test_auto_finds_and_reports_a_micro_batch_that_fits() -> None:
    with three_gib_more() as limit:
        report = run(*LARGE, "trainer.microbatch_size=auto")
    training = report["training"]
    assert training["microbatch_size"] in (16, 32, 64, 128, 256, 512)
    assert training["microbatch_chosen"] == "automatically"
    assert training["samples"] == 3 * 1024
    assert report["memory"]["peak_gib"] < limit
    assert "chosen automatically" in summary_table(report, "runs")
