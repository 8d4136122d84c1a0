"""The benchmark of single kernels: what it takes, its batch, and its table. It times only on a GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import micro


def test_lengths_have_the_distribution_of_reviews() -> None:
    found = micro.lengths(128, 256)
    assert len(found) == 128
    assert max(found) == 256
    assert 200 < sum(found) / 128 < 215
    assert min(micro.lengths(8000, 5000)) == 13


def test_arguments_are_parsed_as_settings_and_lists() -> None:
    settings, tried = micro.read_arguments(["rows=40", "dropout=0", "keys.ROWS=32,64", "keys.num_warps=4"])
    assert settings == micro.Settings(rows=40, dropout=0.0)
    assert tried == {"keys": {"ROWS": [32, 64], "num_warps": [4]}}
    for wrong in ("row=4", "rows=four", "kays.ROWS=3", "keys.ROWS=a"):
        with pytest.raises(SystemExit, match=f"{wrong}: expected integers for one of rows, .*keys.OPTION"):
            micro.read_arguments([wrong])


def test_options_are_tried_in_turn_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton comes with torch on Linux only")
    from composer_speedups.kernels import norm

    seen: list[dict[str, int]] = []

    def time(call: object) -> float:
        seen.append(dict(norm.BACKWARD))
        return 1.0

    monkeypatch.setattr(micro, "microseconds", time)
    case = micro.Case("norm_backward", lambda: None, lambda: None, 1)
    before = dict(norm.BACKWARD)
    tries = list(micro._tries([case], {"norm_backward": {"ROWS": [4, 8], "warps": [8]}}))
    assert [options for _, options, _ in tries] == [
        {},
        {"norm_backward.ROWS": 4, "norm_backward.warps": 8},
        {"norm_backward.ROWS": 8, "norm_backward.warps": 8},
    ]
    assert seen == [before, {"ROWS": 4, "warps": 8}, {"ROWS": 8, "warps": 8}]
    assert before == norm.BACKWARD


def test_a_row_is_a_table() -> None:
    kernel = {"name": "keys", "options": {"keys.ROWS": 4}, "us": 10.4, "torch_us": 20.6, "copy_us": 5.0, "tflops": None}
    assert micro.markdown({"kernels": [kernel]})[2] == "| keys | keys.ROWS=4 | 10 | 21 | 5 | – |"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_an_error() -> None:
    with pytest.raises(SystemExit, match="there is none here"):
        micro.main([])


@pytest.mark.gpu
def test_every_kernel_is_timed_beside_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[micro.Row] = []
    monkeypatch.setattr(micro, "append_row", lambda row, *_: rows.append(row))
    micro.main(["rows=4", "attention.num_stages=1,2"])
    assert [kernel["name"] for kernel in rows[0]["kernels"]] == [
        "attention",
        "attention_backward",
        "norm",
        "norm_backward",
        "gelu",
        "gelu_backward",
        "attention",
        "attention",
    ]
    assert all(kernel["us"] > 0 and kernel["torch_us"] > 0 for kernel in rows[0]["kernels"])
