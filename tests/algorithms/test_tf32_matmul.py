"""TF32: the flag is set for the run and given back; on a GPU, matmuls really round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from composer.core import Event
from torch.utils.data import DataLoader

from composer_speedups import TF32Matmul, apply_tf32_matmul
from composer_speedups.core.errors import NotEngagedError, TechniqueError
from composer_speedups.core.operator_recorder import matmul_error
from tests.helpers.common import make_trainer, plain_batches


def test_the_function_sets_and_returns_the_setting_before() -> None:
    assert apply_tf32_matmul("high") == "highest"
    assert apply_tf32_matmul("highest") == "high"
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.pins
def test_a_cpu_is_refused() -> None:
    with pytest.raises(TechniqueError, match=r"compute capability 8\.0 or newer, and this run is on the cpu"):
        make_trainer([TF32Matmul()])


def test_the_flag_is_set_while_fitting_and_evaluating_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag's life, on a CPU that is told it may: the flag itself exists everywhere."""
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


def test_a_flag_that_does_nothing_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this CPU float32 matmuls do not round, whatever "high" says: just the case to catch."""
    monkeypatch.setattr(TF32Matmul, "requirements", lambda *_: ())
    trainer = make_trainer([TF32Matmul("high")])
    with pytest.raises(NotEngagedError, match="a float32 matmul still has full precision"):
        trainer.fit()
    trainer.close()


def test_other_precisions_are_refused() -> None:
    wrong: Any = "low"
    with pytest.raises(ValueError, match="precision must be 'high' or 'medium'"):
        TF32Matmul(wrong)


def test_the_probe_tells_float32_from_less() -> None:
    assert matmul_error(torch.device("cpu")) < 1e-6


@pytest.mark.gpu
def test_matmuls_round_to_tf32_on_a_gpu_and_only_while_the_technique_is_on() -> None:
    device = torch.device("cuda")
    technique = TF32Matmul()
    trainer = make_trainer([technique], gpu=True)
    trainer.fit()
    trainer.close()
    assert technique.evidence["matmul_relative_error"] > 1e-4
    assert matmul_error(device) < 1e-6
