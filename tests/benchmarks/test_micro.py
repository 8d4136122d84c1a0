"""The benchmark of single kernels: its arguments, its batch, and its table. It times only on a GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import micro
from composer_speedups.core.errors import ConfigError


def test_lengths_have_the_distribution_of_reviews() -> None:
    lengths = micro.lengths(128, 256)
    assert len(lengths) == 128
    assert max(lengths) == 256
    assert 200 < sum(lengths) / 128 < 215
    assert min(micro.lengths(8000, 5000)) == 13


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("row=4", "unknown key 'row'; did you mean 'rows'"),
        ("rows=four", "rows must be an integer, not"),
        ("rows", "cannot read 'rows'; expected key=value"),
    ],
)
def test_a_wrong_argument_is_one_line(argument: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        micro.main([argument])


def test_a_row_is_a_table() -> None:
    kernel = {"name": "norm", "us": 10.4, "torch_us": 20.6, "copy_us": 5.0, "tflops": None}
    assert micro.markdown({"kernels": [kernel]})[2] == "| norm | 10 | 21 | 5 | – |"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_an_error() -> None:
    with pytest.raises(SystemExit, match="there is none here"):
        micro.main(["rows=40", "dropout=0"])


@pytest.mark.gpu
def test_every_kernel_is_timed_beside_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[micro.Row] = []
    monkeypatch.setattr(micro, "append_row", lambda row, *_: rows.append(row))
    micro.main(["rows=4"])
    assert [kernel["name"] for kernel in rows[0]["kernels"]] == [
        "attention",
        "attention_backward",
        "norm",
        "norm_backward",
        "gelu",
        "gelu_backward",
        "adapters_qkv_backward",
        "adapters_input_backward",
        "gelu_with_adapter",
        "gelu_backward_with_adapters",
    ]
    assert all(kernel["us"] > 0 and kernel["torch_us"] > 0 for kernel in rows[0]["kernels"])
