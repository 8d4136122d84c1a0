"""TF32: the flag is set during the run and restored; on a GPU, matmuls are rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from composer.core import Event
from torch.utils.data import DataLoader

from composer_speedups import TF32Matmul, apply_tf32_matmul
from composer_speedups.algorithms.tf32_matmul.tf32_matmul import matmul_error
from composer_speedups.core.errors import NotEngagedError, TechniqueError
from tests.helpers.common import make_trainer, plain_batches, trained


def test_the_function_returns_the_previous_setting() -> None:
    assert apply_tf32_matmul("high") == "highest"
    assert apply_tf32_matmul("highest") == "high"
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.pins
def test_a_cpu_is_refused() -> None:
    with pytest.raises(TechniqueError, match=r"compute capability 8\.0 or newer, and this run is on the cpu"):
        make_trainer([TF32Matmul()])


def test_the_flag_is_set_only_during_fit_and_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU without the requirement of a GPU: the flag can be set on any machine."""
    monkeypatch.setattr(TF32Matmul, "requirements", lambda *_: ())
    monkeypatch.setattr(TF32Matmul, "verify", lambda *_: {})
    seen: dict[str, set[str]] = {"fit": set(), "eval": set()}

    technique = TF32Matmul("high")
    trainer = make_trainer([technique])
    original = trainer.engine.run_event

    def watch(event: Any) -> Any:
        result = original(event)
        if event == Event.BEFORE_FORWARD:
            seen["fit"].add(torch.get_float32_matmul_precision())
        if event == Event.EVAL_BEFORE_FORWARD:
            seen["eval"].add(torch.get_float32_matmul_precision())
        return result

    trainer.engine.run_event = watch  # type: ignore[method-assign]
    trainer.fit()
    assert torch.get_float32_matmul_precision() == "highest"
    batch = plain_batches(1)[0]
    rows: Any = [{k: v[i] for k, v in batch.items()} for i in range(len(batch["labels"]))]
    trainer.eval(DataLoader(rows, batch_size=2))
    trainer.close()
    assert seen == {"fit": {"high"}, "eval": {"high"}}
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_flag_without_effect_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, float32 matmuls have full precision even with "high", as if the flag had been ignored."""
    monkeypatch.setattr(TF32Matmul, "requirements", lambda *_: ())
    with pytest.raises(NotEngagedError, match="a float32 matmul still has full precision"):
        trained([TF32Matmul("high")])


def test_the_probe_measures_full_float32_precision_on_a_cpu() -> None:
    assert matmul_error(torch.device("cpu")) < 1e-6


@pytest.mark.gpu
def test_matmuls_on_a_gpu_are_rounded_only_during_the_run() -> None:
    device = torch.device("cuda")
    technique = TF32Matmul()
    trained([technique], gpu=True)
    assert technique.evidence["matmul_relative_error"] > 1e-4
    assert matmul_error(device) < 1e-6
