"""Techniques that fail in the first batches: the run fails, or with ``warn`` it continues without them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composer_speedups import CUDAGraphs, Float8Linear, MixedPrecision, SDPAAttention
from composer_speedups.algorithms.cuda_graphs import cuda_graphs
from composer_speedups.algorithms.cuda_graphs.graphed_calls import GraphedCalls
from composer_speedups.algorithms.float8_linear.modules import RowPaddedFloat8Linear
from composer_speedups.core.errors import CannotRunError, ConfigError, NotEngagedError, TechniqueError
from composer_speedups.train import application
from composer_speedups.train.cli import exit_codes
from tests.conftest import ROOT
from tests.helpers.common import final_weights, make_trainer, tiny_bert, trained
from tests.helpers.forks import Fork
from tests.helpers.jobs import SHORT
from tests.helpers.rerun import CannotRecord
from tests.reference.tolerance import assert_near


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("no"), 2),
        (TechniqueError("x", "no", "fix"), 2),
        (CannotRunError("x", "no", "fix"), 1),
        (NotEngagedError("x", "no", "fix"), 1),
    ],
)
def test_a_failed_run_exits_with_1_and_a_bad_config_with_2(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os._exit", sys.exit)  # os._exit would end this process
    with pytest.raises(SystemExit) as exited, exit_codes():
        raise error
    assert exited.value.code == status
    assert capsys.readouterr().err == f"train.py: {error}\n"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("/usr/bin/composer-speedups-train", "composer-speedups-train"),
        ("composer-speedups-predict", "composer-speedups-predict"),
        ("/package/train/__main__.py", "program"),
    ],
)
def test_messages_begin_with_the_console_command_that_was_typed(
    typed: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os._exit", sys.exit)
    monkeypatch.setattr(sys, "argv", [typed])
    with pytest.raises(SystemExit), exit_codes("program"):
        raise ConfigError("no")
    assert capsys.readouterr().err == f"{shown}: no\n"


def _train(*arguments: str) -> None:
    """Run train.py with SDPA's requirements disabled, so that GPU-only kernels are tried on a CPU."""
    SDPAAttention.requirements = lambda *_: ()  # type: ignore[method-assign, assignment]
    with exit_codes():
        application.main(["-f", str(ROOT / "yamls" / "quickstart.yaml"), *SHORT, *arguments])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("on_unavailable", "status"), [("stop", 1), ("warn", 0)])
def test_train_py_fails_or_continues(on_unavailable: str, status: int) -> None:
    settings = [
        "trainer.device=cpu",
        "trainer.max_duration=2ba",
        "trainer.eval_batches=1",
        f"on_unavailable={on_unavailable}",
    ]
    settings.append("algorithms.sdpa_attention={backend: efficient}")
    done = Fork(lambda: _train(*settings)).wait()
    assert done.status == status, done.stderr[-3000:]
    if on_unavailable == "stop":
        line = done.stderr.splitlines()[-1]
        assert line.startswith("train.py: sdpa_attention: the efficient kernel cannot run on the first batch (")
        assert "Traceback" not in done.stderr
        assert not Path("runs/quickstart/report.json").exists()
        return
    entry = json.loads(Path("runs/quickstart/report.json").read_text())["algorithms"]["sdpa_attention"]
    assert entry["engaged"] is False
    assert "efficient kernel cannot run" in entry["evidence"]["unavailable"]


def test_with_warn_plain_linears_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Tensor:
        raise RuntimeError("no such kernel")

    bf16 = {"dtype": "bf16", "allow_cpu": True}
    technique = Float8Linear(emulate=True, on_unavailable="warn")
    trainer = make_trainer([MixedPrecision(**bf16), technique])  # type: ignore[arg-type]
    monkeypatch.setattr(RowPaddedFloat8Linear, "forward", fail)
    with pytest.warns(UserWarning, match="continuing without float8_linear: a float8 matmul cannot run here"):
        trainer.fit()
    trainer.close()
    assert technique.engaged is False
    assert technique.evidence["linears_restored"] == 12
    both: list[nn.Module] = [tiny_bert(), trainer.state.model.get_submodule("model")]
    stock, linears = ([m for m in model.modules() if isinstance(m, nn.Linear)] for model in both)
    assert [type(m) for m in linears] == [nn.Linear] * len(stock)
    assert [vars(m).keys() for m in linears] == [vars(m).keys() for m in stock]
    plain = trained([MixedPrecision(**bf16)])  # type: ignore[arg-type]
    torch.testing.assert_close(final_weights(trainer), final_weights(plain), rtol=0, atol=0)


@pytest.fixture
def failing_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable CUDA graphs on a CPU, with a capture that fails as on a GPU."""

    def apply(model: Any, max_graphs: int) -> GraphedCalls:
        calls = GraphedCalls(model, model.forward, max_graphs, recorder=CannotRecord)
        calls.install("forward")
        return calls

    monkeypatch.setattr(CUDAGraphs, "requirements", lambda *_: ())
    monkeypatch.setattr(cuda_graphs, "apply_cuda_graphs", apply)


@pytest.mark.usefixtures("failing_capture")
def test_a_failed_capture_fails_the_run() -> None:
    with pytest.raises(CannotRunError, match=r"cuda_graphs: the step cannot be captured \(operation not permitted"):
        trained([CUDAGraphs()])


@pytest.mark.usefixtures("failing_capture")
def test_with_warn_a_failed_capture_keeps_the_models_forward() -> None:
    technique = CUDAGraphs(on_unavailable="warn")
    with pytest.warns(UserWarning, match="continuing without cuda_graphs: the step cannot be captured"):
        trainer = trained([technique])
    assert technique.engaged is False
    assert "cannot be captured" in technique.evidence["unavailable"]
    assert_near(final_weights(trainer), final_weights(trained()))
