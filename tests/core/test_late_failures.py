"""Exit codes and messages of programs, and a capture that fails after the first batch."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from composer_speedups import CUDAGraphs
from composer_speedups.algorithms.cuda_graphs import graphed_calls
from composer_speedups.algorithms.cuda_graphs.graphed_calls import GraphedCalls
from composer_speedups.core.errors import ConfigError, Refusal, RunFailedError
from composer_speedups.train.cli import exit_codes
from tests.helpers.common import trained
from tests.helpers.rerun import CannotRecord


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("no"), 2),
        (Refusal("x", "no", "fix"), 2),
        (RunFailedError("no"), 1),
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


@pytest.fixture
def failing_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable CUDA graphs on a CPU, with a capture that fails as on a GPU."""

    def install(model: Any, max_graphs: int) -> GraphedCalls:
        calls = GraphedCalls(model, model.forward, max_graphs, recorder=CannotRecord)
        calls.install("forward")
        return calls

    monkeypatch.setattr(CUDAGraphs, "needs", lambda *_: ())
    monkeypatch.setattr(graphed_calls, "install", install)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


@pytest.mark.usefixtures("failing_capture")
def test_a_failed_capture_fails_the_run() -> None:
    with pytest.raises(Refusal, match=r"cuda_graphs: the step cannot be captured \(operation not permitted"):
        trained([CUDAGraphs()])
