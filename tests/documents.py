"""Run the code blocks of a page as a reader would: Python in one namespace, YAML as configs, and commands."""

from __future__ import annotations

import re
import shlex
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.table_file import read_table
from composer_speedups import __main__ as version_command
from composer_speedups.core.command_line import parse_command_line, read_settings
from composer_speedups.core.errors import RunFailedError
from composer_speedups.core.registry import build_techniques
from composer_speedups.dashboards import __main__ as dashboards
from composer_speedups.predict import __main__ as predict
from composer_speedups.sweep import repeat, tune
from composer_speedups.sweep.tune import PREFIX, TuneConfig
from composer_speedups.train import application
from composer_speedups.train.cli import read_command_line
from composer_speedups.train.config.load import load_config
from tests.conftest import ROOT
from tests.helpers.jobs import SHORT

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_HEREDOC = re.compile(r"^cat > (\S+) <<'EOF'\n(.*?)^EOF\n", re.DOTALL | re.MULTILINE)
# One epoch of a few short samples. These settings follow a page's own, so they take precedence.
BRIEF = [*SHORT, "trainer.max_duration=1ep"]
# For tutorials, whose files have ten rows. There is no access to the hub.
_ON_OWN_FILES = (
    "model.init=random model.size=tiny data.tokenizer=wordpiece data.vocab_size=300 data.batch_size=4 plot=false "
    "scheduler.warmup=1ba algorithms.fused_layers=null algorithms.tf32_matmul=null algorithms.mixed_precision=null"
).split()
# "streaming" writes to a bucket, where tests/data/test_streams.py writes to a folder; lightning is in no extra.
_NOT_RUN = {"streaming", *(() if find_spec("lightning") else ("lightning",))}


class Block(NamedTuple):
    language: str
    code: str


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [Block(*block) for block in _BLOCK.findall(text)]


def run_blocks(blocks: list[Block], names: dict[str, Any]) -> None:
    """Run blocks in python, yaml and bash in the working directory; blocks in text are output.

    ``names`` is the namespace of the Python blocks.
    """
    for language, code in blocks:
        if language == "python" and _NOT_RUN.isdisjoint(re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE)):
            exec(compile(code, "a page", "exec"), names)
        elif language == "python":
            compile(code, "a page", "exec")
        elif language == "yaml":
            check_yaml(code)
        elif language == "bash":
            run_shell(code)
        else:
            assert language == "text", f"a block of language {language!r}: {code[:60]!r}"


def check_yaml(code: str) -> None:
    """Check that the block is a config or a part of one, and build its techniques."""
    Path("page.yaml").write_text(code)
    build_techniques(load_config("page.yaml").algorithms)


def run_shell(code: str) -> None:
    """Run the commands of a block in this process; installations are compared with pyproject.toml instead."""
    for name, content in _HEREDOC.findall(code):
        Path(name).write_text(content)
    for line in _HEREDOC.sub("", code).replace("\\\n", " ").splitlines():
        for command in line.split(" && "):
            words = shlex.split(command, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):  # variables of the environment
                del words[0]
            if words:
                _run_command(words)


def _run_command(words: list[str]) -> None:
    program, arguments = words[0], words[1:]
    if program == "composer":
        place = next(i for i, argument in enumerate(arguments) if argument in ("train.py", "composer-speedups-train"))
        _check_launcher(arguments[: place + 1])
        installed, arguments = arguments[place] != "train.py", arguments[place + 1 :]
        file = arguments[arguments.index("-f") + 1]
        assert installed or (ROOT / file).exists(), file
        read_command_line([str(ROOT / a) if a.startswith("yamls/") else a for a in arguments])
    elif program == "composer-speedups-train":
        _train(arguments)
    elif program == "composer-speedups-tune":
        _tune(arguments)
    elif program == "composer-speedups-repeat":
        with pytest.raises(RunFailedError):  # "this" ends at once, in place of train.py, and leaves no report
            repeat.main([*arguments, "seeds=1"], program="this")
    elif program == "composer-speedups-predict":
        predict.main(arguments)
    elif program == "composer-speedups-dashboards":
        assert "dry_run=true" in arguments, "a page must not need an account"
        dashboards.main(arguments)
    elif program == "python" and arguments[:2] == ["-m", "benchmarks.run"]:
        read_table(ROOT / "benchmarks" / "tables" / f"{arguments[2]}.yaml")
    elif program == "composer-speedups":
        _exits(version_command.command, arguments)
    else:
        assert words[:2] == ["pip", "install"], f"no such command: {shlex.join(words)}"
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        extras = re.findall(r"\[(.*?)\]", " ".join(words))
        assert {extra for names in extras for extra in names.split(",")} <= set(known), words


def _train(arguments: list[str]) -> None:
    if {"--help", "--print-config"} & set(arguments):
        _exits(application.main, arguments)
        return
    config = read_command_line(arguments)
    source = config.data.source
    if source == "builtin":
        brief = [*BRIEF, *(a for a in arguments if a.startswith("algorithms."))]
        application.main([*arguments, *brief])
    elif source == "files":
        application.main([*arguments, *_ON_OWN_FILES])
    else:
        assert source == "hub", "what a page trains must be there"


def _tune(arguments: list[str]) -> None:
    if "--help" in arguments:
        _exits(tune.main, arguments)
        return
    given = parse_command_line(arguments)
    _, overrides = read_settings(TuneConfig, given.overrides, PREFIX)
    load_config(given.file, overrides)


def _check_launcher(arguments: list[str]) -> None:
    from composer.cli.launcher import _get_parser

    is_command = _get_parser().parse_args(arguments).command_mode
    assert is_command == (arguments[-1] != "train.py"), arguments


def _exits(program: Any, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        program(arguments)
    assert stopped.value.code == 0, arguments
