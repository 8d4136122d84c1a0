"""TF32: a flag without effect is detected; on a GPU, matmuls are rounded during the run only."""

from __future__ import annotations

import pytest
import torch

from composer_speedups import TF32Matmul
from composer_speedups.algorithms.tf32_matmul.tf32_matmul import matmul_error
from tests.helpers.common import assert_not_engaged, make_trainer, trained


@pytest.mark.pins
def test_a_flag_without_effect_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert matmul_error(torch.device("cpu")) < 1e-6
    monkeypatch.setattr(TF32Matmul, "needs", lambda *_: ())  # a CPU's matmuls have full precision also with "high"
    assert_not_engaged(make_trainer([TF32Matmul("high")]), "a float32 matmul still has full precision")


@pytest.mark.gpu
def test_matmuls_on_a_gpu_are_rounded_only_during_the_run() -> None:
    technique = TF32Matmul()
    trained([technique], gpu=True)
    assert technique.evidence["matmul_relative_error"] > 1e-4
    assert matmul_error(torch.device("cuda")) < 1e-6
