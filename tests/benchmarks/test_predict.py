"""The command line of the benchmark of predict; GPU calls measure it."""

from __future__ import annotations

import pytest

from benchmarks import predict
from composer_speedups.core.errors import ConfigError


def test_help_prints_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    predict.main(["--help"])
    assert "RUN input=FILE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected RUN and then key=value"),
        (["runs/x"], "no texts; add input=FILE"),
        (["runs/x", "--input=f.csv"], "did you mean 'input=f.csv'"),
    ],
)
def test_a_missing_argument_is_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        predict.main(arguments)
