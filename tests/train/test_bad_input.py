"""More than 500 mutated configs: each is refused in one line, or passes every check."""

from __future__ import annotations

import resource
import subprocess
import sys
import warnings
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import pytest
import torch

from composer_speedups.core.engaging import check
from composer_speedups.core.errors import Refusal
from composer_speedups.core.registry import build_techniques
from composer_speedups.train.cli import exit_codes, read_command_line
from composer_speedups.train.trainer import open_device, run_of
from tests.conftest import ROOT
from tests.helpers.jobs import fork_train
from tests.train.mutated_configs import ODD_OVERRIDES, Mutation, files, overrides


def refusal(mutation: Mutation) -> str | None:
    """Return the error line of the checks that train.py makes before it builds anything; None if they pass."""
    Path("mutated.yaml").write_bytes(b"{}" if mutation.file is None else mutation.file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on_unavailable: warn
            config = read_command_line(["-f", "mutated.yaml", *mutation.arguments])
            techniques = build_techniques(config.algorithms, config.on_unavailable)
            check(techniques, run_of(config.trainer, open_device(config.trainer)))
    except Refusal as error:
        return str(error)
    return None


def check_all(mutations: Iterable[Mutation]) -> tuple[int, int]:
    """The number of mutations, and of those that passed. Fails on any exception other than Refusal."""
    tried = passed = 0
    for mutation in mutations:
        tried += 1
        try:
            line = refusal(mutation)
        except BaseException as error:
            raise AssertionError(f"{mutation.what!a}: {type(error).__name__}: {error}") from error
        if line is None:
            passed += 1
        else:
            for mistake in line.split("\n"):  # each has a line
                assert mistake.strip(), mutation.what
                assert len(mistake) <= 2000, mutation.what
    return tried, passed


def test_odd_files_and_overrides_are_refused_in_one_line_or_pass() -> None:
    check_all([*files(), *islice(overrides(17, 0), len(ODD_OVERRIDES))])


@pytest.mark.parametrize(
    ("seed", "each"),
    [pytest.param(17, 1, marks=pytest.mark.exhaustive), pytest.param(2311, 12, marks=pytest.mark.long)],
)
def test_mutated_configs_are_refused_in_one_line_or_pass(seed: int, each: int) -> None:
    """``pytest -m long -s`` prints the counts of thousands."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tried, passed = check_all([*files(), *overrides(seed, each)])
    assert tried >= 500
    assert 0 < passed < tried / 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19, "more than 512 MiB (in KiB)"
    assert not torch.cuda.is_initialized() or torch.cuda.max_memory_allocated() == 0
    print(f"{tried} configs: {tried - passed} refused, {passed} passed")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("runs_folder=/dev/null/x", "runs_folder: /dev/null/x/quickstart is not writable"),
        ("data.cache_dir=/dev/null/x", "data.cache_dir: /dev/null/x/tokenizers cannot be created"),
    ],
)
def test_errors_that_only_a_run_finds_are_one_line(override: str, message: str) -> None:
    done = fork_train("trainer.max_duration=1ba", override).wait()
    assert done.status == 2, done.stderr
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


WITHOUT_TORCH = """
import sys
from composer_speedups.core.errors import Refusal
from composer_speedups.{program} import main
try:
    main({arguments!r})
except Refusal as error:
    print(error, "torch" in sys.modules, "datasets" in sys.modules)
"""
COLUMN = (
    "data.train_file: a.csv has no column 'lable'; did you mean 'label'? (it has: text, label); set data.label_column"
)


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        ("train.application", ["data.train_file=none.csv"], "data.train_file: none.csv (relative to /"),
        ("train.application", ["data.train_file=a.csv", "model.name=./none"], "model.name: ./none (relative to /"),
        ("train.application", ["data.train_file=a.csv", "data.label_column=lable"], COLUMN),
        ("predict.__main__", ["none", "input=a.csv"], "RUN: none (relative to /"),
    ],
)
def test_missing_files_and_columns_are_noticed_before_imports(program: str, arguments: list[str], message: str) -> None:
    Path("a.csv").write_text("text,label\na,b\n")
    custom = ["-f", str(ROOT / "yamls" / "custom.yaml")] if program == "train.application" else []
    code = WITHOUT_TORCH.format(program=program, arguments=[*custom, *arguments])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(message)
    assert done.stdout.endswith(" False False\n")
    assert not Path("runs").exists()


def test_a_warning_is_one_line_without_its_place_in_the_source() -> None:
    before = warnings.formatwarning
    with exit_codes():
        said = warnings.formatwarning("first\nsecond", UserWarning, "a.py", 3)
        again = warnings.formatwarning("first\nsecond", UserWarning, "b.py", 4)
        internal = warnings.formatwarning("internal", FutureWarning, "a.py", 3)
    assert (said, again) == ("warning: first second\n", "")
    assert internal == "a.py:3: FutureWarning: internal\n"
    assert warnings.formatwarning is before


def test_ctrl_c_outside_of_training_ends_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, exit_codes("predict"):
        raise KeyboardInterrupt
    assert ended.value.code == 130
    assert capsys.readouterr().err == "predict: interrupted\n"
