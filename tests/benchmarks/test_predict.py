"""The command line of benchmarks.predict. Its rates are measured on a GPU, not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import predict
from composer_speedups.core.errors import ConfigError, DataError


def test_help_prints_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    predict.main(["--help"])
    assert "RUN input=FILE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected RUN and then key=value"),
        (["runs/x"], "input is missing; add input=FILE"),
        (["runs/x", "--input=f.csv"], "did you mean 'input=f.csv'"),
    ],
)
def test_a_missing_argument_is_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        predict.main(arguments)


def test_a_file_without_texts_is_one_line() -> None:
    Path("f.csv").write_text("review\ngood\n")
    with pytest.raises(DataError, match=r"input: f\.csv has no column 'text' \(it has: review\); set input to another"):
        predict.main(["runs/x", "input=f.csv"])
